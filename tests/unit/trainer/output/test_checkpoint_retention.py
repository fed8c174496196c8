"""Checkpoints are kept by newness, by number and by merit; what a restart needs stays whatever the rules are."""

import fcntl
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from areal_async.config.health import GateSettings
from areal_async.config.live import settings_now
from areal_async.config.settings import Settings
from areal_async.process.atomic_folders import LEDGER, held
from areal_async.protocol.run_state import Change, Changes
from areal_async.protocol.types import Version
from areal_async.trainer.output.checkpoint_retention import awaited, keep
from areal_async.versions import tags
from areal_async.versions.best import by_accuracy, by_reward, find_best
from areal_async.versions.tags import Tag


class Run:
    """A run's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "checkpoints").mkdir()

    def has(self, *versions: str) -> None:
        for version in versions:
            (self.path / "checkpoints" / version).mkdir()
            (self.path / "checkpoints" / version / "ledger").touch()

    def trained(self, *rewards: float, lineage: int = 1, first: int = 1, **more: object) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            for step, reward in enumerate(rewards, start=first):
                line = {"step": step, "weights_version": f"{lineage}-{step}", "reward_mean": reward, **more}
                file.write(json.dumps(line) + "\n")

    def evaluated(self, version: str, accuracy: float, workflow: str = "w") -> None:
        with (self.path / "eval.jsonl").open("a") as file:
            file.write(json.dumps({"eval_id": version, "accuracy": accuracy, "workflow": workflow}) + "\n")

    def keep(self, recorded: str, **trainer: Any) -> list[str]:
        keep(self.path, settings_of(**trainer), recorded=Version.parse(recorded))
        folders = [path for path in (self.path / "checkpoints").iterdir() if not path.is_symlink()]
        return sorted((path.name for path in folders), key=Version.parse)

    @property
    def best(self) -> str:
        return (self.path / "checkpoints" / "best").resolve().name


def settings_of(**trainer: Any) -> Settings:
    return Settings.model_validate(
        {
            "trainer": {"checkpoint_every_steps": 2, **trainer},
            "eval": {"every_steps": 2, "dataset": {"path": "held-out"}},
            "tasks": [{"workflow": "w.py", "dataset": {"path": "rows"}}],
        }
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_newest_stay(run: Run) -> None:
    run.has("1-2", "1-4", "1-10", "2-6")

    assert run.keep("2-6", keep_checkpoints=2) == ["1-10", "2-6"]


def test_every_so_many_steps_one_stays_for_good(run: Run) -> None:
    run.has("1-2", "1-4", "1-6", "1-8", "1-10")

    assert run.keep("1-10", keep_checkpoints=1, keep_every_steps=4) == ["1-4", "1-8", "1-10"]


def test_what_a_restart_begins_from_stays(run: Run) -> None:
    run.has("1-2", "1-4", "1-6")

    assert run.keep("1-2", keep_checkpoints=1) == ["1-2", "1-6"]


def test_what_has_a_tag_stays_until_it_has_none(run: Run) -> None:
    run.has("1-2", "1-4", "1-6", "1-8")
    tags.write(run.path, Tag(tag="champion", version="1-2"))
    tags.write(run.path, Tag(tag="candidate", version="1-4"))

    assert run.keep("1-8", keep_checkpoints=1) == ["1-2", "1-4", "1-8"]
    tags.write(run.path, Tag(tag="champion", version="1-8"))
    tags.write(run.path, Tag(tag="candidate", version=""))
    assert run.keep("1-8", keep_checkpoints=1) == ["1-8"]


def test_what_gets_a_tag_while_others_are_deleted_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gives a tag holds the checkpoint, so that it is there: from then on the tag must be seen."""
    run.has("1-2", "1-4", "1-6")
    lock = fcntl.flock

    def after_a_tag(file: int, operation: int) -> None:
        monkeypatch.setattr("fcntl.flock", lock)
        with held(run.path / "checkpoints" / "1-2", LEDGER) as is_there:
            assert is_there
            tags.write(run.path, Tag(tag="champion", version="1-2"))
        lock(file, operation)

    monkeypatch.setattr("fcntl.flock", after_a_tag)

    assert run.keep("1-6", keep_checkpoints=1) == ["1-2", "1-6"]


