"""A trainer begins from the newest checkpoint that is what was written and that the journal knows, and says so."""

import json
import os
from pathlib import Path

import anyio
import pytest

from areal_async.bus import Bus, Role, entries_after
from areal_async.config.change_record import ordered_rollback, record_change
from areal_async.errors import PipelineError, UserError
from areal_async.process.atomic_folders import LEDGER, versions_in
from areal_async.process.json_lines import decode_object
from areal_async.protocol.journal import Journal
from areal_async.protocol.run_state import Rollback
from areal_async.protocol.subjects import CHECKPOINT, ROLLBACK
from areal_async.protocol.types import (
    CheckpointRecord,
    Cut,
    CutGroup,
    Outcome,
    OutcomeKind,
    Version,
    WeightsVersion,
)
from areal_async.trainer.batch.lineage import Lineage, read_entry
from areal_async.trainer.begin import begin_lineage
from areal_async.trainer.engine.digests import SUMS, damage, digest_of_sums, write_sums
from areal_async.trainer.output.restoring import choose_checkpoint
from areal_async.versions import audit
from tests.brokers import PATIENCE_S, OpenRole

pytestmark = pytest.mark.anyio

TRAINED = {"1": ["0-0-0"], "2": ["0-1-0"], "3": ["0-2-0"]}


def made(checkpoints: Path, version: str, trained: dict[str, list[str]]) -> Path:
    folder = checkpoints / version
    folder.mkdir(parents=True)
    (folder / LEDGER).write_text(json.dumps({"version": version, "trained": trained}))
    (folder / "shard").write_bytes(b"weights" * 20)
    write_sums(folder, {})
    return folder


def through(step: int) -> dict[str, list[str]]:
    return {number: groups for number, groups in TRAINED.items() if int(number) <= step}


@pytest.fixture
async def checkpoints(open_role: OpenRole, tmp_path: Path) -> Path:
    """Return the checkpoints of a lineage that has trained three steps, each of which made one."""
    trainer = await open_role(Role.TRAINER)
    lineage = await Lineage.take(trainer)
    await lineage.read_log()
    await lineage.write_begin()
    for step, groups in TRAINED.items():
        cut = [CutGroup(group_id=one, workflow="w", slots=[]) for one in groups]
        await lineage.write_cut(Cut(lineage=1, step=int(step), groups=cut))
        folder = made(tmp_path / "checkpoints", f"1-{step}", through(int(step)))
        record = CheckpointRecord(version=f"1-{step}", path=str(folder), sums_sha256=digest_of_sums(folder))
        await lineage.record_checkpoint(record)
    return tmp_path / "checkpoints"


async def chosen(bus: Bus) -> str:
    """Begin as a trainer does; return the version that it and the next one begin from."""
    lineage = await Lineage.take(bus)
    await choose_checkpoint(lineage)
    recorded, _ = await bus.get(CHECKPOINT, CheckpointRecord)
    assert recorded is not None
    assert lineage.checkpoint == recorded
    return recorded.version


async def test_newest_one_is_taken_where_it_is_whole(open_role: OpenRole, checkpoints: Path) -> None:
    assert await chosen(await open_role(Role.TRAINER)) == "1-3"
    assert sorted(os.listdir(checkpoints)) == ["1-1", "1-2", "1-3"]


@pytest.mark.parametrize("is_gone", [False, True])
async def test_damaged_or_missing_one_is_set_aside_and_the_one_before_is_taken(
    open_role: OpenRole, checkpoints: Path, is_gone: bool
) -> None:
    if is_gone:
        (checkpoints / "1-3").rename(checkpoints / "moved")
    else:
        (checkpoints / "1-3" / "shard").write_bytes(b"weighty" * 20)
    operator, told = await open_role(Role.OPERATOR), []

    async with operator.subscribe(operator.names.all_events) as messages:
        version = await chosen(await open_role(Role.TRAINER))
        with anyio.fail_after(PATIENCE_S):
            async for _, data in messages:
                told.append(decode_object(data))
                if told[-1] and told[-1]["event"] == "checkpoint.damaged":
                    break

    assert version == "1-2"
    reason = "its folder is gone" if is_gone else "shard is not what was written: its SHA-256 differs"
    assert told[-1] is not None
    assert (told[-1]["version"], told[-1]["reason"], told[-1]["taken"]) == ("1-3", reason, "1-2")
    assert sorted(os.listdir(checkpoints)) == ["1-1", "1-2", "moved" if is_gone else "1-3.damaged"]


