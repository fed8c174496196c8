"""A node on a real broker: every leased ticket ends in stored slots, whatever user code, servers and streams do."""

import json
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from structlog.testing import capture_logs

from areal_async.bus import MOST_TIMES, Bus, EmbeddedBroker, Role, take_trainer_consumer
from areal_async.bus.inbox import PULL_S
from areal_async.bus.log import StreamReader
from areal_async.bus.streams import forget_nodes
from areal_async.config.settings import (
    BusSettings,
    DatasetSettings,
    InferenceSettings,
    ModelSettings,
    RolloutSettings,
    RunSettings,
    SamplingSettings,
    Settings,
    TaskSettings,
)
from areal_async.errors import UserError
from areal_async.inference.pool import ServerPool
from areal_async.process.bell import Bell
from areal_async.protocol import wire
from areal_async.protocol.evaluations import EvalResult, EvalTicket
from areal_async.protocol.run_state import DISOWNED, LEFT, Change, Changes, FleetMembers, ServerState
from areal_async.protocol.subjects import CHANGES
from areal_async.protocol.types import (
    Outcome,
    OutcomeKind,
    Slot,
    SlotStatus,
    StoredMessage,
    Ticket,
    Trajectory,
    WeightsVersion,
)
from areal_async.rollout.leases import Leases
from areal_async.rollout.node import FIRST_CLAIMS, run_node
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.seldom import times_of
from tests.brokers import PATIENCE_S, OpenRole, fetch_all, until

pytestmark = pytest.mark.anyio

TESTS = Path(__file__).parents[1]
MODEL = TESTS.parent / "configs" / "models" / "tiny"
WORKFLOW = """
import itertools
import anyio
from areal_async import Reject
from tests.unit.rollout import sample_rewards

calls = itertools.count()
scored = []

async def play(prompt, policy):
    number = next(calls)
    reply = await policy.complete([5, 6, 7], **prompt.row.get("sampling", {}))
    match prompt["kind"]:
        case "raise":
            raise ValueError("broken on purpose")
        case "hang":
            return await sample_rewards.hang(prompt["pid_file"])
        case "reject" if number % 2:
            raise Reject("not this one")
        case "block":
            await anyio.sleep_forever()
        case "two_finish" if number >= 2:
            await anyio.sleep_forever()
    scored.append(number)
    return float(len(reply.token_ids))
"""


RUN_DEADLINE_S = 200.0
"""Of a node with its server, from its start to its end: it is for what hangs."""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("PYTHONPATH", f"{TESTS / 'fakes'}:{TESTS.parent}")
    monkeypatch.setattr(
        "areal_async.config.settings.TICKET_ACK_WAIT_S", 10 * PATIENCE_S
    )  # no ticket comes again by itself
    workflow = tmp_path / "play.py"
    workflow.write_text(WORKFLOW)
    return Settings(
        run=RunSettings(name="test", directory=tmp_path / "runs"),
        tasks=(TaskSettings(workflow=str(workflow), dataset=DatasetSettings(path="none")),),
        model=ModelSettings(path=str(MODEL), dtype="float32"),
        rollout=RolloutSettings(
            group_size=4,
            min_group_size=2,
            sampling=SamplingSettings(max_new_tokens=16),
            max_stream_bytes=2 << 20,
            max_trajectory_bytes=1 << 16,
        ),
        inference=InferenceSettings(backend="sglang", python=Path(sys.executable), start_deadline_s=PATIENCE_S),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )


