"""Stored trajectories become journalled cuts; what is trained is acked only by its checkpoint; a zombie is fenced."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from areal_async.bus import Bus, Delivery, EmbeddedBroker, Role, take_trainer_consumer
from areal_async.bus.connection import Received
from areal_async.bus.inbox import Inbox
from areal_async.config.settings import MIN_IMAGE_STREAM_BYTES, BusSettings, RolloutSettings, RunSettings, Settings
from areal_async.errors import FencedError, StreamFullError, WireError
from areal_async.protocol import wire
from areal_async.protocol.journal import Journal
from areal_async.protocol.run_state import Change, Changes
from areal_async.protocol.subjects import CHANGES, LINEAGE
from areal_async.protocol.types import (
    CheckpointRecord,
    Cut,
    CutKind,
    ImageRef,
    LineageRecord,
    Outcome,
    OutcomeKind,
    StoredMessage,
    UpdateGroup,
    Version,
    WeightsVersion,
)
from areal_async.protocol.wire import decode
from areal_async.trainer.batch import feed, image_sweep
from areal_async.trainer.batch.cut import StreamRoom
from areal_async.trainer.batch.feed import BatchFeed
from areal_async.trainer.batch.image_sweep import ImageSweep
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.batch.payloads import fetch, slots_of
from areal_async.trainer.batch.reader import JournalReader
from areal_async.trainer.shards import build_rows
from tests.brokers import PATIENCE_S, OpenRole, until
from tests.bus.stored import WORKFLOW, ref_of, store, ticket

pytestmark = pytest.mark.anyio


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        run=RunSettings(name="test", directory=tmp_path, steps=2),
        rollout=RolloutSettings(
            group_size=2,
            min_group_size=2,
            batch_groups=2,
            max_staleness=1,
            max_attempts=2,
            max_stream_bytes=64 << 20,
            max_image_stream_bytes=MIN_IMAGE_STREAM_BYTES,
        ),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )


MESSAGE_BYTES = 640
"""A little more than a message of one slot takes."""


class Station:
    """A trainer's rank 0 without its engine."""

    def __init__(self, bus: Bus, lineage: Lineage, feed: BatchFeed, reader: JournalReader) -> None:
        self.bus, self.lineage, self.feed, self.reader = bus, lineage, feed, reader

    @property
    def num_unacked(self) -> int:
        """Messages that are held for their ack."""
        return sum(len(held) for held in self.feed.planner.messages.deliveries.values())

    async def cut(self, step: int) -> Cut:
        with anyio.fail_after(PATIENCE_S):
            cut = await self.reader.next_entry(step, is_checkpointed=True)
        assert cut is not None
        return cut

    async def outcomes(self, count: int) -> list[Outcome]:
        """The first ``count`` outcomes, settling or not, once there are as many."""

        async def recorded() -> list[Outcome]:
            messages = await self.bus.read_log(self.bus.names.outcomes_stream, self.bus.names.outcomes)
            return [decode(message.data, Outcome) for message in messages]

        async def is_so() -> bool:
            return len(await recorded()) >= count

        await until(is_so)
        return await recorded()


@asynccontextmanager
async def running(bus: Bus, settings: Settings, *, first_step: int = 1) -> AsyncIterator[Station]:
    lineage = await Lineage.take(bus)
    journal: Journal = await lineage.read_log()
    sequence = await lineage.write_begin()
    restored = lineage.checkpoint
    restored_step = Version.parse(restored.version).step if restored else 0
    reader = JournalReader(bus, lineage=lineage.number, restored_step=restored_step)
    own_feed = BatchFeed(bus, settings, lineage, journal)
    async with anyio.create_task_group() as loops:
        loops.start_soon(reader.run)
        await reader.read_through(sequence)
        loops.start_soon(own_feed.run_inbox)
        loops.start_soon(own_feed.run_tickets)
        loops.start_soon(own_feed.run_images)
        loops.start_soon(own_feed.run_journal, first_step)
        yield Station(bus, lineage, own_feed, reader)
        loops.cancel_scope.cancel()


async def num_stored(bus: Bus) -> int:
    return (await bus.stream_state(bus.names.trajectories_stream)).num_messages


async def is_empty(bus: Bus) -> bool:
    return await num_stored(bus) == 0


@pytest.mark.both_loops
async def test_a_full_batch_is_cut_and_acked_only_by_its_checkpoint(open_role: OpenRole, settings: Settings) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with running(trainer, settings) as station:
        station.feed.allow(1)
        await store(node, "0-0-0", [0], group_size=2)
        await store(node, "0-0-0", [1], group_size=2)
        await store(node, "0-1-0", [0, 1], group_size=2)

        cut = await station.cut(1)

        assert {group.group_id: len(group.slots) for group in cut.groups} == {"0-0-0": 2, "0-1-0": 2}
        assert await num_stored(trainer) == 3
        await station.feed.on_checkpoint(1)
        assert await num_stored(trainer) == 0
        outcomes = await station.outcomes(2)
        assert {(one.group_id, one.kind, one.step) for one in outcomes} == {
            ("0-0-0", OutcomeKind.TRAINED, 1),
            ("0-1-0", OutcomeKind.TRAINED, 1),
        }


