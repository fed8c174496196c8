"""Faults of the broker: killed in a loop, asked to end, frozen; full streams and poison."""

import json
import resource
import signal
import time
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime

import anyio
import numpy as np

from areal_async.bus import Bus, EmbeddedBroker, Role, credentials_for, declare, open_bus, take_trainer_consumer
from areal_async.config.settings import BusSettings, RolloutSettings, RunSettings, Settings
from areal_async.protocol.publish_log import PublishLog, read_receipts
from areal_async.protocol.types import Cut, CutGroup, CutSlot, Sequence, Slot, SlotStatus, Ticket, Trajectory, Version
from areal_async.protocol.wire import GROUP_HEADER, SLOTS_HEADER, decode_headers
from areal_async.rollout.backpressure import Backpressure
from areal_async.rollout.publish import Outbox
from areal_async.telemetry.wait_graph import BROKER
from areal_async.trainer.batch.payloads import fetch, slots_of
from tools.faults_cases import Case, row
from tools.faults_counts import SlotCounts
from tools.faults_run import ENDLESS, HELD, FaultRun, send_signal

NUM_KILLS = 10
NUM_LARGE = 40
LARGE_TOKENS = (4 << 20) // 17
"""17 bytes each."""
FREEZE_S = 15.0
WATCHDOG_S = 5.0
NOTICED_S = 8.0
"""Three pings and some; a connection pings every two seconds."""


def broker_pid(run: FaultRun) -> int:
    """Return the broker's process as it says itself."""
    return int((run.directory / "bus" / "nats.pid").read_text())


def wait_broker_back(run: FaultRun, before: int) -> None:
    """Wait until another process than ``before`` is the broker."""

    def is_back() -> bool:
        events = run.events("launcher", "broker.restarted")
        return bool(events) and events[-1]["pid"] not in (before, 0) and broker_pid(run) == events[-1]["pid"]

    run.wait_until(is_back, "the broker to be back", deadline_s=60)


@row("1", f"broker: {NUM_KILLS} x kill -9, 1 to 2 s apart", is_random=True, is_quick=True)
def broker_kill_loop(case: Case) -> None:
    run = case.new_run(run__steps=ENDLESS)
    run.start()
    run.wait_for_step(1)
    for _ in range(NUM_KILLS):
        time.sleep(case.rng.uniform(1.0, 2.0))
        pid = broker_pid(run)
        send_signal(pid, signal.SIGKILL)
        wait_broker_back(run, pid)
        case.recovered(run.wait_for_progress())
    run.stop()


@row("2", "broker: SIGTERM and lame duck")
def broker_asked_to_end(case: Case) -> None:
    run = case.new_run(run__steps=ENDLESS)
    run.start()
    run.wait_for_step(1)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2):
        time.sleep(1.0)
        pid = broker_pid(run)
        send_signal(pid, number)
        wait_broker_back(run, pid)
        case.recovered(run.wait_for_progress())
    case.check(not run.events("launcher", "process.died"), "a role ended because the broker was asked to")
    run.stop()


@row("12", f"broker: SIGSTOP for {FREEZE_S:g} s", is_alone=True)
def broker_frozen(case: Case) -> None:
    run = case.new_run(run__steps=ENDLESS, run__watchdog_s=WATCHDOG_S)
    run.start()
    run.wait_for_step(2)
    pid, at, ends_at = broker_pid(run), datetime.now(UTC), time.monotonic() + FREEZE_S
    send_signal(pid, signal.SIGSTOP)
    case.wait_named(BROKER, since=at)
    time.sleep(max(0.0, ends_at - time.monotonic()))
    send_signal(pid, signal.SIGCONT)
    case.recovered(run.wait_for_progress())
    for role in ("node", "trainer", "controller"):
        losses = [datetime.fromisoformat(event["timestamp"]) for event in run.events(role, "bus.disconnected")]
        noticed_s = [(loss - at).total_seconds() for loss in losses if loss > at]
        case.check(bool(noticed_s), f"{role} never noticed that the broker was frozen")
        case.check(noticed_s[0] < NOTICED_S, f"{role} noticed after {noticed_s[0]:.1f} s, need {NOTICED_S:g}")
    case.check(not run.events("launcher", "process.died"), "a role ended because the broker was frozen")
    run.stop()


@row("14", f"{NUM_LARGE} trajectories of 4 MB, fetched at once", is_alone=True)
def large_trajectories(case: Case) -> None:
    settings = Settings(
        run=RunSettings(name="large", directory=case.directory),
        rollout=RolloutSettings(max_stream_bytes=1 << 30, batch_groups=NUM_LARGE),
        bus=BusSettings(max_disk_bytes=2 << 30),
    )
    broker_log = case.directory / "large" / "logs" / "nats.log"
    case.counts = anyio.run(_publish_and_fetch, settings)
    case.check("Slow Consumer" not in broker_log.read_text(), "the broker cut off a slow consumer")
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    case.note(f"peak RSS of publisher and reader {peak_bytes >> 20} MB")