class Run:
    """The rest of the system, as a node's test needs it."""

    def __init__(self, settings: Settings, operator: Bus, controller: Bus, trainer: Bus, node: Bus) -> None:
        self.settings = settings
        self.names = settings.names
        self.operator, self.controller, self.trainer, self.node = operator, controller, trainer, node

    async def announce(self, version: str = "1-0") -> None:
        await self.trainer.put(self.names.weights_key(), WeightsVersion(version=version, path=str(MODEL)))

    async def admit(self, group_id: str = "0-0-0", **row: object) -> None:
        ticket = Ticket(group_id=group_id, workflow="play", row={"kind": "score", **row}, group_size=4, version="1-0")
        await self.controller.publish(self.names.tickets("play"), ticket, msg_id=group_id)

    async def stored(self) -> list[tuple[StoredMessage, list[Trajectory]]]:
        messages = await self.operator.read_log(self.names.trajectories_stream, "areal.test.trajectories.>")
        found = []
        for message in messages:
            stored = wire.decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
            found.append((stored, [wire.decode_trajectory(message.data, slot) for slot in stored.slots]))
        return found

    async def slots(self, num_slots: int) -> list[Slot]:
        """Wait until this many slots are stored."""
        while True:
            found = [slot for message, _ in await self.stored() for slot in message.slots]
            if len(found) >= num_slots:
                return sorted(found, key=lambda slot: slot.sibling)
            await anyio.sleep(0.02)

    async def server(self, condition: Callable[[ServerState], bool], server_id: str = "n0-0") -> ServerState:
        """Wait until the node's first (or another) server is said to be so."""
        while True:
            state, _ = await self.operator.get(self.names.server_key(server_id), ServerState)
            if state is not None and condition(state):
                return state
            await anyio.sleep(0.02)

    async def left_in(self, stream: str, num_messages: int = 0) -> None:
        """Wait until no more than this many messages are left."""
        while True:
            if (await self.operator.stream_state(stream)).num_messages <= num_messages:
                return
            await anyio.sleep(0.02)

    async def no_tickets(self) -> None:
        await self.left_in(self.names.tickets_stream)

    @asynccontextmanager
    async def running_node(self, settings: Settings | None = None) -> AsyncIterator[anyio.Event]:
        """A node that is cancelled at the end; the event has it drain."""
        draining = anyio.Event()

        async def run() -> None:
            await run_node(
                settings or self.settings,
                self.node,
                node_id="n0",
                run_directory=self.settings.run_directory,
                draining=draining,
                grace_s=0.1,
            )

        with anyio.fail_after(RUN_DEADLINE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                yield draining
                tasks.cancel_scope.cancel()


@pytest.fixture
async def run(broker: EmbeddedBroker, open_role: OpenRole, settings: Settings) -> Run:
    return Run(settings, *[await open_role(role) for role in (Role.OPERATOR, Role.CONTROLLER, Role.TRAINER, Role.NODE)])


@pytest.mark.parametrize(
    "said",
    [
        pytest.param({"version": "", "fenced": True, "reason": DISOWNED}, id="disowned while nobody heard it"),
        pytest.param({"fenced": True, "reason": "forged"}, id="by another node"),
        pytest.param({"version": "0-0"}, id="older than it is"),
        pytest.param({"node_id": "n1"}, id="another's"),
    ],
)
async def test_what_is_said_wrong_of_a_nodes_server_is_put_right_by_the_node(run: Run, said: dict[str, Any]) -> None:
    await run.announce()
    async with run.running_node():
        mine = await run.server(lambda state: state.version == "1-0" and not state.fenced)
        wrong = await run.controller.put(run.names.server_key(mine.server_id), msgspec.structs.replace(mine, **said))

        async def is_right() -> bool:
            now, revision = await run.controller.get(run.names.server_key(mine.server_id), ServerState)
            return now == mine and revision > wrong

        await until(is_right)


@pytest.mark.parametrize(
    ("key", "server_id", "said"),
    [
        ("n0-7", "n0-7", {"version": "1-0"}),
        ("ghost", "n0-0", {"version": "1-0"}),
        ("n0-7", "n0-7", {"version": "", "fenced": True, "reason": "starting", "wants_weights": True}),
    ],
)
async def test_what_is_said_of_a_server_that_a_node_does_not_have_is_put_right_by_the_node(
    run: Run, key: str, server_id: str, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.rollout.node.NUM_CLAIMS", 1)  # all keys at every look
    await run.announce()
    ghost = ServerState(server_id=server_id, node_id="n0", url="http://nowhere", **said)
    async with run.running_node():
        mine = await run.server(lambda state: state.version == "1-0" and not state.fenced)
        await run.node.put(run.names.server_key(key), ghost)

        now = await run.server(lambda state: state.reason == LEFT, key)

        assert now == ghost.gone(LEFT)
        assert (now.version, now.fenced, now.is_waited_for) == ("", True, False)
        assert await run.server(lambda _: True) == mine


async def test_a_node_speaks_more_seldom_the_more_nodes_have_servers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pulls: list[dict[str, Any]] = []
    publish = run.node.connection.publish

    async def noting_pulls(subject: str, payload: bytes = b"", **rest: Any) -> None:
        if ".MSG.NEXT." in subject:
            pulls.append(msgspec.json.decode(payload))
        await publish(subject, payload, **rest)

    monkeypatch.setattr(run.node.connection, "publish", noting_pulls)
    monkeypatch.setattr("areal_async.rollout.node.NUM_CLAIMS", 1)
    monkeypatch.setattr("areal_async.rollout.seldom.NODES_AT_FULL_PACE", 2)
    await run.announce()
    for number in range(1, 6):
        for server in ("0", "1"):
            server_id = f"n{number}-{server}"
            ghost = ServerState(server_id=server_id, node_id=f"n{number}", url="", version="", fenced=True)
            await run.node.put(run.names.server_key(server_id), ghost)
    async with run.running_node():
        await run.server(lambda state: state.version == "1-0" and not state.fenced)

        await until(lambda: run.node.connection.times == 3.0)
        await run.admit()  # the pull that waits is an earlier one
        await until(lambda: any(one.get("expires", 0) > 2.5 * PULL_S * 1e9 for one in pulls))

    assert (times_of(1), times_of(1_000)) == (1.0, MOST_TIMES)


async def test_a_version_that_a_node_did_not_hear_of_is_looked_for_more_often_than_other_keys(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unheard(self: StreamReader, subject: str) -> Bell:
        return Bell()

    monkeypatch.setattr(StreamReader, "bell", unheard)
    monkeypatch.setattr("areal_async.rollout.node.POLL_S", 10 * PATIENCE_S)
    monkeypatch.setattr("areal_async.rollout.node.WEIGHTS_POLL_S", 0.1)
    await run.announce("1-0")
    async with run.running_node():
        await run.server(lambda state: state.version == "1-0")
        await run.announce("1-1")

        await run.server(lambda state: state.version == "1-1")


async def test_nodes_that_start_at_once_soon_know_how_many_they_are(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []
    monkeypatch.setattr("areal_async.rollout.node.NUM_CLAIMS", 1_000_000)
    monkeypatch.setattr("areal_async.rollout.node.CLAIM_S", 0.05)
    monkeypatch.setattr("areal_async.rollout.node.times_of", lambda num_nodes: noted.append(num_nodes) or 1.0)
    await run.announce()
    async with run.running_node():
        await until(lambda: len(noted) == FIRST_CLAIMS)


async def test_a_new_server_waits_until_there_is_room_for_its_key(run: Run) -> None:
    stream = f"KV_{run.names.nodes_bucket}"
    config = (await run.operator.api.ask(f"$JS.API.STREAM.INFO.{stream}"))["config"]
    await run.operator.api.ask(f"$JS.API.STREAM.UPDATE.{stream}", {**config, "max_msgs": 1})
    ghost = ServerState(server_id="ghost", node_id="n1", url="", version="", fenced=True)
    await run.node.put(run.names.server_key("ghost"), ghost)
    await run.announce()

    with capture_logs() as logs:
        async with run.running_node():
            await until(lambda: "server.no_room" in [one["event"] for one in logs])
            assert await run.operator.keys("server.") == [run.names.server_key("ghost")]
            await forget_nodes(run.operator)
            await run.server(lambda state: state.version == "1-0" and not state.fenced)


@pytest.mark.both_loops
async def test_ticket_becomes_a_stored_group_with_tokens_and_versions_and_is_acknowledged(run: Run) -> None:
    # A busy machine's siblings end at different times: the first to be ready waits for them all.
    patient = run.settings.rollout.model_copy(update={"linger_ms": 1000 * RUN_DEADLINE_S})
    await run.announce()
    await run.admit()

    async with run.running_node(run.settings.model_copy(update={"rollout": patient})):
        slots = await run.slots(4)
        await run.no_tickets()

    assert [slot.sibling for slot in slots] == [0, 1, 2, 3]
    assert {(slot.status, slot.reward, slot.oldest, slot.newest) for slot in slots} == {
        (SlotStatus.SCORED, 12.0, "1-0", "1-0")
    }
    stored = await run.stored()
    assert len(stored) == 1, "slots that are ready together travel together"
    (sequence,) = stored[0][1][0].sequences
    assert sequence.loss_mask.tolist() == [False] * 3 + [True] * 12


async def test_raising_workflow_still_yields_its_trajectories(run: Run) -> None:
    await run.announce()
    await run.admit(kind="raise")

    async with run.running_node():
        slots = await run.slots(4)
        await run.no_tickets()

    assert {(slot.status, slot.reason) for slot in slots} == {
        (SlotStatus.FAILED, "workflow play: ValueError: broken on purpose")
    }


async def test_hanging_reward_is_killed_and_recorded(run: Run, tmp_path: Path) -> None:
    await run.announce()
    await run.admit(kind="hang", pid_file=str(tmp_path / "pids"))

    async with run.running_node():
        slots = await run.slots(4)

    assert {(slot.status, slot.reason) for slot in slots} == {
        (SlotStatus.FAILED, "reward hang: ran past 1 s and was killed")
    }


async def test_rejected_sibling_is_stored_as_such(run: Run) -> None:
    await run.announce()
    await run.admit(kind="reject")

    async with run.running_node():
        slots = await run.slots(4)

    assert sorted(slot.status for slot in slots) == ["rejected"] * 2 + ["scored"] * 2
    assert {slot.reason for slot in slots} == {"not this one", ""}


async def test_episode_past_its_deadline_is_a_failed_slot(run: Run, settings: Settings) -> None:
    hasty = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"episode_deadline_s": 0.3})})
    await run.announce()
    await run.admit(kind="block")

    async with run.running_node(hasty):
        slots = await run.slots(4)

    assert {slot.reason for slot in slots} == {"workflow play: ran past rollout.episode_deadline_s = 0.3 s"}


