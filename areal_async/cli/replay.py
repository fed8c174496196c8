"""``replay``: train again from what a run has archived, without inference, and hold it against what was recorded.

With nothing changed every loss must come out as it did. Where a setting is changed, the differences are only told.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from areal_async.algorithms.graphs import step_graph
from areal_async.cli.ranks import own_rank, run_ranks
from areal_async.cli.starting.checks import check_model
from areal_async.config.resumed import differences
from areal_async.config.settings import AlgorithmSettings, Settings
from areal_async.config.sources import from_command_line, override_settings, resolve
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.process.stdio import say
from areal_async.telemetry import log
from areal_async.trainer.output.archive_reader import read_lines, whole_steps

if TYPE_CHECKING:
    from areal_async.trainer.replay import StepDifference

SUFFIX = "-replay"
IRRELEVANT = (
    "run.name", "run.directory", "run.watchdog_s", "run.on_stall", "run.max_failed_groups", "trainer.max_restarts",
    "trainer.keep_*", "eval.*", "tasks.*.eval.*", "metrics.*", "health.*", "launch.*", "bus.*",
)  # fmt: skip
"""Settings that no number of a replay depends on, as patterns."""


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Replay, and return 1 where the losses of an unchanged run come out otherwise."""
    if arguments.run is None:
        raise UserError("replay: got no run; name --run NAME")
    directory = find_run(arguments.run)
    recorded, settings = load_replay_settings(directory, overrides)
    num_archived = len(whole_steps(directory.path))
    num_steps = num_archived if arguments.steps is None else arguments.steps
    if not 1 <= num_steps <= num_archived:
        raise UserError(f"--steps: got {num_steps}, need 1 to {num_archived}, the archived steps of {arguments.run}")
    check_model(settings.model.path)
    step_graph(settings)
    rank = own_rank()
    logs = settings.run_directory / "logs"
    if rank is None and settings.trainer.num_ranks > 1:
        words = ["--run", str(directory.path), "--steps", str(num_steps), *overrides]
        return run_ranks("replay", words, settings.trainer, settings.launch, logs=logs)
    log.configure(f"replay-{rank or 0}", logs)
    from areal_async.trainer.replay import run_replay  # torch, not before the settings are known to be right

    changed = changed_settings(recorded, settings)
    differences = run_replay(settings, directory.path, num_steps=num_steps, changed=changed)
    if rank:
        return 0
    say(f"{num_steps} steps replayed into {settings.run_directory}, the model into {settings.run_directory / 'model'}")
    for line in rate_changes(read_lines(directory.path), read_lines(settings.run_directory)):
        say(line)
    return judge(differences, changed)


def load_replay_settings(directory: RunDirectory, overrides: Sequence[str]) -> tuple[Settings, Settings]:
    """Return the settings of the recorded run, and those of its replay, which lies beside it.

    Raises:
        UserError: the replay would write into a run.
    """
    recorded = directory.read_settings()
    name = directory.path.name
    own = ["--run.name", f"{name}{SUFFIX}", "--run.directory", str(directory.path.parent)]
    settings = override_settings(recorded, [*own, *overrides])
    if settings.algorithm.name != recorded.algorithm.name:
        # The run's file has every knob of its preset, which would win over those of the new one.
        data = recorded.model_dump(mode="json") | {"algorithm": own_knobs(recorded.algorithm)}
        settings = resolve(data, from_command_line([*own, *overrides], Settings), Settings)
    if (settings.run_directory / "bus").exists() or settings.run_directory.absolute() == directory.path:
        raise UserError(
            f"run.name: got {settings.run.name}, need a name that no run has, for the replay writes there; choose "
            "another --run.name"
        )
    return recorded, settings


def own_knobs(algorithm: AlgorithmSettings) -> dict[str, Any]:
    """Return what was chosen beside the preset: all that another preset is not to decide. Pure."""
    preset = AlgorithmSettings.model_validate({"name": algorithm.name}).model_dump(mode="json")
    chosen = algorithm.model_dump(mode="json")
    return {name: value for name, value in chosen.items() if value != preset[name]}


def changed_settings(recorded: Settings, settings: Settings) -> list[str]:
    """Return the names of the settings that a replay's numbers may depend on and that differ. Pure."""
    changed = [one.name for one in differences(recorded, settings)]
    return [name for name in changed if not any(fnmatchcase(name, pattern) for pattern in IRRELEVANT)]


def rate_changes(recorded: Sequence[Mapping[str, Any]], replayed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tell from which step on the recorded learning rate is another: it was changed while the run was live. Pure."""
    for before, now in zip(recorded, replayed, strict=False):
        if "lr" in before and not math.isclose(before["lr"], now["lr"], rel_tol=1e-4):
            return [f"from step {now['step']} on the recorded learning rate was {before['lr']:g}, here {now['lr']:g}"]
    return []


def judge(differences: Sequence["StepDifference"], changed: Sequence[str]) -> int:
    """Tell the largest difference; return 1 where nothing was changed and it is too large."""
    from areal_async.trainer.replay import TOLERANCE

    worst = max(differences, key=lambda one: one.relative, default=None)
    if worst is None:
        say("nothing to compare: the recorded run has no losses")
        return 0
    told = (
        f"largest difference {worst.relative:.2g}: step {worst.step} recorded {worst.name} {worst.recorded:.9g}, "
        f"replayed {worst.replayed:.9g}"
    )
    if changed:
        say(f"{told}; changed: {', '.join(changed)}")
        return 0
    is_same = worst.relative <= TOLERANCE
    verdict = "reproduced" if is_same else "NOT reproduced"
    say(f"losses {verdict}: {told}; need at most {TOLERANCE:g}, relative")
    return 0 if is_same else 1