async def test_whoever_else_runs_on_the_loop_has_a_turn_between_two_messages_of_a_full_read(
    open_role: OpenRole, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    for index in range(8):
        await store(node, f"0-{index}-0", [0, 1], group_size=2)
    num_turns, at_turns, receive = 0, [], BatchFeed._receive

    async def noted(self: BatchFeed, delivery: Delivery) -> None:
        at_turns.append(num_turns)
        await receive(self, delivery)

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await anyio.lowlevel.checkpoint()

    async def is_read() -> bool:
        return len(at_turns) == 8

    monkeypatch.setattr(BatchFeed, "_receive", noted)
    async with running(trainer, settings), anyio.create_task_group() as others:
        others.start_soon(take_turns)
        await until(is_read)
        others.cancel_scope.cancel()

    assert len(set(at_turns)) == 8


async def test_many_outcomes_are_recorded_a_few_at_once(
    open_role: OpenRole, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await open_role(Role.TRAINER)
    num_now, most, store_one = 0, 0, feed.store_outcome
    monkeypatch.setattr(feed, "RECORDED_AT_ONCE", 3)

    async def counted(bus: Bus, outcome: Outcome) -> None:
        nonlocal num_now, most
        num_now += 1
        most = max(most, num_now)
        await store_one(bus, outcome)
        num_now -= 1

    monkeypatch.setattr(feed, "store_outcome", counted)
    async with running(trainer, settings) as station:
        await station.feed.settle([f"0-{index}-0" for index in range(8)], OutcomeKind.STALE, reason="r", step=1)
        recorded = await station.outcomes(8)

    assert {one.group_id for one in recorded} == {f"0-{index}-0" for index in range(8)}
    assert most == 3


async def test_what_a_broker_that_ended_had_sent_and_nobody_received_is_delivered_again(
    broker: EmbeddedBroker, open_role: OpenRole, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    lost, on_received = anyio.Event(), Inbox._on_received

    def lose_the_first(inbox: Inbox, received: Received) -> None:
        if received.status is None and not lost.is_set():
            lost.set()
        else:
            on_received(inbox, received)

    monkeypatch.setattr(Inbox, "_on_received", lose_the_first)
    async with running(trainer, settings) as station:
        station.feed.allow(1)
        await store(node, "0-0-0", [0, 1], group_size=2)
        await lost.wait()
        os.kill(broker.pid, signal.SIGTERM)  # killed at once it may have forgotten that it sent it
        await store(node, "0-1-0", [0, 1], group_size=2)

        cut = await station.cut(1)

    assert {group.group_id for group in cut.groups} == {"0-0-0", "0-1-0"}


async def test_what_an_operator_changes_is_known_to_whoever_asks_the_feed(
    open_role: OpenRole, settings: Settings
) -> None:
    operator, trainer = await open_role(Role.OPERATOR), await open_role(Role.TRAINER)
    changes = {"eval.every_steps": Change(value=7, given=settings.eval.every_steps)}
    async with running(trainer, settings) as station, anyio.create_task_group() as loops:
        await loops.start(station.feed.run_changes)
        assert station.feed.now == settings

        await operator.put(CHANGES, Changes(by_setting=changes))

        await until(lambda: station.feed.now.eval.every_steps == 7)
        loops.cancel_scope.cancel()


async def test_a_group_known_only_by_its_ticket_is_waited_for_when_it_is_due(
    open_role: OpenRole, settings: Settings
) -> None:
    node, controller, trainer = (
        await open_role(Role.NODE),
        await open_role(Role.CONTROLLER),
        await open_role(Role.TRAINER),
    )
    await controller.publish(controller.names.tickets(WORKFLOW), ticket("0-9-0", group_size=2))
    async with running(trainer, settings, first_step=2) as station:
        for index in (0, 1):
            await store(node, f"0-{index}-0", [0, 1], group_size=2)
        station.feed.allow(2)
        await until(lambda: "0-9-0" in station.feed.waits_for)

        await store(node, "0-9-0", [0, 1], group_size=2)

        assert len((await station.cut(2)).groups) == 3


async def test_a_failed_group_is_recorded_with_its_cause_and_the_last_attempt_is_dead(
    open_role: OpenRole, settings: Settings
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with running(trainer, settings) as station:
        station.feed.allow(1)
        await store(node, "0-0-0", [0, 1], group_size=2, failed="it broke")
        await store(node, "0-1-1", [0, 1], group_size=2, failed="it broke", num_failed_attempts=1)

        outcomes = {one.group_id: one for one in await station.outcomes(2)}

        assert (outcomes["0-0-0"].kind, outcomes["0-0-0"].num_failed_attempts) == (OutcomeKind.FAILED, 1)
        assert (outcomes["0-1-1"].kind, outcomes["0-1-1"].reason) == (OutcomeKind.DEAD, "it broke")
        await until(lambda: is_empty(trainer))
    operator = await open_role(Role.OPERATOR)
    assert (await operator.stream_state(operator.names.dead_stream)).num_messages == 1


async def test_a_second_producers_slot_is_recorded_as_duplicate_and_a_straggler_as_late(
    open_role: OpenRole, settings: Settings
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with running(trainer, settings) as station:
        await store(node, "0-0-0", [0], group_size=2)
        await store(node, "0-0-0", [0], group_size=2, producer="b")
        await store(node, "0-0-0", [1], group_size=2)
        await store(node, "0-1-0", [0, 1], group_size=2)
        assert [one.kind for one in await station.outcomes(1)] == [OutcomeKind.DUPLICATE]
        station.feed.allow(1)
        await station.cut(1)

        await store(node, "0-1-0", [1], group_size=2, producer="b")

        late = (await station.outcomes(2))[1]
        assert (late.kind, late.sample_uid) == (OutcomeKind.LATE, "0-1-0.1.b")


async def test_an_undecodable_message_is_a_dead_letter_and_stops_nothing(
    open_role: OpenRole, settings: Settings
) -> None:
    node, trainer, operator = await open_role(Role.NODE), await open_role(Role.TRAINER), await open_role(Role.OPERATOR)
    async with running(trainer, settings) as station:
        station.feed.allow(1)
        await node.publish(node.names.trajectories(WORKFLOW, "0-0-0"), b"noise")
        for index in (1, 2):
            await store(node, f"0-{index}-0", [0, 1], group_size=2)

        assert len((await station.cut(1)).groups) == 2
        assert (await operator.stream_state(operator.names.dead_stream)).num_messages == 1


async def test_a_group_in_a_cut_that_is_being_written_is_not_given_up_for_what_cannot_be_read(
    open_role: OpenRole, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, trainer, operator = await open_role(Role.NODE), await open_role(Role.TRAINER), await open_role(Role.OPERATOR)
    is_written, is_found = anyio.Event(), anyio.Event()

    def decode_headers(*given: Any, **more: Any) -> StoredMessage:
        try:
            return wire.decode_headers(*given, **more)
        except WireError:
            is_found.set()
            raise

    async with running(trainer, settings) as station:
        write = station.lineage.write_cut

        async def write_cut(cut: Cut) -> None:
            is_written.set()
            await is_found.wait()
            await write(cut)

        monkeypatch.setattr(feed, "decode_headers", decode_headers)
        monkeypatch.setattr(station.lineage, "write_cut", write_cut)
        station.feed.allow(1)
        for index in (1, 2):
            await store(node, f"0-{index}-0", [0, 1], group_size=2)
        await is_written.wait()
        await node.publish(node.names.trajectories(WORKFLOW, "0-1-0"), b"noise")

        assert len((await station.cut(1)).groups) == 2

        async def is_buried() -> bool:
            return (await operator.stream_state(operator.names.dead_stream)).num_messages == 1

        await until(is_buried)
        assert not await trainer.read_log(trainer.names.outcomes_stream, trainer.names.outcomes)


async def test_a_new_lineage_gets_everything_unacked_again_and_fences_the_old(
    open_role: OpenRole, settings: Settings
) -> None:
    node, first, second = await open_role(Role.NODE), await open_role(Role.TRAINER), await open_role(Role.TRAINER, "1")
    async with running(first, settings) as old:
        old.feed.allow(1)
        for index in (0, 1):
            await store(node, f"0-{index}-0", [0, 1], group_size=2)
        await old.cut(1)
    zombie = old.lineage

    async with running(second, settings, first_step=2) as new:
        assert new.lineage.number == zombie.number + 1
        assert new.reader.journal.steps_to_replay() == [1]
        found, missing, _ = await fetch(second, slots_of(new.reader.journal.cuts[1]))
        assert (len(found), missing) == (4, {})

        with pytest.raises(FencedError):
            await zombie.write_cut(Cut(lineage=zombie.number, step=2))
        await new.lineage.announce(WeightsVersion(version="2-1", path="x"))
        with pytest.raises(FencedError):
            await zombie.announce(WeightsVersion(version="1-1", path="x"))
        await new.lineage.record_checkpoint(CheckpointRecord(version="2-1", path="x"))
        with pytest.raises(FencedError):
            await zombie.record_checkpoint(CheckpointRecord(version="1-1", path="x"))
        await until(lambda: new.num_unacked == 2)
        await new.feed.on_checkpoint(1)
        assert await num_stored(second) == 0
        assert [one.kind for one in await new.outcomes(2)] == [OutcomeKind.TRAINED] * 2


async def test_an_older_trainer_records_no_checkpoint_once_a_newer_one_has_read_it(open_role: OpenRole) -> None:
    first, second = await open_role(Role.TRAINER), await open_role(Role.TRAINER, "1")
    zombie = await Lineage.take(first)
    assert zombie.checkpoint is None
    await zombie.record_checkpoint(CheckpointRecord(version="1-1", path="x"))

    lineage = await Lineage.take(second)

    assert lineage.checkpoint == CheckpointRecord(version="1-1", path="x")
    with pytest.raises(FencedError):
        await zombie.record_checkpoint(CheckpointRecord(version="1-2", path="y"))
    await lineage.record_checkpoint(CheckpointRecord(version="2-2", path="z"))


async def test_an_older_trainer_announces_no_weights_once_a_newer_one_has_begun(open_role: OpenRole) -> None:
    """And nobody is to receive any longer what it sends."""
    first, second = await open_role(Role.TRAINER), await open_role(Role.TRAINER, "1")
    zombie = await Lineage.take(first)
    group = UpdateGroup(
        name="g", address="127.0.0.1", port=1, backend="gloo", size=2, ranks={"s": 1}, incarnations={"s": "x"}
    )
    await zombie.announce(WeightsVersion(version="1-4", kind="distributed", group=group, on_disk="1-2", buckets=[[]]))

    lineage = await Lineage.take(second)

    held, _ = await second.get(second.names.weights_key(), WeightsVersion)
    assert held == WeightsVersion(version="1-4", kind="disk", on_disk="1-2", taken_by=2)
    with pytest.raises(FencedError):
        await zombie.announce(WeightsVersion(version="1-5"))
    await lineage.announce(WeightsVersion(version="2-5"))


async def test_a_trainer_that_was_overtaken_before_it_had_its_consumer_stops(
    open_role: OpenRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = await open_role(Role.TRAINER), await open_role(Role.TRAINER, "1")

    async def overtaken(bus: Bus, number: int) -> str:
        await fast.put(LINEAGE, LineageRecord(lineage=number + 1))
        return await take_trainer_consumer(bus, number)

    monkeypatch.setattr("areal_async.trainer.batch.lineage.take_trainer_consumer", overtaken)

    with pytest.raises(FencedError, match="lineage 2 has been taken since"):
        await Lineage.take(slow)


async def test_a_trainer_does_not_begin_after_a_newer_one_has(open_role: OpenRole) -> None:
    slow, fast = await open_role(Role.TRAINER), await open_role(Role.TRAINER, "1")
    older = await Lineage.take(slow)
    newer = await Lineage.take(fast)
    await newer.read_log()
    await newer.write_begin()

    with pytest.raises(FencedError):
        await older.read_log()


async def test_a_payload_that_is_gone_or_not_where_it_was_seen_is_told_apart(
    open_role: OpenRole, settings: Settings
) -> None:
    node, trainer, operator = await open_role(Role.NODE), await open_role(Role.TRAINER), await open_role(Role.OPERATOR)
    async with running(trainer, settings) as station:
        station.feed.allow(1)
        for index in (0, 1):
            await store(node, f"0-{index}-0", [0, 1], group_size=2)
        placed = slots_of(await station.cut(1))
    gone = [one for one in placed if one.group_id == "0-0-0"]
    await operator.api.ask(
        f"$JS.API.STREAM.MSG.DELETE.{operator.names.trajectories_stream}", {"seq": gone[0].item.sequence}
    )
    await store(node, "0-0-0", [0], group_size=2)  # a feed would take it for a duplicate, and remove it

    found, missing, _ = await fetch(trainer, placed)

    assert list(missing) == [("0-0-0", 1)]
    assert sorted(found) == [one.position for one in placed if one.key != ("0-0-0", 1)]


def with_room_for(settings: Settings, num_messages: int) -> Settings:
    """A stream that is full, as far as a trainer can tell, beyond that many of the messages that ``store`` makes."""
    rollout = settings.rollout.model_copy(update={"max_trajectory_bytes": 1 << 10})
    room_bytes = num_messages * MESSAGE_BYTES + rollout.max_message_bytes
    return settings.model_copy(update={"rollout": rollout.model_copy(update={"max_stream_bytes": room_bytes})})


async def test_the_trainer_counts_the_streams_bytes_as_the_broker_does(open_role: OpenRole, settings: Settings) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with running(trainer, settings) as station:
        await store(node, "0-0-0", [0], group_size=2)
        await store(node, "0-1-0", [0, 1], group_size=2, failed="for a reason")
        await until(lambda: station.num_unacked == 2)

        assert (
            station.feed.planner.messages.num_bytes
            == (await trainer.stream_state(trainer.names.trajectories_stream)).num_bytes
        )


async def test_a_full_stream_is_cut_short_instead_of_waiting_for_producers_that_wait_for_room(
    open_role: OpenRole, settings: Settings
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with running(trainer, with_room_for(settings, 0)) as station:
        station.feed.allow(1)

        await store(node, "0-0-0", [0, 1], group_size=2)

        assert [group.group_id for group in (await station.cut(1)).groups] == ["0-0-0"]


async def test_a_stream_full_of_incomplete_groups_gives_up_the_youngest_and_no_more_than_it_must(
    open_role: OpenRole, settings: Settings
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with running(trainer, with_room_for(settings, 2)) as station:
        for index in range(3):
            await store(node, f"0-{index}-0", [0], group_size=2)
        await until(lambda: station.num_unacked == 3)

        station.feed.allow(1)
        (outcome,) = await station.outcomes(1)
        await until(lambda: station.num_unacked == 2)
        await store(node, "0-0-0", [1], group_size=2)

        assert (outcome.group_id, outcome.kind) == ("0-2-0", OutcomeKind.ABANDONED)
        assert [group.group_id for group in (await station.cut(1)).groups] == ["0-0-0"]
        assert len(await station.outcomes(1)) == 1


async def test_before_finished_work_is_given_up_what_is_trained_is_checkpointed(
    open_role: OpenRole, settings: Settings
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with running(trainer, with_room_for(settings, 3)) as station:
        station.feed.allow(1)
        for index in range(2):
            await store(node, f"0-{index}-0", [0, 1], group_size=2)
        await station.cut(1)
        station.feed.allow(2)
        for index in range(2, 4):
            await store(node, f"0-{index}-0", [0], group_size=2, version="1-1")

        with anyio.fail_after(PATIENCE_S):
            asked = await station.reader.next_entry(2, is_checkpointed=False)
        assert asked is not None
        assert (asked.kind, asked.step) == (CutKind.CHECKPOINT, 1)
        await until(lambda: station.feed.waits_for == "the checkpoint of step 1, which makes room in the stream")
        await station.feed.on_checkpoint(1)
        station.feed.notify()
        for index in range(2, 4):
            await store(node, f"0-{index}-0", [1], group_size=2, version="1-1")

        assert {group.group_id for group in (await station.cut(2)).groups} == {"0-2-0", "0-3-0"}
        assert {one.kind for one in await station.outcomes(2)} == {OutcomeKind.TRAINED}


async def test_cuts_that_cannot_be_replayed_are_given_up_before_their_groups_are_abandoned(
    open_role: OpenRole, settings: Settings
) -> None:
    node, first, second = await open_role(Role.NODE), await open_role(Role.TRAINER), await open_role(Role.TRAINER, "1")
    async with running(first, settings) as old:
        old.feed.allow(1)
        for index in (0, 1):
            await store(node, f"0-{index}-0", [0, 1], group_size=2, num_failed_attempts=1)
        await old.cut(1)
    async with running(second, settings) as new:
        await new.feed.give_up_cuts(after_step=0, why="one of its payloads is gone")

        outcomes = await new.outcomes(2)
        reason = "its cut of step 1 could not be replayed: one of its payloads is gone"
        assert {one.reason for one in outcomes} == {reason}
        assert {(one.kind, one.num_failed_attempts) for one in outcomes} == {(OutcomeKind.ABANDONED, 1)}
    journal = await (await Lineage.take(first)).read_log()
    assert journal.cuts == {}
    assert journal.branches == {"2": 0}


async def test_messages_of_a_cut_to_be_replayed_stay_whatever_a_run_takes_now(
    open_role: OpenRole, settings: Settings
) -> None:
    node, first, second = await open_role(Role.NODE), await open_role(Role.TRAINER), await open_role(Role.TRAINER, "1")
    async with running(first, settings) as old:
        old.feed.allow(1)
        for index in (0, 1):
            await store(node, f"0-{index}-0", [0, 1], group_size=2)
        cut = await old.cut(1)
        await store(node, "0-2-0", [0, 1], group_size=2)
        await until(lambda: len(old.feed.planner.open) == 1)
    fewer = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"group_size": 1})})
    async with running(second, fewer) as new:
        (outcome,) = await new.outcomes(1)  # of what came last
        found, missing, _ = await fetch(new.bus, slots_of(cut))

    assert "got a group of 2, need 1" in outcome.reason
    assert outcome.group_id == "0-2-0"
    assert len(found) == 4
    assert missing == {}


async def test_a_stop_ends_the_journal_instead_of_waiting_for_a_batch(open_role: OpenRole, settings: Settings) -> None:
    trainer = await open_role(Role.TRAINER)
    async with running(trainer, settings) as station:
        station.feed.allow(1)

        station.feed.stop()

        with anyio.fail_after(PATIENCE_S):
            assert await station.reader.next_entry(1, is_checkpointed=False) is None
    entries = [
        decode(one.data, Cut) for one in await trainer.read_log(trainer.names.outcomes_stream, trainer.names.cuts)
    ]
    assert [entry.kind for entry in entries] == [CutKind.BEGIN, CutKind.END]


async def test_a_branch_that_was_interrupted_is_finished_by_the_next_lineage(
    open_role: OpenRole, settings: Settings
) -> None:
    node, first, second = await open_role(Role.NODE), await open_role(Role.TRAINER), await open_role(Role.TRAINER, "1")
    async with running(first, settings) as old:
        old.feed.allow(1)
        for index in (0, 1):
            await store(node, f"0-{index}-0", [0, 1], group_size=2)
        await old.cut(1)
        await old.lineage.write_cut(Cut(kind=CutKind.BRANCH, lineage=1, step=0, branches={"1": 0}))

    async with running(second, settings) as new:
        outcomes = await new.outcomes(2)

        assert {one.group_id for one in outcomes} == {"0-0-0", "0-1-0"}
        assert {one.kind for one in outcomes} == {OutcomeKind.ABANDONED}


@asynccontextmanager
async def with_a_straggler(node: Bus, trainer: Bus, settings: Settings, when_stale: str) -> AsyncIterator[Station]:
    """Step 2 is to be cut: two groups of version 1-1 are whole, one of version 1-0, due now, lacks a sibling."""
    changed = settings.model_copy(
        update={
            "rollout": settings.rollout.model_copy(update={"when_stale": when_stale}),
            "run": settings.run.model_copy(update={"steps": 4}),
        }
    )
    async with running(trainer, changed, first_step=2) as station:
        await store(node, "0-9-0", [0], group_size=2, version="1-0")
        await until(lambda: station.num_unacked == 1)
        for index in (0, 1):
            await store(node, f"0-{index}-0", [0, 1], group_size=2, version="1-1")
        station.feed.allow(2)
        yield station


async def test_wait_holds_the_step_for_a_straggler_that_is_due(open_role: OpenRole, settings: Settings) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with with_a_straggler(node, trainer, settings, "wait") as station:
        await until(lambda: station.feed.waits_for.startswith("due groups of step 2: 0-9-0"))

        await store(node, "0-9-0", [1], group_size=2, version="1-1")

        assert [group.group_id for group in (await station.cut(2)).groups] == ["0-9-0", "0-0-0"]


async def test_drop_goes_on_without_the_straggler_and_records_it_stale(open_role: OpenRole, settings: Settings) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with with_a_straggler(node, trainer, settings, "drop") as station:
        assert {group.group_id for group in (await station.cut(2)).groups} == {"0-0-0", "0-1-0"}
        station.feed.allow(3)

        await store(node, "0-9-0", [1], group_size=2, version="1-1")

        (outcome,) = await station.outcomes(1)
        assert (outcome.group_id, outcome.kind, outcome.step) == ("0-9-0", OutcomeKind.STALE, 3)
        await until(lambda: station.num_unacked == 2)
        assert station.feed.planner.take_counts() == (1, 0)


async def test_mask_goes_on_without_the_straggler_and_trains_what_of_it_is_fresh(
    open_role: OpenRole, settings: Settings
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with with_a_straggler(node, trainer, settings, "mask") as station:
        assert {group.group_id for group in (await station.cut(2)).groups} == {"0-0-0", "0-1-0"}
        station.feed.allow(3)

        await store(node, "0-9-0", [1], group_size=2, version="1-2")
        await store(node, "0-2-0", [0, 1], group_size=2, version="1-2")

        cut = await station.cut(3)
        assert {group.group_id for group in cut.groups} == {"0-2-0", "0-9-0"}
        assert cut.masks_stale
        found, _, _ = await fetch(trainer, slots_of(cut))
        _, stats = build_rows(
            found,
            advantages=dict.fromkeys(found, np.zeros(1, dtype=np.float32)),
            cut=cut,
            start=Version(1, 2),
            temperature=1.0,
        )
        assert (stats.num_tokens, stats.num_masked, stats.max) == (6, 2, 0)


MB = 1 << 20


async def put_image(node: Bus, group_id: str, num_bytes: int) -> ImageRef:
    """Store one image for a group, of bytes that no other group's has."""
    data = group_id.encode().ljust(num_bytes, b".")
    await node.images.put(group_id, ref_of(data), data)
    return ref_of(data)


async def test_images_stay_until_the_checkpoint_that_contains_their_group_and_no_longer(
    open_role: OpenRole, settings: Settings
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with running(trainer, settings) as station:
        station.feed.allow(1)
        refs = {group_id: await put_image(node, group_id, 9) for group_id in ("0-0-0", "0-1-0", "0-2-0")}
        for group_id in ("0-0-0", "0-1-0"):
            await store(node, group_id, [0, 1], group_size=2)
        await station.cut(1)
        await station.feed._images.sweep()
        assert await trainer.images.groups() == list(refs)

        await station.feed.on_checkpoint(1)

        await until(lambda: has_images(trainer, "0-2-0"))
        await station.feed.settle(["0-2-0"], OutcomeKind.FAILED, reason="for a reason", step=1)
        await until(lambda: has_images(trainer))


async def has_images(bus: Bus, *group_ids: str) -> bool:
    return await bus.images.groups() == list(group_ids)


async def test_images_of_a_cut_that_is_to_be_replayed_stay_before_its_messages_have_come_again(
    open_role: OpenRole, settings: Settings
) -> None:
    node, first, second = await open_role(Role.NODE), await open_role(Role.TRAINER), await open_role(Role.TRAINER, "1")
    async with running(first, settings) as old:
        old.feed.allow(1)
        for group_id in ("0-0-0", "0-1-0"):
            await put_image(node, group_id, 9)
            await store(node, group_id, [0, 1], group_size=2)
        await old.cut(1)

    async with running(second, settings, first_step=2) as new:
        assert new.num_unacked == 0
        assert not new.feed.planner.is_over("0-0-0")
        await until(lambda: new.num_unacked == 2)
        await new.feed._images.sweep()
        assert await has_images(second, "0-0-0", "0-1-0")


async def test_images_that_came_after_their_groups_end_go_with_the_next_lineage(
    open_role: OpenRole, settings: Settings
) -> None:
    node, first, second = await open_role(Role.NODE), await open_role(Role.TRAINER), await open_role(Role.TRAINER, "1")
    async with running(first, settings) as old:
        await old.feed.settle(["0-0-0"], OutcomeKind.FAILED, reason="for a reason", step=1)
    for group_id in ("0-0-0", "0-0-1"):
        await put_image(node, group_id, 9)

    async with running(second, settings):
        await until(lambda: has_images(second, "0-0-1"))


async def test_images_are_listed_for_groups_that_are_over_and_else_now_and_then(
    open_role: OpenRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of all that is stored takes the longer the more is under way."""
    monkeypatch.setattr(image_sweep, "POLL_S", 0.01)
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    await put_image(node, "0-0-0", 9)
    over, lists, rooms, groups = set[str](), list[list[str]](), list[StreamRoom](), trainer.images.groups

    async def listed() -> list[str]:
        lists.append(await groups())
        return lists[-1]

    async def is_newest() -> bool:
        return True

    async def has_told(num_rooms: int) -> bool:
        return len(rooms) >= num_rooms

    monkeypatch.setattr(trainer.images, "groups", listed)
    sweep = ImageSweep(trainer, is_over=over.__contains__, has_nothing=lambda: False, is_newest=is_newest)
    async with anyio.create_task_group() as sweeping:
        sweeping.start_soon(sweep.run, rooms.append)
        await until(lambda: has_told(9))
        assert lists == [["0-0-0"]]

        over.add("0-0-0")
        sweep.notify()

        num_rooms = len(rooms) + 9
        await until(lambda: has_told(num_rooms))
        assert lists == [["0-0-0"]] * 2
        assert await groups() == []

        await put_image(node, "0-0-0", 9)  # late: nobody tells
        monkeypatch.setattr(image_sweep, "LIST_S", 0.0)

        await until(lambda: has_images(node))
        sweeping.cancel_scope.cancel()


async def test_how_long_strangers_images_are_in_the_way_counts_anew_after_there_was_room(
    open_role: OpenRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the images of a row whose ticket is on its way would go."""
    monkeypatch.setattr(image_sweep, "POLL_S", 0.01)
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    rooms = list[StreamRoom]()

    async def is_newest() -> bool:
        return True

    async def has_told() -> bool:
        return StreamRoom.AMPLE in rooms

    sweep = ImageSweep(trainer, is_over=lambda _: False, has_nothing=lambda: True, is_newest=is_newest)
    began_at = anyio.current_time()
    await put_image(node, "0-0-0", 7 * MB)
    assert await sweep.sweep() is not StreamRoom.AMPLE
    blocked_s = anyio.current_time() - began_at
    await trainer.images.purge(["0-0-0"], is_newest=is_newest)
    async with anyio.create_task_group() as sweeping:
        sweeping.start_soon(sweep.run, rooms.append)
        await until(has_told)
        sweeping.cancel_scope.cancel()
    monkeypatch.setattr(image_sweep, "STRANGERS_S", anyio.current_time() - began_at - blocked_s)
    await put_image(node, "0-0-0", 7 * MB)

    assert await sweep.sweep() is not StreamRoom.AMPLE

    assert await has_images(node, "0-0-0")


async def test_where_images_take_four_fifths_of_their_stream_a_checkpoint_is_asked_for_and_the_batch_cut_short(
    open_role: OpenRole, settings: Settings
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with running(trainer, settings) as station:
        station.feed.allow(2)
        for group_id in ("0-0-0", "0-1-0"):
            await put_image(node, group_id, 3 * MB)
            await store(node, group_id, [0, 1], group_size=2)
        await station.cut(1)

        await put_image(node, "0-2-0", MB)
        await store(node, "0-2-0", [0, 1], group_size=2, version="1-1")

        with anyio.fail_after(PATIENCE_S):
            asked = await station.reader.next_entry(2, is_checkpointed=False)
        assert asked is not None
        assert (asked.kind, asked.step) == (CutKind.CHECKPOINT, 1)
        assert not await node.images.has_room_to_admit()
        await station.feed.on_checkpoint(1)
        await until(node.images.has_room_to_admit)
        await put_image(node, "0-2-0", 6 * MB)
        assert [group.group_id for group in (await station.cut(2)).groups] == ["0-2-0"]


async def test_a_stream_full_of_images_gives_up_the_youngest_group_also_one_without_a_slot(
    open_role: OpenRole, settings: Settings
) -> None:
    """Its siblings wait for room to store what a tool has shown them, so there is none whose slot is stored."""
    controller, node, trainer = [await open_role(role) for role in (Role.CONTROLLER, Role.NODE, Role.TRAINER)]
    async with running(trainer, settings) as station:
        station.feed.allow(1)
        for index in range(3):
            group_id = f"0-{index}-0"
            await controller.publish(controller.names.tickets("w"), ticket(group_id, group_size=2), msg_id=group_id)
            await until(lambda name=group_id: name in station.feed.planner.open)  # type: ignore[misc]
            await put_image(node, group_id, 2 * MB)
        with pytest.raises(StreamFullError):
            await put_image(node, "0-0-0", 3 * MB)

        (outcome,) = await station.outcomes(1)

        assert (outcome.group_id, outcome.kind) == ("0-2-0", OutcomeKind.ABANDONED)
        assert outcome.reason == "the stream was full, and this was its youngest incomplete group"
        await until(lambda: has_images(trainer, "0-0-0", "0-1-0"))
        await put_image(node, "0-0-0", 3 * MB)
        assert len(await station.outcomes(1)) == 1


STRANGE = ("0-7-0.x", "eval-none-0.x", "nobody.x", "nobody.>", "*.x", ">.x", "a$b.x")
"""Group and hash of messages that anyone with a node's key may store, and no group's end removes."""


async def test_images_of_groups_that_nobody_admits_do_not_stop_admission_for_ever(
    open_role: OpenRole, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_sweep, "STRANGERS_S", 0.0)
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with running(trainer, settings) as station:
        station.feed.allow(1)
        for group_id in ("0-0-0", "0-1-0"):
            await put_image(node, group_id, 9)
            await store(node, group_id, [0, 1], group_size=2)
        await station.cut(1)
        for name in STRANGE:
            await node.api.store(f"areal.test.images.{name}", b"x" * (MB - 1000))
        assert not await node.images.has_room_to_admit()
        await station.feed._images.sweep()
        assert (await trainer.stream_state(trainer.names.images_stream)).num_messages == len(STRANGE) + 2

        await station.feed.on_checkpoint(1)

        await until(node.images.has_room_to_admit)
        assert (await trainer.stream_state(trainer.names.images_stream)).num_messages == 0


async def test_images_of_a_group_that_is_about_to_be_admitted_stay_while_there_is_room_or_for_a_moment(
    open_role: OpenRole, settings: Settings
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    async with running(trainer, settings) as station:
        await put_image(node, "0-0-0", 9)
        await until(station.feed._has_nothing)
        await station.feed._images.sweep()
        assert await has_images(trainer, "0-0-0")

        await put_image(node, "0-1-0", 6 * MB + MB // 2)
        await put_image(node, "0-2-0", MB // 2)
        assert not await node.images.has_room_to_admit()
        await station.feed._images.sweep()
        assert await has_images(trainer, "0-0-0", "0-1-0", "0-2-0")
