"""A recorded run trains again as it did: from the surviving lineage's archive alone, held to its losses."""

import json
import shutil
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from areal_async.cli.replay import changed_settings, judge, load_replay_settings, rate_changes
from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory
from areal_async.protocol.types import Metrics, Version
from areal_async.trainer import replay
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.output.archive_reader import (
    ArchivedTrajectory,
    archive_files,
    find_archived,
    read_recorded,
    whole_steps,
)
from areal_async.trainer.output.archived_images import read_images
from areal_async.trainer.packing.rows import TrainRow
from areal_async.trainer.replay import Replay, StepDifference, compare, slot_of
from tests.unit.trainer.archives import (
    ADVANTAGES,
    LENGTH,
    NUM_STEERED,
    PROMPT,
    REWARDS,
    archive_seeing_step,
    archive_step,
    line,
    temperatures_of,
    trajectory,
    write_lines,
)
from tests.unit.trainer.models import VOCAB, save_model
from tests.unit.trainer.seeing import png, save_seeing_model, size_of


def _settings(model: Path, directory: Path, **algorithm: object) -> Settings:
    return Settings.model_validate(
        {
            "run": {"name": "hand", "directory": str(directory), "steps": 2},
            "rollout": {"sampling": {"temperature": 0.8}},
            "model": {"path": str(model), "dtype": "float32"},
            "trainer": {"lr": 1e-2, "token_budget": 64},
            "algorithm": algorithm,
        }
    )


def test_payload_that_is_not_stored_any_more_is_found_in_the_archive_by_its_id(tmp_path: Path) -> None:
    trained = archive_step(tmp_path, 2)
    folder = tmp_path / "trajectories"
    (path,) = folder.glob("step-*.parquet")
    (folder / "abandoned").mkdir()
    path.rename(folder / "abandoned" / path.name)  # as a lineage that goes back to an older checkpoint does
    (folder / "step-000002-9-0.parquet").write_bytes(b"cut short")
    first, *_ = trained.values()

    found, images = find_archived(tmp_path, 2, {first.slot.sample_uid, "another"})

    assert not images
    assert list(found) == [first.slot.sample_uid]
    (sequence,), (wanted,) = found[first.slot.sample_uid].sequences, first.sequences
    assert all(
        np.array_equal(getattr(sequence, name), getattr(wanted, name))
        for name in ("token_ids", "loss_mask", "logprobs", "versions", "temperatures")
    )
    assert find_archived(tmp_path, 3, {first.slot.sample_uid}) == ({}, {})


def _record(directory: Path, step: int, *, max_staleness: int = 2, masks_stale: bool = False) -> list[TrainRow]:
    """Archive the batch of one step; return what is to be trained of it, made by hand."""
    trajectories = archive_step(directory, step, max_staleness=max_staleness, masks_stale=masks_stale)
    rows = []
    for place, one in trajectories.items():
        (sequence,) = one.sequences
        ages = np.array([0] * PROMPT + [min(1, step - 1)] * 4 + [0] * 4)
        rows.append(
            TrainRow(
                token_ids=sequence.token_ids,
                loss_mask=sequence.loss_mask & (ages <= max_staleness),
                behave_logprobs=sequence.logprobs,
                advantage=float(np.float32(ADVANTAGES[place])),
                current_mask=sequence.loss_mask & (ages == 0),
                ages=ages,
                temperature=0.8 if place == 0 else temperatures_of(place),
                index=place,
            )
        )
    return rows


def _step(replay: Replay, recorded: Seq[ArchivedTrajectory], step: int) -> Metrics:
    return anyio.run(replay.step, recorded, Version(1, step))


def _engines(settings: Settings, ranks: Ranks) -> Engines:
    return Engines.for_run(settings, ranks)