def test_where_tags_cannot_be_read_nothing_is_deleted(run: Run) -> None:
    run.has("1-2", "1-4", "1-6")
    (run.path / "tags.jsonl").write_text("{}\n")

    assert run.keep("1-6", keep_checkpoints=1) == ["1-2", "1-4", "1-6"]


def test_the_best_by_reward_stays_and_is_named(run: Run) -> None:
    run.has("1-2", "1-4", "1-6", "1-8")
    run.trained(0.1, 0.1, 0.9, 0.5, 0.6, 0.6, 0.2, 0.2)

    assert run.keep("1-8", keep_checkpoints=1, keep_best="reward") == ["1-4", "1-8"]
    assert run.best == "1-4"
    run.has("1-10")
    run.trained(0.9, 0.9, first=9)
    assert run.keep("1-10", keep_checkpoints=1, keep_best="reward") == ["1-10"]
    assert run.best == "1-10"


def test_the_best_by_accuracy_stays_and_is_named(run: Run) -> None:
    run.has("1-2", "1-4", "1-6", "1-8")
    run.trained(*[0.0] * 8)
    for version, accuracy in {"1-0": 0.9, "1-2": 0.3, "1-5": 0.7, "1-6": 0.4, "1-8": 0.2}.items():
        run.evaluated(version, accuracy)
        run.evaluated(version, accuracy - 0.1, workflow="another")

    assert run.keep("1-8", keep_checkpoints=1, keep_best="accuracy") == ["1-4", "1-8"]
    assert run.best == "1-4"


def test_checkpoints_wait_for_the_evaluations_that_are_due_since_an_operator_changed_the_rhythm(run: Run) -> None:
    run.has("1-2", "1-4", "1-6", "1-8", "1-10", "1-12")
    run.trained(*[0.0] * 12)
    run.evaluated("1-2", 0.5)
    given = settings_of(keep_checkpoints=1, keep_best="accuracy")
    change = Changes(by_setting={"eval.every_steps": Change(value=3, given=2)})

    keep(run.path, settings_now(given, change), recorded=Version.parse("1-12"))

    left = {path.name for path in (run.path / "checkpoints").iterdir() if not path.is_symlink()}
    assert left == {"1-2", "1-6", "1-12"}, "of 1-8 and 1-10 no evaluation will speak"


def test_a_checkpoint_that_the_gate_may_be_about_to_promote_stays(run: Run) -> None:
    run.has("1-2", "1-4", "1-6", "1-8", "1-10", "1-12")
    run.trained(*[0.0] * 12)
    run.evaluated("1-2", 0.5)
    run.evaluated("1-5", 0.5)
    given = settings_of(keep_checkpoints=1)
    gated = given.model_copy(update={"gate": GateSettings(action="promote")})

    keep(run.path, gated, recorded=Version.parse("1-12"))

    left = {path.name for path in (run.path / "checkpoints").iterdir()}
    assert left == {"1-4", "1-10", "1-12"}, "1-4 is being judged, and the newest two that are due wait for that"


def test_an_evaluation_that_the_run_went_back_behind_is_none_that_a_checkpoint_waits_for(run: Run) -> None:
    run.has("1-2", "1-6", "2-2", "2-4", "2-5")
    run.trained(0.0, 0.0)
    run.trained(0.0, 0.0, 0.0, first=3, lineage=2)
    for version in ("1-2", "1-6"):
        run.evaluated(version, 0.5)

    left = run.keep("2-5", keep_checkpoints=1, keep_best="accuracy")

    assert left == ["1-2", "2-4", "2-5"]