async def test_a_task_has_its_own_sampling_and_its_own_deadline_in_training_and_in_evaluation(
    run: Run, settings: Settings
) -> None:
    deadline_s = 2.0  # long enough for the episodes that do end
    changes = {"episode_deadline_s": deadline_s, "sampling": {"max_new_tokens": 3}}
    task = TaskSettings.model_validate({**settings.tasks[0].model_dump(), **changes})
    await run.announce()
    await run.admit()
    await run.admit("0-1-0", kind="block")
    for index, kind in enumerate(("score", "block")):
        ticket = EvalTicket(eval_id="1-0", index=index, workflow="play", row={"kind": kind})
        await run.controller.publish(run.names.eval_tickets("play"), ticket, msg_id=f"e{index}")

    evaluated: list[EvalResult] = []
    async with run.running_node(settings.model_copy(update={"tasks": (task,)})):
        slots = await run.slots(8)
        async for message in run.operator.follow(run.names.eval_stream, run.names.eval_results("play")):
            evaluated.append(wire.decode(message.data, EvalResult))
            if len(evaluated) == 2:
                break
        asked = await ask((await run.server(lambda state: True)).url, "/model_info")

    ran_past = "workflow play: ran past rollout.episode_deadline_s = 2 s"
    assert {slot.reason for slot in slots} == {"", ran_past}
    assert {one.error for one in evaluated} == {"", ran_past}
    assert {params["max_new_tokens"] for params in asked["sampling_params"]} == {3}
    assert {params["temperature"] for params in asked["sampling_params"]} == {0.0, 1.0}


