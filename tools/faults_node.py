"""A node's credentials in other hands, beside a live run: aimed at all that a node may not write.

The run has to go on as if nothing had been: no order obeyed, no key displaced, nothing lost.
"""

import signal
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import anyio
import msgspec
from structlog.testing import capture_logs

from areal_async.bus import Bus, Role, credentials_for, open_bus
from areal_async.bus.client import FORWARDED
from areal_async.bus.connection import Received
from areal_async.bus.keys import HISTORY
from areal_async.bus.permissions import permissions
from areal_async.protocol.subjects import ADMITTED, CHANGES, CHECKPOINT, CONTROL, LINEAGE, RUN_STATE, SETTINGS, Names
from tools.faults_cases import Case, row
from tools.faults_run import HELD, FaultRun, send_signal

NUM_TIMES = HISTORY + 4
"""Number of bad values that would push every good one of a key out."""
NUM_STEPS = 12
THIEF = "thief"
ORDERED = ("run.ordered", "setting.changed")
"""The controller's answer to an order that it obeys."""
STILL = (CONTROL, CHANGES, SETTINGS)
"""Keys that nobody writes while a run goes on by itself."""
BY_BROKER = ("Nats-Sequence", "Status", FORWARDED)
"""Headers of its answers, as they come and as they are stored."""
ANSWER_S = 10.0
READ = "$JS.API.DIRECT.GET."
MISSING = b'{"seq": 999999}'


@row("29", "a node's credentials: orders and keys, published and as answers of the broker", is_quick=True)
def node_credentials(case: Case) -> None:
    run = case.new_run(run__steps=NUM_STEPS, faults=f"{HELD}:3:stop")
    run.start()
    trainer = run.wait_held()
    anyio.run(_inject, case, run)
    num_steps_before = len(run.steps)
    case.check(num_steps_before < NUM_STEPS, "the run had ended before it was struck")
    send_signal(trainer, signal.SIGCONT)
    run.finish()
    obeyed = [one for event in ORDERED for one in run.events("controller", event)]
    case.check(not obeyed, f"the controller obeyed: {obeyed[:1]}")
    case.check(not (run.directory / "changes.jsonl").exists(), "a setting was changed")
    roles = ("node", "trainer", "controller", "launcher")
    buried = [one for role in roles for one in run.events(role, "message.buried") if one["stream"].startswith("KV_")]
    case.check(not buried, f"a key could not be read: {buried[:1]}")
    case.check(not run.events("launcher", "process.died"), "a process ended of it")
    case.check_steps()
    num_untrained = sum(line["failed"] + line["dropped_stale"] for line in run.steps)
    case.check(num_untrained == 0, f"{num_untrained} groups were not trained")
    case.note(f"struck up to step {num_steps_before} of {NUM_STEPS}")


async def _inject(case: Case, run: FaultRun) -> None:
    """Publish, and read with the answers sent elsewhere; fail the row where anything of it arrives."""
    settings, received = run.settings(), list[Received]()
    names = settings.names
    aims = _aims(names)
    async with AsyncExitStack() as stack:

        async def open_role(role: Role, instance: str) -> Bus:
            key = credentials_for(settings, run.directory, role)
            url = run.run_directory.read_bus_url()
            return await stack.enter_async_context(
                open_bus(url, names=names, role=role, instance=instance, credentials=key)
            )

        operator, thief = await open_role(Role.OPERATOR, "watch"), await open_role(Role.NODE, THIEF)
        for subject in aims:
            await operator.connection.listen(subject, received.append)
        before = await _revisions(operator)
        num_denied = await _publish(thief, aims)
        case.check(num_denied == NUM_TIMES * len(aims), f"{num_denied} publishes denied, need every one")
        num_read = await _read(thief, aims)
        await operator.api.ask("$JS.API.INFO")  # answered after all that came before has been received
        wrong = [one.subject for one in received if _is_thiefs(one.headers, one.data)]
        case.check(not wrong, f"{len(wrong)} messages came through, the first to {(wrong or [''])[0]}")
        kept = await operator.read_log(f"KV_{names.bucket}", f"$KV.{names.bucket}.>")
        displaced = [one.subject for one in kept if _is_thiefs(one.headers, one.data)]
        case.check(not displaced, f"{len(displaced)} values of keys are the thief's, the first of {displaced[:1]}")
        after = await _revisions(operator)
        case.check(before == after, f"keys were written: got revisions {after}, need {before}")
        case.note(f"{num_denied} publishes denied, {num_read} answers sent elsewhere, {len(kept)} values of keys good")


def _aims(names: Names) -> dict[str, bytes]:
    """Return where a node must not write, and what would do harm there."""
    keys = f"$KV.{names.bucket}."
    bodies: dict[str, Mapping[str, Any]] = {
        names.control("set"): {"setting": "trainer.lr", "value": 1.0},
        names.control("pause"): {},
        names.control("stop"): {},
        keys + ADMITTED: {"total": 0},
        keys + CHECKPOINT: {"version": "9-0", "path": ""},
        keys + names.weights_key(): {"version": "9-0"},
        keys + LINEAGE: {"lineage": 9},
        keys + RUN_STATE: {"state": "finished"},
        keys + CONTROL: {"is_paused": True},
        keys + CHANGES: {},
    }
    return {subject: msgspec.json.encode({**body, "by": THIEF}) for subject, body in bodies.items()}


async def _publish(thief: Bus, aims: Mapping[str, bytes]) -> int:
    """Publish there as it is; return how many the broker has denied."""
    with capture_logs() as logs:
        for subject, body in aims.items():
            for _ in range(NUM_TIMES):
                await thief.connection.client.publish(subject, body)  # ours gives up after the first denial
        await thief.api.ask("$JS.API.INFO")
    ours = [one for one in logs if one.get("connection") == thief.connection.name]
    return sum(one["event"] == "bus.permission_denied" for one in ours)


async def _read(thief: Bus, aims: Mapping[str, bytes]) -> int:
    """Read all that a node may read, and what it has stored itself, with the answers sent there; return how many."""
    reads = list(_reads(thief.names))
    for subject, body in reads:
        await thief.connection.request(subject, body, deadline_s=ANSWER_S)  # each is answered, where the asker may hear
    own, num_read = f"{READ}{thief.names.trajectories_stream}", 0
    for _ in range(NUM_TIMES):
        for aim, harm in aims.items():
            planted = await thief.publish(thief.names.trajectories("gsm8k", THIEF), harm)
            for subject, body in ((own, b'{"seq": %d}' % planted.sequence), *reads):
                await thief.connection.publish(subject, body, reply=aim)
                num_read += 1
    await thief.api.ask("$JS.API.INFO")
    return num_read


def _reads(names: Names) -> Iterator[tuple[str, bytes]]:
    """Yield what a node may ask for of stored messages."""
    for pattern in permissions(Role.NODE, names).publish:
        if pattern.startswith(READ) and pattern.endswith(".>"):
            yield pattern.replace(">", f"$KV.{names.bucket}.{ADMITTED}" if "KV_" in pattern else names.outcomes), b""
        elif pattern.startswith(READ):
            yield pattern, MISSING
            yield pattern, b'{"seq": 1, "batch": 2, "next_by_subj": ">"}'


async def _revisions(operator: Bus) -> list[int]:
    bucket = operator.names.bucket
    last = [await operator.get_last(f"KV_{bucket}", f"$KV.{bucket}.{key}") for key in STILL]
    return [one.sequence if one is not None else 0 for one in last]


def _is_thiefs(headers: Mapping[str, str], data: bytes) -> bool:
    return THIEF.encode() in data or any(header in headers for header in BY_BROKER)
