"""Whether the model, the data and the workflow can be read, by reading them as the run will."""

from collections.abc import Iterator

from areal_async.config.settings import DatasetSettings, Settings
from areal_async.data.rows import load_rows
from areal_async.doctor.preflight.findings import PreflightFinding, error, good, guarded
from areal_async.doctor.preflight.memory import ModelSize
from areal_async.errors import WorkflowError
from areal_async.process.hub import local_model
from areal_async.rollout.policy.text import load_codec
from areal_async.rollout.user_code.workflows import check_all_taken, load_workflow, policies_taken


def check_models(settings: Settings) -> tuple[list[PreflightFinding], dict[str, ModelSize]]:
    """Look at the model of each role; return its size where it could be read."""
    findings: list[PreflightFinding] = []
    sizes: dict[str, ModelSize] = {}

    def look(role: str, path: str) -> Iterator[PreflightFinding]:
        size = ModelSize.read(local_model(path))
        if role in ("actor", "critic", "reference"):
            sizes[role] = size
        yield good(
            f"model {role}",
            f"{path}: {size.num_parameters / 1e6:,.1f} M parameters, {size.num_layers} layers, "
            f"context of {size.context:,} tokens",
        )

    wanted = {"actor": settings.model.path}
    for role in ("critic", "reference"):
        if role in settings.algorithm.needs_models:
            wanted[role] = settings.model.for_role(role).path
    wanted |= {f"of policy {name}": str(one.path) for name, one in settings.frozen_policies.items()}
    wanted |= {f"of arm {name}": one.path for name, one in settings.arms.items()}
    for role, path in wanted.items():
        findings += guarded(f"model {role}", look, role, path)
    return findings, sizes


def check_template(settings: Settings) -> Iterator[PreflightFinding]:
    """Render one conversation with the model's own chat template, as every turn will be."""
    codec = load_codec(settings.model.path, settings.rollout.template)
    try:
        tokens = codec.encode(codec.render([{"role": "user", "content": "one and one?"}]))
    except WorkflowError as exc:
        yield error("chat template", f"it cannot write a conversation: {exc}", "give the tokenizer a chat template")
        return
    yield good("chat template", f"writes a question of two words and a mark as {len(tokens)} tokens")


def check_data(settings: Settings) -> Iterator[PreflightFinding]:
    """Load every data set and count its rows."""
    for task in settings.tasks:
        check = f"data of {task.name}"
        yield from guarded(check, _rows, check, settings.dataset_of(task))
    for task, dataset, limit in settings.held_out:
        check = f"held-out data of {task.name}"
        yield from guarded(check, _rows, check, dataset, limit)


def check_workflows(settings: Settings) -> Iterator[PreflightFinding]:
    """Import every workflow as a node will."""
    taken: set[str] = set()
    for task in settings.tasks:
        workflow = load_workflow(task.workflow, policies=settings.policies, env=settings.env_of(task))
        taken.update(policies_taken(workflow, settings.policies))
        yield good(f"workflow {task.name}", f"{task.workflow} loads")
    check_all_taken(settings.policies, taken)


def _rows(check: str, dataset: DatasetSettings, limit: int | None = None) -> Iterator[PreflightFinding]:
    rows = load_rows(dataset, shows_progress=False)
    used = f", {min(limit, len(rows)):,} of them used" if limit is not None else ""
    yield good(check, f"{dataset.source}: {len(rows):,} rows with {', '.join(rows.column_names)}{used}")