@pytest.mark.parametrize("is_accepted", [False, True])
async def test_a_call_that_cuts_tokens_away_is_refused_where_it_trains_unless_that_is_accepted_and_never_in_evaluation(
    run: Run, settings: Settings, is_accepted: bool
) -> None:
    rollout = settings.rollout.model_copy(update={"accept_truncation_bias": is_accepted})
    row = {"kind": "score", "sampling": {"top_p": 0.9}}
    ticket = EvalTicket(eval_id="1-0", index=0, workflow="play", row=row | {"sampling": {"top_k": 5, "temperature": 1}})
    await run.announce()
    await run.admit(**row)
    await run.controller.publish(run.names.eval_tickets("play"), ticket, msg_id="e0")

    async with run.running_node(settings.model_copy(update={"rollout": rollout})):
        slots = await run.slots(4)
        async for message in run.operator.follow(run.names.eval_stream, run.names.eval_results("play")):
            evaluated = wire.decode(message.data, EvalResult)
            break

    refused = "policy call: got top_p=0.9; its tokens cannot be trained without a bias"
    assert {slot.reason.split(",")[0] for slot in slots} == {"" if is_accepted else refused}
    assert evaluated.error == ""


async def temperatures_by_group(run: Run) -> dict[str, set[float]]:
    """Return at what the stored tokens of each group were sampled."""
    found: dict[str, set[float]] = {}
    for message, trajectories in await run.stored():
        for one in trajectories:
            for sequence in one.sequences:
                assert sequence.temperatures is not None
                sampled = sequence.temperatures[sequence.loss_mask]
                found.setdefault(message.group_id, set()).update(map(float, sampled))
    return found