def test_a_checkpoint_is_judged_by_the_interval_that_was_in_force_at_its_step(run: Run) -> None:
    """The file says 2; an operator had it at 1 from step 3 on, and at 4 from step 5 on."""
    run.has("1-2", "1-3", "1-4", "1-8")
    run.trained(0.5, 0.5)
    run.trained(0.0, 0.9, first=3, checkpoint_every_steps=1)
    run.trained(0.0, 0.0, 1.0, 1.0, first=5, checkpoint_every_steps=4)

    assert find_best(run.path, settings_of(keep_best="reward")) == Version(1, 4)

    for version, accuracy in {"1-2": 0.5, "1-3": 0.2, "1-7": 0.9, "1-8": 0.4}.items():
        run.evaluated(version, accuracy)
    assert find_best(run.path, settings_of(keep_best="accuracy")) == Version(1, 4), "of which 1-7 speaks"


def test_weights_that_were_given_up_are_not_the_best(run: Run) -> None:
    run.has("1-2", "1-4", "2-4")
    run.trained(0.1, 0.1)
    run.trained(0.0, 0.0, lineage=2, first=3)

    best = find_best(run.path, settings_of(keep_best="reward"))

    assert best == Version(1, 2), "the rewards of steps 3 and 4 are the second lineage's"


def test_a_line_cut_short_says_nothing(run: Run) -> None:
    run.has("1-2")
    run.trained(0.1, 0.1)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "weights_ver')

    assert find_best(run.path, settings_of(keep_best="reward")) == Version(1, 2)


def test_a_run_without_checkpoints_has_no_best(run: Run) -> None:
    assert find_best(run.path, settings_of(keep_best="reward")) is None
    assert find_best(run.path, settings_of()) is None


def test_a_reward_is_of_the_steps_before_the_checkpoint() -> None:
    rewards = {1: 1.0, 2: 3.0, 3: 0.0, 4: 4.0}

    values = by_reward([Version(1, 1), Version(1, 4), Version(1, 9)], rewards, every_steps=lambda step: 2)

    assert values == {Version(1, 1): 1.0, Version(1, 4): 2.0}


def test_an_evaluation_speaks_of_the_newest_checkpoint_before_it_and_the_first_one_counts() -> None:
    checkpoints = [Version(1, 10), Version(1, 20), Version(1, 30)]

    values = by_accuracy(checkpoints, {0: 0.1, 12: 0.2, 19: 0.3, 20: 0.4, 45: 0.5}, every_steps=lambda step: 10)

    assert values == {Version(1, 10): 0.2, Version(1, 20): 0.4}


def test_a_few_checkpoints_wait_for_their_evaluation() -> None:
    checkpoints = [Version(1, step) for step in (10, 15, 20, 30, 40)]

    assert awaited(checkpoints, [Version(1, 10)], every_steps=10) == {Version(1, 30), Version(1, 40)}
    assert awaited(checkpoints, [Version(1, 31)], every_steps=10) == {Version(1, 40)}
    assert awaited([], [], every_steps=10) == set()


def test_accuracy_without_evaluations_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_best: got accuracy with eval.every_steps=20 and no held-out data set"):
        Settings.model_validate({"trainer": {"keep_best": "accuracy"}})


def test_a_best_that_there_is_no_more_is_not_named(run: Run) -> None:
    run.has("1-2", "1-4")
    run.trained(0.1, 0.1)
    run.keep("1-4", keep_best="reward")
    assert run.best == "1-2"
    (run.path / "metrics.jsonl").unlink()

    run.keep("1-4", keep_best="reward")

    assert not (run.path / "checkpoints" / "best").is_symlink()


def test_to_keep_the_best_of_a_long_run_takes_no_more_memory_than_its_rewards(run: Run) -> None:
    run.has("1-4999", "1-5000")
    run.trained(*(number / 5000 for number in range(5000)), loss={str(number): 0.5 for number in range(100)})

    peaks = {keep_best: _peak_bytes(run, keep_best) for keep_best in ("reward", None)}

    assert (run.path / "metrics.jsonl").stat().st_size > 5 << 20
    assert peaks["reward"] < 2 << 20
    assert peaks[None] < 128 << 10


def _peak_bytes(run: Run, keep_best: str | None) -> int:
    run.keep("1-5000", keep_best=keep_best)  # what is imported, or made once
    tracemalloc.start()
    try:
        run.keep("1-5000", keep_best=keep_best)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
