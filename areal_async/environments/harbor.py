"""``harbor:PATH``: Harbor's task folders, each in a box: an agent works there, then the task's tests say what it did.

The agent is a coroutine in a file of the user's (by default ``workflows/terminal.py``, which ships): it is given the
row, the policy and the box, in which it has the task's files at ``/app``. Its shell is ended with all that runs before
the tests are put in, so that nothing of it takes part in the verdict but the files.
"""

import inspect
import json
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio.to_thread
from pydantic import Field

from areal_async.api import Policy, Rewards
from areal_async.environments.environment import Environment, Options
from areal_async.environments.harbor_tasks import MIB, HarborTask, read_task, read_tasks, reward_of, task_folder
from areal_async.environments.names import code_of
from areal_async.errors import RewardError, UserError, WorkflowError
from areal_async.protocol.types import Prompt
from areal_async.sandbox import Box, BoxLimits, End, sandbox
from areal_async.user_files import import_named, mistakes_in

WORKDIR: Final = "/app"
REWARD_TEXT, REWARD_TABLE = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
MAX_REWARD_BYTES: Final = 1 << 16
MARGIN_S: Final = 60.0
"""Of a box's time beyond the deadlines of agent and tests."""
OWN_WALL_S: Final = 20.0
"""For what is done in a box before agent and tests: it is not theirs, whose deadlines may be short."""
Agent = Callable[[Prompt, Policy, Box], Awaitable[None]]


class HarborOptions(Options):
    """Options of ``harbor:PATH``."""

    agent: str = ""
    """Python file with a coroutine ``(prompt, policy, box)``, with ``:name`` where that is not named like the file;
    empty for ``workflows/terminal.py``, which ships."""
    memory_bytes: int = Field(default=2048 * MIB, ge=16 * MIB)
    """Of a task that names no other."""
    disk_bytes: int = Field(default=512 * MIB, ge=16 * MIB)
    """Of a task that names no other, and at the most: files are in memory."""