async def test_changed_sampling_is_that_of_groups_that_begin_from_then_on_and_never_of_an_evaluation(run: Run) -> None:
    by_setting = {
        "rollout.sampling.temperature": Change(value=0.5, given=1.0),
        "rollout.sampling.max_new_tokens": Change(value=8, given=16),
    }
    await run.announce()
    await run.admit("0-0-0")

    async with run.running_node():
        await run.slots(4)
        await run.controller.put(CHANGES, Changes(by_setting=by_setting))
        number = 0
        while {0.5} not in (await temperatures_by_group(run)).values():
            number += 1
            await run.admit(f"0-{number}-0")
            await run.slots(4 * (number + 1))
        ticket = EvalTicket(eval_id="1-0", index=3, workflow="play", row={"kind": "score"})
        await run.controller.publish(run.names.eval_tickets("play"), ticket, msg_id="e3")
        async for _ in run.operator.follow(run.names.eval_stream, run.names.eval_results("play")):
            break
        asked = await ask((await run.server(lambda state: True)).url, "/model_info")

    by_group = await temperatures_by_group(run)
    assert by_group["0-0-0"] == {1.0}
    assert all(len(one) == 1 for one in by_group.values()), "siblings are sampled alike"
    evaluation = asked["sampling_params"][-1]
    assert (evaluation["temperature"], evaluation["max_new_tokens"]) == (0.0, 16)


async def test_what_was_changed_before_is_known_when_the_node_begins_to_lease(run: Run, settings: Settings) -> None:
    by_setting = {"rollout.sampling.temperature": Change(value=0.5, given=1.0)}
    await run.controller.put(CHANGES, Changes(by_setting=by_setting))
    unused: Any = None
    place = NodeContext(
        settings=settings, bus=run.node, node_id="n0", generator=unused, codec=unused, workflows={}
    )  # fmt: skip

    async with anyio.create_task_group() as tasks:
        await tasks.start(Leases(place, ServerPool(["s0"], deadline_s=1), anyio.Event()).run_changes)
        temperatures = [one.rollout.sampling.temperature for one in (place.settings, place.now)]
        tasks.cancel_scope.cancel()

    assert temperatures == [1.0, 0.5]


