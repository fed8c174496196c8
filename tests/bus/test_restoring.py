"""A trainer begins from the newest checkpoint that is what was written and that the journal knows, and says so."""

import json
import os
from pathlib import Path

import anyio
import pytest

from areal_async.bus import Bus, Role
from areal_async.errors import UserError
from areal_async.process.atomic_folders import LEDGER
from areal_async.process.json_lines import decode_object
from areal_async.protocol.subjects import CHECKPOINT
from areal_async.protocol.types import CheckpointRecord, Cut, CutGroup
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.engine.digests import SUMS, digest_of_sums, write_sums
from areal_async.trainer.output.restoring import choose_checkpoint
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