class HarborEnvironment(Environment):
    """Each episode has a box of its own."""

    def __init__(self, place: str, options: HarborOptions) -> None:
        self._what = f"harbor:{place}"
        self._place = Path(place).expanduser()
        self._options = options
        self._agent_file = code_of(self._what, options.model_dump())

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield a row for each task folder: its name, its hash, and what the agent is asked.

        Raises:
            UserError: there is no agent, or as ``tasks``.
        """
        self._agent()
        for task in self.tasks():
            yield {
                "task_id": task.name,
                "sha256": task.sha256,
                "instruction": task.instruction,
            }

    @asynccontextmanager
    async def on_node(self) -> AsyncIterator[None]:
        """Import the agent: where there is none, no episode begins."""
        await anyio.to_thread.run_sync(self._agent)
        yield

    def tasks(self) -> Iterator[HarborTask]:
        """Yield the tasks.

        Raises:
            UserError: one cannot be read, or wants an image.
        """
        for task in read_tasks(self._place, what=self._what):
            if task.wants_image:
                raise UserError(
                    f"{self._what}: task {task.name} wants a container image (environment/Dockerfile, a compose "
                    "file or docker_image), which this version does not run; leave it out"
                )
            yield task

    async def episode(self, prompt: Prompt, policy: Policy) -> Rewards:
        """Have the agent work on a task, then run its tests.

        Raises:
            WorkflowError: the folder is not what the run has recorded.
            RewardError: the tests leave no reward, or do not end.
        """
        agent = self._agent()
        task = await anyio.to_thread.run_sync(self._task_of, prompt)
        async with sandbox(self._limits(task)) as box:
            await prepare(box, task)
            with anyio.move_on_after(task.settings.agent.timeout_sec) as deadline:
                await agent(prompt, policy, box)
            policy.info["env/out_of_time"] = float(deadline.cancelled_caught)
            return await verify(box, task)

    async def score(self, task: HarborTask, *, is_solved: bool) -> float:
        """Return what the tests say of the task's own solution, which has to be there, or of nothing.

        Raises:
            RewardError: as ``episode``.
        """
        async with sandbox(self._limits(task)) as box:
            await prepare(box, task)
            if is_solved:
                await put(box, task, "solution", "/solution")
                await box.run(
                    f"{_exports(task.settings.solution.env)}bash /solution/solve.sh",
                    timeout_s=task.settings.agent.timeout_sec,
                )
            return await verify(box, task)

    def _agent(self) -> Agent:
        """Return the agent; its file is imported once per process.

        Raises:
            UserError: there is no such file, or no such coroutine in it.
        """
        with mistakes_in(f"{self._what}: env.agent: importing {self._agent_file}"):
            module, name = import_named(str(Path(self._agent_file).expanduser()), what=f"{self._what}: env.agent")
        agent: Agent | None = getattr(module, name, None)
        if not inspect.iscoroutinefunction(agent):
            raise UserError(
                f"{self._what}: env.agent: got {self._agent_file} without a coroutine {name}, need "
                f"async def {name}(prompt, policy, box)"
            )
        return agent

    def _task_of(self, prompt: Prompt) -> HarborTask:
        task = read_task(task_folder(self._place, str(prompt["task_id"])), what=self._what)
        if task.sha256 != prompt["sha256"]:
            raise WorkflowError(f"{self._what}: task {task.name} has another content than at the start of the run")
        return task

    def _limits(self, task: HarborTask) -> BoxLimits:
        place = task.settings.environment
        deadlines = (task.settings.agent.timeout_sec, task.settings.verifier.timeout_sec)
        return BoxLimits(
            wall_s=max(deadlines),
            cpu_s=int(max(deadlines)) + 1,
            memory_bytes=place.bytes_of("memory", self._options.memory_bytes),
            disk_bytes=min(place.bytes_of("storage", self._options.disk_bytes), self._options.disk_bytes),
            box_wall_s=sum(deadlines) + MARGIN_S,
            box_cpu_s=16 * sum(deadlines),
        )


async def prepare(box: Box, task: HarborTask) -> None:
    """Put a task's files where its agent works, and have the shell there.

    Raises:
        WorkflowError: the box was not made ready.
    """
    await put(box, task, "environment", WORKDIR)
    done = await box.run(f"mkdir -p {WORKDIR} /logs/agent /logs/verifier && cd {WORKDIR}", timeout_s=OWN_WALL_S)
    if done.end is not End.ENDED or done.status != 0:
        raise WorkflowError(
            f"task {task.name}: its box was not made ready: {done.end}, status {done.status}; {done.text[-400:]}"
        )


async def put(box: Box, task: HarborTask, part: str, place: str) -> None:
    """Write the files of one of a task's folders into a box.

    Raises:
        WorkflowError: there is no room for them, or something that an agent has made is in their way.
    """
    for name, content, mode in await anyio.to_thread.run_sync(lambda: list(task.files(part))):
        try:
            await box.write(f"{place}/{name}", content, mode=mode)
        except OSError as exc:
            raise WorkflowError(
                f"task {task.name}: its box of {box.limits.disk_bytes // MIB} MiB cannot be given {part}/{name} "
                f"({len(content):,} bytes): {exc.strerror}"
            ) from exc


async def verify(box: Box, task: HarborTask) -> float:
    """Return what the task's tests say of a box in which nobody works any more.

    Raises:
        RewardError: they leave no reward, or do not end.
    """
    what = f"task {task.name}: tests/test.sh"
    await box.restart(has_more_room=True)
    # Nothing that stands there is theirs. It is moved, under a name that nobody knew: to remove it may take for ever.
    aside = f"/{secrets.token_hex(8)}"
    cleared = await box.run(
        f"chmod u+rwx / /tests /logs; mv -T /tests {aside}-tests; mv -T /logs {aside}-logs; "
        "mkdir /tests /logs /logs/verifier",
        timeout_s=OWN_WALL_S,
    )
    if cleared.end is not End.ENDED:
        raise RewardError(f"{what}: the place for them was not made: {cleared.end} ({OWN_WALL_S:g} s)")
    if cleared.status != 0:
        raise RewardError(f"{what}: its box has no place for them: {cleared.text[-400:]!r}")
    await put(box, task, "tests", "/tests")
    # nor is what an interpreter would load from the home of who worked here
    done = await box.run(
        f"cd {WORKDIR}; export PYTHONNOUSERSITE=1; {_exports(task.settings.verifier.env)}bash /tests/test.sh",
        timeout_s=task.settings.verifier.timeout_sec,
    )
    if done.end is not End.ENDED:
        raise RewardError(f"{what}: {done.end} ({task.settings.verifier.timeout_sec:g} s); {done.text[-400:]}")
    text, table = await _read(box, REWARD_TEXT), await _read(box, REWARD_TABLE)
    reward = reward_of(text, _table(table))
    if reward is None:
        left = (table or text or b"nothing").decode(errors="replace")
        raise RewardError(f"{what}: left {left!r:.80} as reward, need a number; it said {done.text[-400:]!r}")
    return reward


async def _read(box: Box, path: str) -> bytes | None:
    try:
        return await box.read(path, most_bytes=MAX_REWARD_BYTES)
    except OSError:
        return None


def _table(text: bytes | None) -> Mapping[str, Any] | None:
    try:
        table = json.loads(text or b"null")
    except (ValueError, RecursionError):
        return None
    return table if isinstance(table, dict) else None


def _exports(variables: Mapping[str, str]) -> str:
    return "".join(f"export {shlex.quote(name)}={shlex.quote(value)}; " for name, value in variables.items())


def environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Return the environment of the tasks below a folder."""
    return HarborEnvironment(name, HarborOptions.read(options, what=f"harbor:{name}"))