async def test_a_node_samples_nothing_before_it_knows_what_was_changed(run: Run) -> None:
    by_setting = {
        "rollout.sampling.temperature": Change(value=0.5, given=1.0),
        "rollout.sampling.max_new_tokens": Change(value=8, given=16),
    }
    await run.controller.put(CHANGES, Changes(by_setting=by_setting))
    await run.announce()
    await run.admit()

    async with run.running_node():
        await run.slots(4)
        asked = await ask((await run.server(lambda state: True)).url, "/model_info")

    assert await temperatures_by_group(run) == {"0-0-0": {0.5}}
    assert {params["max_new_tokens"] for params in asked["sampling_params"]} == {8}


async def store_as_another_node(run: Run, group_id: str, siblings: list[int], reason: str = "") -> None:
    trajectories = [
        Trajectory(
            slot=Slot(
                sibling=sibling, sample_uid=f"other.{sibling}", status=SlotStatus.FAILED, reason=reason, oldest="1-0",
                newest="1-0",
            ),
            sequences=[],
        )
        for sibling in siblings
    ]  # fmt: skip
    payload, headers, _ = wire.encode_message(
        trajectories, Ticket(row={}, group_id=group_id, workflow="play", version="1-0", group_size=4)
    )
    await run.node.publish(
        run.names.trajectories("play", group_id), payload, headers=headers, msg_id=f"other.{group_id}"
    )


async def lease_and_give_back(run: Run) -> None:
    async with run.node.consume(run.names.tickets_stream, run.names.nodes_consumer) as inbox:
        (delivery,) = await fetch_all(inbox, 1)
        await delivery.nak()


async def test_redelivered_ticket_runs_only_the_missing_siblings(run: Run) -> None:
    await run.announce()
    await run.admit()
    await store_as_another_node(run, "0-0-0", [0, 2])
    await lease_and_give_back(run)

    async with run.running_node():
        slots = await run.slots(4)
        await run.no_tickets()

    assert [(slot.sibling, slot.sample_uid.startswith("other")) for slot in slots] == [
        (0, True), (1, False), (2, True), (3, False),
    ]  # fmt: skip


@pytest.mark.parametrize("is_late", [False, True], ids=["comes again", "has waited for long"])
async def test_ticket_of_a_settled_group_is_only_acknowledged(
    is_late: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.announce()
    await run.admit("0-0-0")
    if is_late:
        monkeypatch.setattr("areal_async.rollout.leases.time.time", lambda: 4e9)
    else:
        await lease_and_give_back(run)
    await run.admit("0-1-0")
    settled = Outcome(group_id="0-0-0", kind=OutcomeKind.ABANDONED, lineage=1)
    await run.controller.publish(run.names.outcomes, settled, msg_id="outcome")

    async with run.running_node():
        await run.slots(4)
        await run.no_tickets()

    assert {message.group_id for message, _ in await run.stored()} == {"0-1-0"}


async def test_full_stream_makes_the_node_wait_and_loses_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    room = run.settings.rollout.max_stream_bytes
    slot = Slot(sibling=0, sample_uid="x", status=SlotStatus.FAILED, oldest="1-0", newest="1-0")
    filler, headers, _ = wire.encode_message(
        [Trajectory(slot=slot, sequences=[])],
        Ticket(row={}, group_id="9-9-9", workflow="play", version="1-0", group_size=1),
    )
    filler += bytes(room - len(filler) - 2000)
    await run.node.publish(run.names.trajectories("play", "9-9-9"), filler, headers=headers)
    await run.announce()
    for index in range(5):
        await run.admit(f"0-{index}-0")

    reports: list[dict[str, int]] = []
    async with run.operator.subscribe(run.names.all_metrics) as metrics, run.running_node():
        async for _, data in metrics:
            reports.append(json.loads(data))
            if reports[-1]["num_groups_waiting_for_stream"] >= 4:
                break
        consumer = await take_trainer_consumer(run.trainer, 1)
        async with run.trainer.consume(run.names.trajectories_stream, consumer) as inbox:
            (delivery,) = await fetch_all(inbox, 1)
            await delivery.ack_sync()
        slots = await run.slots(20)
        await run.no_tickets()

    assert len({slot.sample_uid for slot in slots}) == 20


async def test_cancelled_node_loses_no_finished_trajectory_and_gives_its_ticket_back(
    run: Run, settings: Settings
) -> None:
    patient = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"linger_ms": 60_000.0})})
    await run.announce()
    await run.admit(kind="two_finish")

    async with run.operator.subscribe(run.names.all_metrics) as metrics, run.running_node(patient):
        async for _, data in metrics:
            if json.loads(data)["num_scored"] == 2:
                break
        assert await run.stored() == []

    slots = await run.slots(2)
    async with run.node.consume(run.names.tickets_stream, run.names.nodes_consumer) as inbox:
        (delivery,) = await fetch_all(inbox, 1)
    assert delivery.num_delivered == 2
    assert [slot.status for slot in slots] == [SlotStatus.SCORED] * 2