@pytest.mark.parametrize("is_gone", [False, True])
async def test_digests_that_are_not_those_on_record_vouch_for_nothing(
    open_role: OpenRole, checkpoints: Path, is_gone: bool
) -> None:
    (checkpoints / "1-3" / "shard").write_bytes(b"weighty" * 20)
    write_sums(checkpoints / "1-3", {})
    if is_gone:
        (checkpoints / "1-3" / SUMS).unlink()

    assert await chosen(await open_role(Role.TRAINER)) == "1-2"

    (checkpoints / "1-2" / SUMS).unlink()
    assert await chosen(await open_role(Role.TRAINER)) == "1-1", "the one that was fallen back to is on record too"


async def test_one_that_the_journal_does_not_know_is_passed_over(open_role: OpenRole, checkpoints: Path) -> None:
    made(
        checkpoints, "2-2", {**through(1), "2": ["0-7-0"]}
    )  # of a lineage whose second step was trained otherwise since
    (checkpoints / "1-3" / LEDGER).write_bytes(b"{}")

    assert await chosen(await open_role(Role.TRAINER)) == "1-2"


async def ordered(open_role: OpenRole, version: str) -> None:
    operator = await open_role(Role.OPERATOR)
    held, _ = await operator.get(ROLLBACK, Rollback)
    number = held.number + 1 if held else 1
    await operator.put(ROLLBACK, Rollback(number=number, version=version, by="ann", reason="it diverged"))


async def journal_of(bus: Bus, lineage: Lineage) -> Journal:
    """Read the log as the trainer of a lineage does."""
    assert lineage.checkpoint is not None
    step = Version.parse(lineage.checkpoint.version).step
    journal = Journal(own_lineage=lineage.number, own_step=step)
    async for message in entries_after(bus, 0):
        await read_entry(bus, message, journal)
    return journal


async def trained(bus: Bus, step: int) -> None:
    """Record what the fixture has trained."""
    for number in range(1, step + 1):
        for group_id in TRAINED[str(number)]:
            outcome = Outcome(group_id=group_id, kind=OutcomeKind.TRAINED, lineage=1, step=number)
            await bus.publish(bus.names.outcomes, outcome)


async def test_an_order_to_go_back_makes_its_checkpoint_the_newest_and_gives_up_what_followed(
    open_role: OpenRole, checkpoints: Path
) -> None:
    trainer = await open_role(Role.TRAINER)
    await trained(trainer, 2)
    await ordered(open_role, "1-1")

    lineage = await Lineage.take(trainer)
    began = await begin_lineage(lineage)

    assert began.checkpoint == str(checkpoints / "2-1")
    assert damage(checkpoints / "2-1") == ""
    assert versions_in(checkpoints)[-1] == Version(2, 1), "whoever looks for the newest by its name finds it"
    journal = await journal_of(trainer, lineage)
    assert (journal.steps_to_replay(), journal.branches) == ([], {"2": 1})
    assert [group.group_id for group in journal.without_end()] == ["0-1-0", "0-2-0"]
    order, _ = await trainer.get(ROLLBACK, Rollback)
    assert order is not None
    assert (order.is_due, order.lineage, order.refusal) == (False, 2, "")
    assert (await Lineage.take(trainer)).rollback is None
    recorded = ordered_rollback(order)
    assert audit.read(checkpoints.parent) == [(order.at, "ann", "rollback to 1-1", "it diverged")], (
        "though who gave the order was ended before it wrote that down"
    )
    record_change(checkpoints.parent, recorded)
    assert len(audit.read(checkpoints.parent)) == 1, "nor twice, where it was not"


