"""Whether the tests of Harbor's tasks tell a solution from nothing, by running both."""

from areal_async.config.settings import Settings
from areal_async.doctor.preflight.findings import PreflightFinding, error, good, of_mistake, warning
from areal_async.environments.environment import make_environment
from areal_async.environments.harbor import HarborEnvironment
from areal_async.environments.harbor_tasks import HarborTask
from areal_async.errors import RolloutError, UserError

MOST_TRIED = 64
"""Tasks of one environment that are run."""


async def check_harbor(settings: Settings) -> list[PreflightFinding]:
    """Run the solution of each task, and nothing; the first should score 1 and the second 0."""
    findings: list[PreflightFinding] = []
    for task in settings.tasks:
        if task.workflow.startswith("harbor:"):
            check = f"tasks of {task.name}"
            try:
                made = make_environment(task.workflow, task.options_over(settings.env))
                assert isinstance(made, HarborEnvironment)
                findings += await _of_tasks(check, made)
            except UserError as mistake:
                findings.append(of_mistake(check, mistake))
    return findings


async def _of_tasks(check: str, environment: HarborEnvironment) -> list[PreflightFinding]:
    tasks = list(environment.tasks())
    wrong = [found for task in tasks[:MOST_TRIED] if (found := await _wrong_of(check, environment, task)) is not None]
    unsolved = [task.name for task in tasks if not task.has_solution]
    if unsolved:
        saw = f"{len(unsolved)} of {len(tasks)} tasks have no solution/solve.sh (the first is {unsolved[0]})"
        cure = "add one to each, else nobody knows whether its tests can be passed"
        wrong.append(warning(check, saw, cure))
    if wrong:
        return wrong
    left = f" (the first {MOST_TRIED} of them)" if len(tasks) > MOST_TRIED else ""
    return [good(check, f"{len(tasks)} tasks{left}: each solution scores 1, and nothing scores 0")]


async def _wrong_of(check: str, environment: HarborEnvironment, task: HarborTask) -> PreflightFinding | None:
    for is_solved, need in ((True, 1.0), (False, 0.0)) if task.has_solution else ((False, 0.0),):
        what = "its solution" if is_solved else "nothing"
        cure = f"mend {'its solution or ' if is_solved else ''}its tests, or leave the task out"
        try:
            got = await environment.score(task, is_solved=is_solved)
        except RolloutError as exc:
            return error(check, f"task {task.name}: {what} is not scored: {exc}", cure)
        if got != need:
            return error(check, f"task {task.name}: {what} scores {got:g}, need {need:g}", cure)
    return None