def test_the_archive_trains_what_its_rows_say(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    settings = _settings(model, tmp_path)
    by_hand = _engines(settings, ranks).actor
    replay = Replay(settings, engines=_engines(settings, ranks), ranks=ranks)
    for step in (1, 2):
        rows = _record(tmp_path, step)
        write_lines(tmp_path, *map(line, range(1, step + 1)))
        wanted = by_hand.train_step(rows, step=step, total_steps=2)

        made = _step(replay, read_recorded(whole_steps(tmp_path)[-1][1]), step)

        assert made["loss"] == pytest.approx(wanted.loss, rel=1e-8)
        assert made["grad_norm"] == pytest.approx(wanted.grad_norm, rel=1e-5)
        assert made["staleness_mean"] == (step - 1) / 2
        assert made["num_current_tokens"] == len(REWARDS) * (LENGTH - PROMPT) / step - NUM_STEERED
        assert made["steered_tokens"] == NUM_STEERED
        assert made["num_tokens"] == len(REWARDS) * (LENGTH - PROMPT)


def test_tokens_that_were_masked_for_their_age_are_masked_again(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    settings = _settings(model, tmp_path)
    rows = _record(tmp_path, 2, max_staleness=0, masks_stale=True)
    (recorded,) = [read_recorded(list(tmp_path.glob("trajectories/*")))]

    made = _step(Replay(settings, engines=_engines(settings, ranks), ranks=ranks), recorded, 2)

    wanted = _engines(settings, ranks).actor.train_step(rows, step=2, total_steps=2)
    assert made["stale_tokens_masked"] == 4 * len(REWARDS)
    assert made["loss"] == pytest.approx(wanted.loss, rel=1e-8)
    (sequence,) = recorded[0].trajectory.sequences
    assert recorded[0].trained_mask(sequence) == rows[0].loss_mask.tolist()


def test_another_algorithm_sees_the_archived_rewards_otherwise(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    rows = _record(tmp_path, 1)
    recorded = read_recorded(list(tmp_path.glob("trajectories/*")))
    settings = _settings(model, tmp_path, name="dr_grpo", aggregation="token_mean")

    made = _step(Replay(settings, engines=_engines(settings, ranks), ranks=ranks), recorded, 1)

    centred = [replace(row, advantage=reward - 1.0) for row, reward in zip(rows, REWARDS, strict=True)]
    wanted = _engines(settings, ranks).actor.train_step(centred, step=1, total_steps=2)
    assert made["loss"] == pytest.approx(wanted.loss, rel=1e-6)


def test_a_rate_that_was_changed_on_the_way_is_the_replays_too_unless_it_has_its_own(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """The cut of every step says it, and so does the archive."""
    archive_step(tmp_path, 2, lr=5e-4)
    recorded = read_recorded(list(tmp_path.glob("trajectories/*")))
    settings = _settings(model, tmp_path)

    made = _step(Replay(settings, engines=_engines(settings, ranks), ranks=ranks), recorded, 2)
    own = _step(Replay(settings, engines=_engines(settings, ranks), ranks=ranks, changed=["trainer.lr"]), recorded, 2)

    assert (made["lr"], own["lr"]) == (5e-4, 1e-2)
    assert made["reward_at_age/1"] == 1.0, "all of them began a version earlier"


def test_what_else_was_changed_on_the_way_is_the_replays_too(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    archive_step(tmp_path, 2, numbers={"algorithm.entropy_coef": 0.5, "algorithm.eps_clip_higher": None})
    recorded = read_recorded(list(tmp_path.glob("trajectories/*")))
    settings = _settings(model, tmp_path)

    made = _step(Replay(settings, engines=_engines(settings, ranks), ranks=ranks), recorded, 2)
    changed = ["algorithm.entropy_coef"]
    own = _step(Replay(settings, engines=_engines(settings, ranks), ranks=ranks, changed=changed), recorded, 2)

    assert made["loss"] == pytest.approx(own["loss"] - 0.5 * own["entropy_mean"])


def test_only_the_surviving_lineage_is_read(tmp_path: Path) -> None:
    _record(tmp_path, 1)
    _record(tmp_path, 2)
    archive_step(tmp_path, 2, lineage=2)
    (tmp_path / "trajectories" / "abandoned").mkdir()
    write_lines(tmp_path, line(1), line(2, lineage=2))

    steps = whole_steps(tmp_path)

    assert [[path.name for path in paths] for _, paths in steps] == [
        ["step-000001-1-0.parquet"],
        ["step-000002-2-0.parquet"],
    ]


def test_the_newest_steps_of_a_live_run_may_not_be_archived_yet_but_no_other(tmp_path: Path) -> None:
    for step in (1, 3):
        _record(tmp_path, step)
    write_lines(tmp_path, line(1), line(2))

    assert len(whole_steps(tmp_path)) == 1

    write_lines(tmp_path, line(1), line(2), line(3))
    with pytest.raises(UserError, match="step 2: got 0 archived trajectories, need 4"):
        whole_steps(tmp_path)


def test_what_was_recorded_comes_back_whole(tmp_path: Path) -> None:
    _record(tmp_path, 2)
    (path,) = tmp_path.glob("trajectories/*")

    recorded, headers = read_recorded([path]), read_recorded([path], with_tokens=False)

    for place, (one, header) in enumerate(zip(recorded, headers, strict=True)):
        wanted = trajectory(2, place)
        assert one.trajectory.slot == header.trajectory.slot == wanted.slot
        assert one.trajectory.info == wanted.info
        for name in ("token_ids", "loss_mask", "logprobs", "versions"):
            got, array = (getattr(each.sequences[0], name) for each in (one.trajectory, wanted))
            assert got.dtype == array.dtype
            assert got.tolist() == array.tolist()
        found = one.trajectory.sequences[0].temperatures
        assert (None if found is None else found.tolist()) == (
            None if place == 0 else [1.0] * (LENGTH // 2) + [0.5 + place] * (LENGTH // 2)
        )
        assert not header.trajectory.sequences
        assert one.advantage == pytest.approx(ADVANTAGES[place])
        assert slot_of(one).key == ("0-2-0", place)


def test_an_archive_of_before_tokens_knew_their_temperature_trains_at_the_runs(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    rows = [replace(row, temperature=0.8) for row in _record(tmp_path, 1)]
    (path,) = tmp_path.glob("trajectories/*")
    pq.write_table(pq.read_table(path).drop_columns("temperatures"), path)
    settings = _settings(model, tmp_path)

    made = _step(Replay(settings, engines=_engines(settings, ranks), ranks=ranks), read_recorded([path]), 1)

    wanted = _engines(settings, ranks).actor.train_step(rows, step=1, total_steps=2)
    assert made["loss"] == pytest.approx(wanted.loss, rel=1e-8)
    assert made["temperature_mean"] == 0.8


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path: Path, model: Path, ranks: Ranks) -> None:
    _record(tmp_path, 1)
    recorded = read_recorded(list(tmp_path.glob("trajectories/*")))
    (sequence,) = recorded[0].trajectory.sequences
    sequence = structs.replace(sequence, token_ids=np.where(np.arange(LENGTH) == 3, VOCAB, sequence.token_ids))
    recorded[0] = replace(recorded[0], trajectory=structs.replace(recorded[0].trajectory, sequences=[sequence]))
    settings = _settings(model, tmp_path)
    replay = Replay(settings, engines=_engines(settings, ranks), ranks=ranks)

    with pytest.raises(UserError, match=f"with {VOCAB} tokens, need at least {VOCAB + 1}"):
        _step(replay, recorded, 1)


@pytest.mark.parametrize(
    ("recorded", "replayed", "relative"),
    [
        (0.5, 0.5, 0.0),
        (0.5, 0.500001, 2e-6),
        (-0.5, 0.5, 2.0),
        (1e-9, 2e-9, 1e-6),
        (float("nan"), float("nan"), 0.0),
        (float("nan"), 0.5, float("inf")),
    ],
)
def test_differences_are_relative_to_the_loss_but_not_to_one_that_cancels(
    recorded: float, replayed: float, relative: float
) -> None:
    difference = StepDifference(step=1, name="loss", recorded=recorded, replayed=replayed)

    assert difference.relative == pytest.approx(relative, rel=1e-4)


def test_only_losses_are_compared() -> None:
    (one,) = compare({"loss": 0.5, "grad_norm": 1.0}, {"step": 3, "loss": 0.25, "grad_norm": 2.0})

    assert (one.step, one.name, one.recorded, one.replayed) == (3, "loss", 0.5, 0.25)


@pytest.mark.parametrize(
    ("replayed", "changed", "status", "says"),
    [
        (0.5000003, [], 0, "losses reproduced: largest difference 6e-07: step 2"),
        (0.500001, [], 1, "losses NOT reproduced: largest difference 2e-06: step 2"),
        (0.7, ["trainer.lr"], 0, "replayed 0.7; changed: trainer.lr"),
    ],
)
def test_an_unchanged_replay_is_held_to_the_recorded_losses_and_a_changed_one_is_not(
    replayed: float, changed: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    same = StepDifference(step=1, name="loss", recorded=1.0, replayed=1.0)
    other = StepDifference(step=2, name="loss", recorded=0.5, replayed=replayed)

    assert judge([same, other], changed) == status
    assert says in capsys.readouterr().out


def test_a_rate_that_was_changed_while_the_run_was_live_is_told() -> None:
    recorded = [{"step": 1, "lr": 1e-3}, {"step": 2, "lr": 2e-3}]
    replayed = [{"step": 1, "lr": 1e-3}, {"step": 2, "lr": 1e-3}]

    assert rate_changes(recorded, recorded) == []
    assert rate_changes(recorded, replayed) == ["from step 2 on the recorded learning rate was 0.002, here 0.001"]


def test_a_replay_lies_beside_its_run_and_never_in_one(model: Path, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "hand")
    directory.write_settings(_settings(model, tmp_path / "elsewhere", eps_clip=0.3))
    for name in ("hand", "live"):
        (tmp_path / name / "bus").mkdir(parents=True)

    recorded, settings = load_replay_settings(directory, ["--trainer.lr", "0.5"])

    assert settings.run_directory == tmp_path / "hand-replay"
    assert changed_settings(recorded, settings) == ["trainer.lr"]
    idle = ["--health.logprob_gap", "9", "--metrics.tensorboard", "false", "--eval.every_steps", "3"]
    idle += ["--trainer.keep_checkpoints", "7", "--launch.join_wait_s", "1", "--run.watchdog_s", "7"]
    assert changed_settings(*load_replay_settings(directory, idle)) == [], "no number depends on these"
    assert changed_settings(*load_replay_settings(directory, ["--trainer.eps", "0.5"])) == ["trainer.eps"]
    _, other = load_replay_settings(directory, ["--algorithm.name", "rloo"])
    assert other.algorithm.advantage_baseline == "leave_one_out"
    assert other.algorithm.eps_clip == 0.3, "what was chosen beside the preset stays"
    for name in ("hand", "live"):
        with pytest.raises(UserError, match=f"run.name: got {name}"):
            load_replay_settings(directory, ["--run.name", name])


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random model that sees."""
    return save_seeing_model(tmp_path_factory.mktemp("seeing"), "qwen3_vl")


def _seen_step(settings: Settings, ranks: Ranks, directory: Path) -> Metrics:
    """Replay step 1 of a run that has shown images."""
    (paths,) = archive_files(directory).values()
    replay = Replay(settings, engines=_engines(settings, ranks), ranks=ranks)
    look = partial(read_images, directory, Version(1, 1))
    return anyio.run(replay.step, read_recorded(paths), Version(1, 1), look)


def test_the_archive_trains_the_images_that_its_rows_have_shown(seeing: Path, ranks: Ranks, tmp_path: Path) -> None:
    settings = _settings(seeing, tmp_path)
    rows = archive_seeing_step(tmp_path, 1)
    rows = [replace(row, temperature=0.8) for row in rows]
    blind = [replace(row, images=tuple(png(9, width=w, height=h) for w, h in map(size_of, row.images))) for row in rows]

    made = _seen_step(settings, ranks, tmp_path)

    wanted, other = (_engines(settings, ranks).actor.train_step(one, step=1, total_steps=2) for one in (rows, blind))
    assert made["loss"] == pytest.approx(wanted.loss, rel=1e-8)
    assert abs(wanted.loss - other.loss) > 1e-6


def test_a_replay_without_the_images_or_with_a_model_that_sees_otherwise_is_refused(
    seeing: Path, model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    archive_seeing_step(tmp_path, 1)
    config = json.loads((seeing / "config.json").read_text())
    other = shutil.copytree(seeing, tmp_path / "other")
    (other / "config.json").write_text(json.dumps(config | {"image_token_id": 59}))
    blind = save_model(tmp_path / "blind", vocab_size=64)

    with pytest.raises(UserError, match=f"model.path: got {blind}, which does not see"):
        _seen_step(_settings(blind, tmp_path), ranks, tmp_path)
    with pytest.raises(UserError, match=f"model.path: got {other}, which makes other tokens of the recorded images"):
        _seen_step(_settings(other, tmp_path), ranks, tmp_path)
    (path,) = tmp_path.glob("images/*")
    path.unlink()
    with pytest.raises(UserError, match=r"step 1 has shown the image [0-9a-f]{64}, which is in none of its files"):
        _seen_step(_settings(seeing, tmp_path), ranks, tmp_path)


def test_a_replay_reads_the_images_of_each_step_by_itself(
    seeing: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "joined_ranks", lambda **_: nullcontext(ranks))
    settings = _settings(seeing, tmp_path)
    engine, recorded, losses = _engines(settings, ranks).actor, tmp_path / "recorded", []
    for step in (1, 2):
        rows = [replace(row, temperature=0.8) for row in archive_seeing_step(recorded, step)]
        losses.append(engine.train_step(rows, step=step, total_steps=2).loss)
    write_lines(recorded, *(line(step, loss=loss) for step, loss in enumerate(losses, start=1)))

    differences = replay.run_replay(settings, recorded, num_steps=2, changed=[])

    assert [one.step for one in differences] == [1, 2]
    assert max(one.relative for one in differences) < 1e-6
