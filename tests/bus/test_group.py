"""A group workflow on a real broker: its group is stored whole or not at all, whenever its node is killed."""

import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from areal_async.bus import EmbeddedBroker, Role
from areal_async.config import settings as settings_module
from areal_async.config.settings import Settings
from areal_async.config.sources import dump_settings
from areal_async.process.failpoints import FIRED, SPECIFICATION
from areal_async.protocol import wire
from areal_async.protocol.evaluations import EvalResult, EvalTicket
from areal_async.protocol.types import Slot, SlotStatus
from tests.brokers import OpenRole
from tests.bus.test_node import Run
from tests.bus.test_node import settings as settings

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

WORKFLOW = """
from areal_async import Reject, group_workflow

@group_workflow
async def play(prompt, siblings):
    with open(prompt["calls"], "a") as file:
        file.write(f"{len(siblings)}\\n")
    replies = [await policy.complete([5, 6, 7 + number]) for number, policy in enumerate(siblings)]
    match prompt["kind"]:
        case "raise":
            raise ValueError("broken on purpose")
        case "reject one":
            return [1.0, Reject("not this one"), 2.0, 3.0]
    return [float(number) for number in range(len(replies))]
"""
LEASE_S = 5.0
KILLED_NODE = """
import sys
from pathlib import Path
from areal_async.config import settings
from areal_async.rollout.main import run
from areal_async.config.sources import load_settings

settings.TICKET_ACK_WAIT_S = float(sys.argv[3])
loaded = load_settings(Path(sys.argv[1]), use_environment=False)
run(loaded, run_directory=loaded.run_directory, bus_url=sys.argv[2], node_id="n1")
"""


@pytest.fixture
def calls(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where every call of the workflow leaves a line; tickets come back soon from nodes that are killed."""
    monkeypatch.setattr(settings_module, "TICKET_ACK_WAIT_S", LEASE_S)
    Path(tmp_path / "play.py").write_text(WORKFLOW)
    return tmp_path / "calls"


@pytest.fixture
async def run(calls: Path, broker: EmbeddedBroker, open_role: OpenRole, settings: Settings) -> Run:
    return Run(settings, *[await open_role(role) for role in (Role.OPERATOR, Role.CONTROLLER, Role.TRAINER, Role.NODE)])


async def run_killed_node(settings: Settings, broker: EmbeddedBroker, directory: Path, point: str) -> None:
    """Run a node in a process of its own, which kills itself where the fault point is."""
    config = anyio.Path(directory / "node.yaml")
    await config.write_text(dump_settings(settings))
    ended = await anyio.run_process(
        [sys.executable, "-c", KILLED_NODE, str(config), broker.url, str(LEASE_S)],
        env={**os.environ, SPECIFICATION: f"{point}:1:kill", FIRED: str(directory / "fired")},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()


def num_siblings_of(calls: Path) -> list[int]:
    """How many siblings each call of the workflow saw."""
    return [int(line) for line in calls.read_text().splitlines()]


def producers(slots: list[Slot]) -> set[str]:
    return {slot.sample_uid.split(".", 2)[2] for slot in slots}


async def test_one_call_fills_all_slots_in_one_message(run: Run, calls: Path) -> None:
    await run.announce()
    await run.admit(kind="reject one", calls=str(calls))

    async with run.running_node():
        slots = await run.slots(4)
        await run.no_tickets()

    assert [(slot.status, slot.reward, slot.reason) for slot in slots] == [
        (SlotStatus.SCORED, 1.0, ""),
        (SlotStatus.REJECTED, 0.0, "not this one"),
        (SlotStatus.SCORED, 2.0, ""),
        (SlotStatus.SCORED, 3.0, ""),
    ]
    assert len(await run.stored()) == 1
    assert num_siblings_of(calls) == [4]


async def test_a_raising_call_is_recorded_on_every_slot(run: Run, calls: Path) -> None:
    await run.announce()
    await run.admit(kind="raise", calls=str(calls))

    async with run.running_node():
        slots = await run.slots(4)
        await run.no_tickets()

    assert {(slot.status, slot.reason) for slot in slots} == {
        (SlotStatus.FAILED, "workflow play: ValueError: broken on purpose")
    }


@pytest.mark.parametrize(
    ("point", "num_calls_of_the_next"),
    [("node.before_publish", 1), ("node.after_publish", 0), ("node.before_ack", 0)],
)
async def test_a_killed_nodes_group_is_found_whole_or_run_whole(
    run: Run,
    broker: EmbeddedBroker,
    settings: Settings,
    calls: Path,
    tmp_path: Path,
    point: str,
    num_calls_of_the_next: int,
) -> None:
    await run.announce()
    await run.admit(calls=str(calls))

    await run_killed_node(settings, broker, tmp_path, point)
    before = num_siblings_of(calls)
    num_stored = sum(len(message.slots) for message, _ in await run.stored())
    async with run.running_node():
        slots = await run.slots(4)
        await run.no_tickets()

    assert num_stored == (0 if num_calls_of_the_next else 4)
    assert num_siblings_of(calls)[len(before) :] == [4] * num_calls_of_the_next
    assert [slot.reward for slot in slots] == [0.0, 1.0, 2.0, 3.0]
    assert len(producers(slots)) == 1


async def test_an_evaluation_calls_it_with_one_sibling(run: Run, calls: Path) -> None:
    await run.announce()
    ticket = EvalTicket(eval_id="1-0", index=0, workflow="play", row={"kind": "score", "calls": str(calls)})
    await run.controller.publish(run.names.eval_tickets("play"), ticket, msg_id="e0")

    async with run.running_node():
        async for message in run.operator.follow(run.names.eval_stream, run.names.eval_results("play")):
            result = wire.decode(message.data, EvalResult)
            break

    assert (result.reward, result.error, num_siblings_of(calls)) == (0.0, "", [1])