async def test_drained_node_leases_nothing_more_and_signs_its_servers_off(run: Run) -> None:
    await run.announce()
    await run.admit("0-0-0")

    async with run.running_node() as draining:
        await run.slots(4)
        draining.set()
        state = await run.server(lambda state: state.fenced)
        await run.admit("0-1-0")

    assert state.reason == "its node has ended"
    assert (await run.operator.stream_state(run.names.tickets_stream)).num_messages == 1


async def test_server_state_names_each_version_once_it_is_held(run: Run) -> None:
    async with run.running_node():
        await run.server(lambda state: state.reason == "starting" and state.version == "")
        await run.announce("1-0")
        first = await run.server(lambda state: state.version == "1-0")
        held = await ask(first.url, "/model_info")
        await run.announce("1-1")
        await run.server(lambda state: state.version == "1-1")

    assert not first.fenced
    assert held["weight_version"] == "1-0"


async def test_server_that_dies_is_fenced_and_returns_with_the_current_version(run: Run) -> None:
    await run.announce("1-3")

    async with run.running_node():
        before = await run.server(lambda state: state.version == "1-3")
        with pytest.raises(OSError, match=r".*"):
            await ask(before.url, "/exit")
        fenced = await run.server(lambda state: state.fenced)
        after = await run.server(lambda state: not state.fenced)
        await run.admit()
        slots = await run.slots(4)

    assert "ended with status 3" in fenced.reason
    assert (after.version, slots[0].oldest) == ("1-3", "1-3")


async def test_weights_that_differ_from_their_hash_are_never_loaded(run: Run) -> None:
    damaged = WeightsVersion(version="1-1", path=str(MODEL), sha256={"config.json": "0" * 64})

    async with run.running_node():
        await run.announce("1-0")
        await run.server(lambda state: state.version == "1-0")
        await run.trainer.put(run.names.weights_key(), damaged)
        await run.admit()
        slots = await run.slots(4)
        state = await run.server(lambda state: True)

    assert (state.version, state.fenced) == ("1-0", False)
    assert {slot.newest for slot in slots} == {"1-0"}


async def test_server_that_cannot_start_ends_the_node_with_the_servers_own_words(
    run: Run, settings: Settings, tmp_path: Path
) -> None:
    flawed = settings.model_copy(
        update={"inference": settings.inference.model_copy(update={"flags": ("--model-path", "nowhere")})}
    )

    with pytest.raises(ExceptionGroup) as caught:
        async with run.running_node(flawed):
            await anyio.sleep_forever()

    found = caught.value
    while isinstance(found, ExceptionGroup):
        (found,) = found.exceptions
    assert isinstance(found, UserError)
    assert "inference server n0-0: ended with status 1 while starting: model path nowhere is no folder" in str(found)