@pytest.mark.parametrize("where", ["trainer.before_branch", "trainer.before_rollback_ends"])
async def test_a_trainer_that_dies_as_it_goes_back_leaves_the_order_to_the_next(
    open_role: OpenRole, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    trainer = await open_role(Role.TRAINER)
    await trained(trainer, 3)
    await ordered(open_role, "1-1")

    def reach(point: str) -> None:
        if point == where:
            raise PipelineError(point)

    dying = await Lineage.take(trainer)
    with monkeypatch.context() as patch:
        patch.setattr("areal_async.trainer.batch.lineage.failpoint", reach)
        with pytest.raises(PipelineError, match=where):
            await begin_lineage(dying)
    lineage = await Lineage.take(trainer)
    began = await begin_lineage(lineage)

    assert Path(began.checkpoint).name == "3-1"
    journal = await journal_of(trainer, lineage)
    assert journal.steps_to_replay() == []
    assert [group.group_id for group in journal.without_end()] == ["0-1-0", "0-2-0"]


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("1-2", "shard is not what was written: its SHA-256 differs"),
        ("1-9", "its folder is gone"),
        ("5-2", "its steps were given up since, or trained otherwise"),
    ],
)
async def test_an_order_without_a_whole_checkpoint_of_this_lineage_is_refused_and_changes_nothing(
    open_role: OpenRole, checkpoints: Path, version: str, why: str
) -> None:
    made(checkpoints, "5-2", {**through(1), "2": ["0-7-0"]})
    (checkpoints / "1-2" / "shard").write_bytes(b"weighty" * 20)
    await ordered(open_role, version)
    trainer = await open_role(Role.TRAINER)

    began = await begin_lineage(await Lineage.take(trainer))

    assert Path(began.checkpoint).name == "1-3"
    order, _ = await trainer.get(ROLLBACK, Rollback)
    assert order is not None
    assert (order.is_due, order.refusal) == (False, why)


async def test_where_an_order_is_refused_the_newest_checkpoint_is_looked_at_as_ever(
    open_role: OpenRole, checkpoints: Path
) -> None:
    (checkpoints / "1-3" / "shard").write_bytes(b"weighty" * 20)
    await ordered(open_role, "1-9")

    began = await begin_lineage(await Lineage.take(await open_role(Role.TRAINER)))

    assert Path(began.checkpoint).name == "1-2"


async def test_what_was_gone_back_behind_is_no_place_to_go_back_to(open_role: OpenRole, checkpoints: Path) -> None:
    trainer = await open_role(Role.TRAINER)
    await trained(trainer, 3)
    for version in ("1-1", "1-2"):
        await ordered(open_role, version)
        await begin_lineage(await Lineage.take(trainer))

    order, _ = await trainer.get(ROLLBACK, Rollback)

    assert order is not None
    assert order.refusal == "its steps were given up since, or trained otherwise"


async def test_a_trainer_that_was_replaced_ends_no_order(open_role: OpenRole, checkpoints: Path) -> None:
    await ordered(open_role, "1-1")
    slow, fast = await open_role(Role.TRAINER), await open_role(Role.TRAINER)
    older, newer = await Lineage.take(slow), await Lineage.take(fast)
    assert older.rollback is not None

    await older.end_rollback(older.rollback, refusal="it is slow")
    await begin_lineage(newer)

    order, _ = await fast.get(ROLLBACK, Rollback)
    assert order is not None
    assert (order.lineage, order.refusal) == (3, "")


async def test_once_the_last_version_is_announced_the_order_waits_for_the_next_start(
    open_role: OpenRole, checkpoints: Path
) -> None:
    trainer, operator = await open_role(Role.TRAINER), await open_role(Role.OPERATOR)
    await operator.put(operator.names.weights_key(), WeightsVersion(version="1-3", final=True))
    await ordered(open_role, "1-1")

    assert (await Lineage.take(trainer)).rollback is None
    order, _ = await trainer.get(ROLLBACK, Rollback)
    assert order is not None
    assert order.is_due


async def test_where_none_is_whole_nothing_is_changed_and_one_sentence_says_so(
    open_role: OpenRole, checkpoints: Path
) -> None:
    for version in os.listdir(checkpoints):
        (checkpoints / version / "shard").unlink()
    trainer = await open_role(Role.TRAINER)

    with pytest.raises(
        UserError, match=r"^checkpoint 1-3: shard is missing, and there is no older one that is whole; "
    ):
        await chosen(trainer)

    recorded, _ = await trainer.get(CHECKPOINT, CheckpointRecord)
    assert recorded is not None
    assert recorded.version == "1-3"
    assert sorted(os.listdir(checkpoints)) == ["1-1", "1-2", "1-3"]