async def _publish_and_fetch(settings: Settings) -> SlotCounts:
    """Send large trajectories through an outbox each, then read all headers, and all payloads, at once."""
    broker = EmbeddedBroker(settings)
    await broker.start()

    def as_role(role: Role) -> AbstractAsyncContextManager[Bus]:
        return open_bus(broker.url, names=settings.names, role=role, credentials=broker.credentials(role))

    try:
        async with as_role(Role.OPERATOR) as bus:
            await declare(bus, settings)
        receipts = PublishLog(settings.run_directory, "0")
        async with as_role(Role.NODE) as bus, anyio.create_task_group() as publishing:
            for index in range(NUM_LARGE):
                publishing.start_soon(_publish_large, bus, receipts, index)
        async with as_role(Role.TRAINER) as bus:
            return await _fetch_large(bus, await take_trainer_consumer(bus, 1))
    finally:
        await broker.aclose()


async def _publish_large(bus: Bus, receipts: PublishLog, index: int) -> None:
    ticket = Ticket(group_id=f"0-{index}-0", workflow="w", row={}, group_size=1, version="1-0")
    outbox = Outbox(
        bus, ticket, producer="0.large", num_expected=1, linger_s=0.0, backpressure=Backpressure(),
        publish_log=receipts,
    )  # fmt: skip
    tokens = np.zeros(LARGE_TOKENS, np.int32)
    sequence = Sequence(
        token_ids=tokens,
        loss_mask=tokens == 0,
        logprobs=tokens.astype(np.float32),
        versions=np.full(LARGE_TOKENS, Version.parse(ticket.version).pack()),
    )
    uid = f"{ticket.group_id}.0.large"
    slot = Slot(
        sibling=0, sample_uid=uid, status=SlotStatus.SCORED, num_tokens=LARGE_TOKENS, oldest="1-0", newest="1-0"
    )
    outbox.put(Trajectory(slot=slot, sequences=[sequence]))
    await outbox.run()


async def _fetch_large(bus: Bus, consumer: str) -> SlotCounts:
    groups: list[CutGroup] = []
    async with bus.consume(bus.names.trajectories_stream, consumer) as inbox:
        while deliveries := await inbox.fetch(512, wait_s=1.0):
            for one in deliveries:
                stored = decode_headers(one.headers, sequence=one.sequence, num_bytes=one.num_bytes)
                slots = [CutSlot(slot=slot, sequence=one.sequence) for slot in stored.slots]
                groups.append(CutGroup(group_id=stored.group_id, workflow=stored.workflow, slots=slots))
    found, missing, _ = await fetch(bus, slots_of(Cut(lineage=1, step=1, groups=groups)))
    return SlotCounts(acked=NUM_LARGE, stored=len(found), lost=[str(key) for key in missing][: NUM_LARGE - len(found)])


@row("18", "poison messages among the trajectories", is_quick=True)
def poison(case: Case) -> None:
    run = case.new_run(run__steps=14, faults=f"{HELD}:3:stop")
    run.start()
    trainer = run.wait_held()
    group_id = _last_stored_group(run)
    count = anyio.run(_poison, run, group_id)
    send_signal(trainer, signal.SIGCONT)
    run.finish()
    stream = run.settings().names.trajectories_stream
    found = {one["sequence"] for one in run.events("trainer", "message.buried") if one["stream"] == stream}
    case.check(len(found) == count, f"{count} poison messages, {len(found)} told of")
    case.check(not run.events("launcher", "process.died"), "a role died of poison")
    case.note(f"{count} dead letters, in group {group_id}")


def _last_stored_group(run: FaultRun) -> str:
    receipts = [receipt for produced in read_receipts(run.directory).values() for receipt in produced.receipts]
    return receipts[-1].group_id


async def _poison(run: FaultRun, group_id: str) -> int:
    """Publish messages that no producer of ours would, for a group that is under way; return how many."""
    settings, directory = run.settings(), run.run_directory
    names, known = settings.names, {"group_id": group_id, "workflow": "gsm8k", "ticket_version": "1-0"}
    group = json.dumps({"schema": 1, **known, "num_failed_attempts": 0, "group_size": 8})
    newer = json.dumps({"schema": 99, **known, "num_failed_attempts": 0, "group_size": 8})
    slot = {"sibling": 0, "sample_uid": "x", "status": "scored", "oldest": "1-0", "newest": "1-0"}
    headers: list[dict[str, str]] = [
        {},
        {GROUP_HEADER: group},
        {GROUP_HEADER: "{", SLOTS_HEADER: "[]"},
        {GROUP_HEADER: newer, SLOTS_HEADER: json.dumps([slot])},
        {GROUP_HEADER: group, SLOTS_HEADER: json.dumps([{**slot, "sibling": 1 << 40}])},
        {GROUP_HEADER: group, SLOTS_HEADER: json.dumps([{**slot, "status": "perfect"}])},
        {GROUP_HEADER: group, SLOTS_HEADER: "[" * 20000},
    ]
    async with open_bus(
        directory.read_bus_url(),
        names=names,
        role=Role.OPERATOR,
        instance="poison",
        credentials=credentials_for(settings, directory.path, Role.OPERATOR),
    ) as bus:
        for one in headers:
            await bus.publish(names.trajectories("gsm8k", group_id), b"\xff" * 100, headers=one)
    return len(headers)