async def test_servers_join_and_leave_as_the_operator_says(run: Run) -> None:
    key = run.names.fleet_key("n0")
    await run.announce()

    async with run.running_node() as draining:
        first = await run.server(lambda state: not state.fenced)
        await run.operator.put(key, FleetMembers(indices=[0, 1]))
        joined = await run.server(lambda state: not state.fenced, "n0-1")
        await run.operator.put(key, FleetMembers(indices=[-1]))
        await run.operator.put(key, FleetMembers(indices=[0]))
        left = await run.server(lambda state: state.reason == "left", "n0-1")
        await run.operator.put(key, FleetMembers(indices=[0, 1]))
        again = await run.server(lambda state: not state.fenced, "n0-1")
        assert await run.server(lambda state: True) == first, "nobody touches the one that stays"
        draining.set()
        for server_id in ("n0-0", "n0-1"):
            await run.server(lambda state: state.reason == "its node has ended", server_id)

    assert (joined.version, left.version, left.fenced, again.version) == ("1-0", "", True, "1-0")
    assert len({first.incarnation, joined.incarnation, again.incarnation}) == 3


async def test_a_node_begins_with_the_servers_that_were_ordered(run: Run) -> None:
    await run.operator.put(run.names.fleet_key("n0"), FleetMembers(indices=[1]))
    await run.announce()

    async with run.running_node():
        await run.server(lambda state: not state.fenced, "n0-1")

    assert await run.operator.get(run.names.server_key("n0-0"), ServerState) == (None, 0), "it was never started"


async def test_servers_that_an_earlier_life_of_the_node_left_behind_are_fenced(run: Run) -> None:
    """Else the controller would wait for ever until they hold the newest weights."""
    states = [
        ServerState(server_id=server_id, node_id=server_id[:2], url="http://x", version="1-0")
        for server_id in ("n0-0", "n0-1", "n1-1")
    ]
    for state in states:
        await run.node.put(run.names.server_key(state.server_id), state)

    async with run.running_node():
        gone = await run.server(lambda state: state.fenced, "n0-1")
        await run.server(lambda state: state.reason == "starting")
        other = await run.server(lambda state: True, "n1-1")

    assert (gone.reason, gone.version) == ("left", "")
    assert other == states[2]


async def test_prompt_outside_the_models_vocabulary_fails_its_episode_and_no_server(run: Run, tmp_path: Path) -> None:
    workflow = tmp_path / "play.py"
    workflow.write_text(WORKFLOW.replace("[5, 6, 7]", "[5, 512]"))
    await run.announce()
    await run.admit()

    async with run.running_node():
        slots = await run.slots(4)
        state = await run.server(lambda state: True)

    assert {slot.status for slot in slots} == {SlotStatus.FAILED}
    assert "prompt: got token id 512 at position 1, need 0 to 511" in slots[0].reason
    assert not state.fenced


async def test_evaluation_is_greedy_and_its_result_stored_before_the_ticket_is_acknowledged(run: Run) -> None:
    await run.announce()
    ticket = EvalTicket(eval_id="1-0", index=3, workflow="play", row={"kind": "score"})
    broken = EvalTicket(eval_id="1-0", index=4, workflow="play", row={"kind": "raise"}, sample=2)
    for each in (ticket, broken):
        await run.controller.publish(run.names.eval_tickets("play"), each, msg_id=f"e{each.index}")

    results: dict[int, EvalResult] = {}
    async with run.running_node():
        async for message in run.operator.follow(run.names.eval_stream, run.names.eval_results("play")):
            result = wire.decode(message.data, EvalResult)
            results[result.index] = result
            if len(results) == 2:
                break
        await run.left_in(run.names.eval_stream, 2)
        asked = await ask((await run.server(lambda state: True)).url, "/model_info")

    assert results[3] == EvalResult(eval_id="1-0", index=3, reward=12.0, oldest="1-0", newest="1-0", num_tokens=12)
    assert [params["temperature"] for params in asked["sampling_params"]] == [0.0, 0.0]
    assert results[4].error == "workflow play: ValueError: broken on purpose"
    assert results[4].sample == 2


async def ask(url: str, route: str) -> dict[str, Any]:
    def get() -> dict[str, Any]:
        with urllib.request.urlopen(f"{url}{route}", timeout=PATIENCE_S) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    return await anyio.to_thread.run_sync(get)
