"""Roles are NATS micro services: any client finds them, asks them and gives them orders; the broker is the real one."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import jsonschema
import msgspec
import nats
import pytest
from nats.aio.client import Client

from areal_async.bus import (
    Bus,
    EmbeddedBroker,
    Report,
    Role,
    ServiceEndpoint,
    ask_service,
    gather_reports,
    hearing_reports,
    json_object,
    serving,
)
from areal_async.bus.connection import ConnectionLostError, Received
from areal_async.bus.permissions import SERVICES_INBOX
from areal_async.config.settings import Settings
from areal_async.controller.steering import RunSteering
from areal_async.errors import UserError
from areal_async.protocol.run_state import Changes, Control
from areal_async.protocol.subjects import CHANGES, CONTROL
from tests.brokers import PATIENCE_S, OpenRole, kill, until

pytestmark = pytest.mark.anyio


STATISTICS = {
    "metadata": {"run": "test", "instance": "0"},
    "endpoints": [{"name": "status", "data": {"state": "forged"}}],
}
"""What a service answers, as far as it is looked at."""


class _Record(msgspec.Struct):
    state: str


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The client library that stands for any other is asyncio's."""
    return str(request.param)


@asynccontextmanager
async def _plain_client(broker: EmbeddedBroker) -> AsyncIterator[Client]:
    """A client that knows the address, the operator's key and the inbox of services, and nothing of this package."""
    client = await nats.connect(
        broker.url, nkeys_seed=str(broker.credentials(Role.OPERATOR)), inbox_prefix=SERVICES_INBOX
    )
    try:
        yield client
    finally:
        await client.close()


async def _answers(client: Client, subject: str, *, num_expected: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    async def take(message: Any) -> None:
        found.append(json.loads(message.data))

    inbox = client.new_inbox()
    await client.subscribe(inbox, cb=take)
    await client.publish(subject, b"", reply=inbox)
    await until(lambda: len(found) >= num_expected)
    return found


def _report(name: str) -> Report:
    return {"state": name, "inner": _Record(state="of a record")}


async def test_a_plain_client_finds_every_service_and_what_each_does(
    broker: EmbeddedBroker, open_role: OpenRole
) -> None:
    node, trainer = await open_role(Role.NODE, "7"), await open_role(Role.TRAINER)

    async with (
        serving(node, instance="7", description="a node", report=lambda: _report("generating")),
        serving(trainer, description="a trainer", report=lambda: _report("training")),
        _plain_client(broker) as client,
    ):
        found = await _answers(client, "$SRV.INFO", num_expected=2)
        stats = await _answers(client, "$SRV.STATS.areal-node", num_expected=1)
        asked = await client.request("areal.test.status.node.7", b"", timeout=PATIENCE_S)

    assert {one["name"]: one["metadata"] for one in found} == {
        "areal-node": {"run": "test", "instance": "7"},
        "areal-trainer": {"run": "test", "instance": "0"},
    }
    assert "areal.test.status.node.7" in {one["subject"] for service in found for one in service["endpoints"]}
    data = stats[0]["endpoints"][0]["data"]
    assert data.items() >= {"state": "generating", "inner": {"state": "of a record"}, "pid": os.getpid()}.items()
    assert data["up_s"] >= 0
    assert json.loads(asked.data)["state"] == "generating"


async def test_reports_of_all_services_are_gathered_and_those_of_other_runs_are_not(
    broker: EmbeddedBroker, open_role: OpenRole
) -> None:
    operator, node = await open_role(Role.OPERATOR), await open_role(Role.NODE, "1")

    async with serving(node, instance="1", description="a node", report=lambda: _report("generating")):
        found: dict[tuple[str, str], Report] = {}

        async def is_heard() -> bool:
            found.update(await gather_reports(operator, within_s=0.2))
            return bool(found)

        await until(is_heard)
        operator.names = type(operator.names)("another")
        of_another = await gather_reports(operator, within_s=0.5)

    assert list(found) == [("node", "1")]
    assert found["node", "1"].items() >= {"state": "generating", "inner": {"state": "of a record"}}.items()
    assert of_another == {}


async def test_answers_are_heard_whenever_they_come_and_over_a_restart_of_the_broker(
    broker: EmbeddedBroker, open_role: OpenRole
) -> None:
    operator, node, trainer = await open_role(Role.OPERATOR), await open_role(Role.NODE), await open_role(Role.TRAINER)
    heard: list[tuple[tuple[str, str], Report]] = []

    async with (
        serving(node, instance="1", description="a node", report=lambda: _report("generating")),
        hearing_reports(operator, lambda who, report: heard.append((who, report))) as ask,
    ):
        await ask()
        await until(lambda: bool(heard))
        assert heard[0][0] == ("node", "1")
        assert heard[0][1]["state"] == "generating"
        async with serving(trainer, description="a trainer", report=lambda: _report("training")):
            heard.clear()
            await ask()
            await until(lambda: {who for who, _ in heard} == {("node", "1"), ("trainer", "0")})
        kill(broker)
        heard.clear()

        async def is_heard() -> bool:
            with suppress(ConnectionLostError):
                await ask()
            return bool(heard)

        await until(is_heard)


async def test_a_service_answers_again_after_the_broker_was_killed(broker: EmbeddedBroker, open_role: OpenRole) -> None:
    operator, node = await open_role(Role.OPERATOR), await open_role(Role.NODE)

    async with serving(node, description="a node", report=lambda: _report("generating")):
        kill(broker)

        async def is_back() -> bool:
            return operator.connection.is_connected and bool(await gather_reports(operator, within_s=0.3))

        await until(is_back)


@pytest.fixture
async def steered(open_role: OpenRole, settings: Settings) -> AsyncIterator[tuple[Bus, RunSteering]]:
    """An operator, and a controller's steering that takes its orders."""
    operator, controller = await open_role(Role.OPERATOR), await open_role(Role.CONTROLLER)

    async def evaluate(body: Report) -> Report:
        return body

    steering = RunSteering(controller, settings, evaluate=evaluate)
    async with serving(controller, description="orders", report=dict, endpoints=steering.endpoints):
        yield operator, steering


async def test_orders_are_kept_under_the_key_and_told_with_who_and_why(
    steered: tuple[Bus, RunSteering], settings: Settings
) -> None:
    operator, _ = steered
    names = operator.names

    async with operator.subscribe(names.all_events) as events:
        await ask_service(operator, names.control("pause"), {"by": "ann", "reason": "lunch"}, deadline_s=PATIENCE_S)
        paused, _ = await operator.get(CONTROL, Control)
        await ask_service(operator, names.control("stop"), {"by": "bob"}, deadline_s=PATIENCE_S)
        await ask_service(operator, names.control("resume"), {}, deadline_s=PATIENCE_S)
        control, _ = await operator.get(CONTROL, Control)
        told = [json.loads((await anext(events))[1]) for _ in range(3)]

    assert paused is not None
    assert (paused.is_paused, paused.by, paused.reason) == (True, "ann", "lunch")
    assert control is not None
    assert (control.is_paused, control.is_stopping) == (False, True)
    assert [(one["order"], one["by"], one["reason"]) for one in told] == [
        ("pause", "ann", "lunch"), ("stop", "bob", ""), ("resume", "", ""),
    ]  # fmt: skip
    recorded = (settings.run_directory / "orders.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in recorded] == told, "the events are gone after a month"


async def test_a_plain_client_pauses_with_an_empty_request(
    broker: EmbeddedBroker, steered: tuple[Bus, RunSteering]
) -> None:
    operator, _ = steered

    async with _plain_client(broker) as client:
        answer = await client.request("areal.test.control.pause", b"", timeout=PATIENCE_S)

    assert json.loads(answer.data)["is_paused"] is True
    control, _ = await operator.get(CONTROL, Control)
    assert control is not None
    assert control.is_paused


@pytest.mark.parametrize(
    ("body", "sentence"),
    [(b"{", "cannot decode"), (b"[1]", "cannot decode"), (b'{"by": 3}', "by: got 3, need a text"),
     (json.dumps({"reason": "x" * 201}).encode(), "need a text of at most 200")],
)  # fmt: skip
async def test_an_order_that_is_none_is_refused_and_changes_nothing(
    broker: EmbeddedBroker, steered: tuple[Bus, RunSteering], body: bytes, sentence: str
) -> None:
    operator, _ = steered

    async with _plain_client(broker) as client:
        answer = await client.request(operator.names.control("pause"), body, timeout=PATIENCE_S)

    assert sentence in (answer.headers or {})["Nats-Service-Error"]
    assert await operator.get(CONTROL, Control) == (None, 0)


BODIES: dict[str, dict[str, Any]] = {
    "status": {},
    "pause": {"by": "ann", "reason": "lunch"},
    "resume": {"by": "ann"},
    "stop": {},
    "set": {"setting": "trainer.lr", "value": 1e-6, "by": "ann"},
    "eval": {"version": "1-42", "records": []},
}
"""One for each endpoint; the evaluation that this file's controller does is to say the same back."""
NONE_OF_THESE = [
    ("pause", {"by": 3}), ("stop", {"reason": "x" * 201}), ("set", {"setting": "trainer.lr"}),
    ("set", {"setting": "model.path", "value": 1}), ("set", {"setting": "trainer.lr", "value": "fast"}), ("pause", []),
]  # fmt: skip


async def test_a_stranger_learns_from_info_what_to_ask_and_what_will_be_answered(
    broker: EmbeddedBroker, steered: tuple[Bus, RunSteering]
) -> None:
    """Each endpoint's schemas hold: what fits is answered, in the form that was promised; what does not is refused."""
    async with _plain_client(broker) as client:
        (info,) = await _answers(client, "$SRV.INFO.areal-controller", num_expected=1)
        endpoints = {one["name"]: one for one in info["endpoints"]}
        for name, body in BODIES.items():
            told, data = endpoints[name]["metadata"], json.dumps(body).encode()
            jsonschema.validate(body, json.loads(told["request_schema"]))
            answer = await client.request(endpoints[name]["subject"], data, timeout=PATIENCE_S)
            jsonschema.validate(json.loads(answer.data), json.loads(told["response_schema"]))
        for name, wrong in NONE_OF_THESE:
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(wrong, json.loads(endpoints[name]["metadata"]["request_schema"]))
            answer = await client.request(endpoints[name]["subject"], json.dumps(wrong).encode(), timeout=PATIENCE_S)
            assert (answer.headers or {})["Nats-Service-Error-Code"] == "400", (name, wrong)
            assert answer.data == b""

    assert info["type"] == "io.nats.micro.v1.info_response"
    assert endpoints.keys() == BODIES.keys()
    assert all(one["metadata"]["description"] for one in endpoints.values())


async def test_requests_and_refusals_are_counted_as_the_specification_has_it(
    broker: EmbeddedBroker, steered: tuple[Bus, RunSteering]
) -> None:
    """Any tool that draws the statistics of NATS services draws ours (ADR-32)."""
    async with _plain_client(broker) as client:
        await client.request("areal.test.control.pause", b"", timeout=PATIENCE_S)
        await client.request("areal.test.control.pause", b'{"by": 3}', timeout=PATIENCE_S)
        (stats,) = await _answers(client, "$SRV.STATS.areal-controller", num_expected=1)

    counted = {one["name"]: one for one in stats["endpoints"]}
    pause = counted["pause"]
    assert stats["type"] == "io.nats.micro.v1.stats_response"
    assert stats.keys() >= {"name", "id", "version", "metadata", "started"}
    assert (pause["num_requests"], pause["num_errors"]) == (2, 1)
    assert pause["last_error"] == "400:by: got 3, need a text of at most 200 characters"
    assert pause["processing_time"] >= 2 * pause["average_processing_time"] - 1 > 0
    assert pause["queue_group"] == "q"
    assert counted["resume"]["num_requests"] == 0


async def test_two_operators_at_once_are_both_obeyed(steered: tuple[Bus, RunSteering]) -> None:
    operator, _ = steered

    async with anyio.create_task_group() as tasks:
        for order in ("pause", "stop") * 10:
            subject = operator.names.control(order)
            tasks.start_soon(lambda subject=subject: ask_service(operator, subject, {}, deadline_s=PATIENCE_S))

    control, _ = await operator.get(CONTROL, Control)
    assert control is not None
    assert control.is_paused
    assert control.is_stopping


async def test_an_order_that_nobody_takes_is_told_in_one_sentence(open_role: OpenRole) -> None:
    operator = await open_role(Role.OPERATOR)

    with pytest.raises(UserError, match="run test: nobody takes orders there"):
        await ask_service(operator, operator.names.control("pause"), {}, deadline_s=PATIENCE_S)


async def test_a_change_of_a_setting_is_kept_with_who_and_why_and_told(
    steered: tuple[Bus, RunSteering], settings: Settings
) -> None:
    operator, _ = steered
    names = operator.names

    async with operator.subscribe(names.all_events) as events:
        change = {"setting": "trainer.lr", "value": 1e-6, "by": "ann", "reason": "it collapsed"}
        answer = await ask_service(operator, names.control("set"), change, deadline_s=PATIENCE_S)
        subject, data = await anext(events)
    kept, _ = await operator.get(CHANGES, Changes)
    recorded = [json.loads(line) for line in (settings.run_directory / "changes.jsonl").read_text().splitlines()]

    assert answer == {"trainer.lr": 1e-6}
    assert subject == "areal.test.events.controller.0.setting.changed"
    assert json.loads(data) == recorded[-1]
    assert {"setting": "trainer.lr", "before": settings.trainer.lr, "after": 1e-6, "by": "ann"}.items() <= recorded[
        -1
    ].items()
    assert kept is not None
    assert (kept.by_setting["trainer.lr"].value, kept.by_setting["trainer.lr"].reason) == (1e-6, "it collapsed")


async def test_two_operators_changes_are_both_kept_and_an_unsafe_one_is_refused(
    steered: tuple[Bus, RunSteering],
) -> None:
    operator, _ = steered
    subject = operator.names.control("set")

    async with anyio.create_task_group() as operators:
        for setting, value in (("trainer.lr", 2e-6), ("trainer.checkpoint_every_steps", 7)):
            body = {"setting": setting, "value": value}
            operators.start_soon(lambda body=body: ask_service(operator, subject, body, deadline_s=PATIENCE_S))
    with pytest.raises(UserError, match="model.path: cannot change in this run"):
        await ask_service(operator, subject, {"setting": "model.path", "value": 1}, deadline_s=PATIENCE_S)

    kept, _ = await operator.get(CHANGES, Changes)
    assert kept is not None
    assert {name: one.value for name, one in kept.by_setting.items()} == {
        "trainer.lr": 2e-6,
        "trainer.checkpoint_every_steps": 7,
    }


async def test_an_order_that_the_broker_sends_for_somebody_is_not_obeyed(open_role: OpenRole) -> None:
    """As at a broker of one's own where all roles are in one account: there an answer goes wherever its asker says."""
    operator, controller = await open_role(Role.OPERATOR), await open_role(Role.CONTROLLER)
    trainer, names = await open_role(Role.TRAINER), operator.names
    order, forged = names.control("set"), b'{"trainer.lr": 1}'
    heard: list[bytes] = []
    obeyed: list[Report] = []

    async def obey(body: Report) -> Report:
        obeyed.append(body)
        return {}

    endpoint = ServiceEndpoint(
        name="set", subject=order, description="", request=json_object(), response=json_object(), answer=obey
    )
    await operator.publish(names.tickets("w"), forged)
    stored = await operator.publish(names.trajectories("w", "0-0-0"), forged)
    await operator.connection.listen(order, lambda message: heard.append(message.data))
    read = f"$JS.API.DIRECT.GET.{names.trajectories_stream}"
    pull = f"$JS.API.CONSUMER.MSG.NEXT.{names.tickets_stream}.{names.nodes_consumer}"
    requests = (
        (read, msgspec.json.encode({"seq": stored.sequence}), "what is stored"),
        (read, b'{"seq": 999}', "that it is not"),
        (pull, b"", "what is to be done"),
        (pull, b'{"batch": 1, "no_wait": true}', "that nothing is"),
        (names.trajectories("w", "0-0-0"), forged, "that it is stored now"),
        ("$JS.API.INFO", b"", "how full it is"),
    )

    async with serving(controller, description="", report=dict, endpoints=[endpoint]):
        for number, (subject, payload, _) in enumerate(requests, start=1):
            await operator.connection.publish(subject, payload, reply=order)
            await until(lambda expected=number: len(heard) >= expected)  # type: ignore[misc]
        pushed = {"deliver_subject": order, "ack_policy": "explicit", "headers_only": True, "name": "pushed"}
        where = f"{names.trajectories_stream}.pushed"
        body = {"stream_name": names.trajectories_stream, "config": pushed}
        await trainer.api.ask(f"$JS.API.CONSUMER.CREATE.{where}", body)
        await until(lambda: len(heard) > len(requests))
        await operator.connection.publish(order, forged)
        assert await ask_service(operator, order, {"trainer.lr": 2}, deadline_s=PATIENCE_S) == {}

    assert obeyed == [{"trainer.lr": 2}]


async def test_what_a_role_says_in_anothers_name_is_not_heard(open_role: OpenRole) -> None:
    """Everybody answers operators in one inbox; the broker tells from which account an answer came."""
    operator, node = await open_role(Role.OPERATOR), await open_role(Role.NODE, "1")
    names = node.names
    heard: dict[tuple[str, str], Report] = {}
    asked: list[str] = []
    await node.connection.listen("$SRV.STATS", lambda message: asked.append(message.reply))
    told = json.dumps({"acc": names.account(Role.CONTROLLER)})
    stored = await node.publish(  # the broker takes the first such header off what it stores, and leaves the second
        names.trajectories("w", "0-0-0"),
        json.dumps({**STATISTICS, "name": "areal-controller"}).encode(),
        headers={"Nats-Request-Info": f"{told}\r\nNats-Request-Info: {told}"},
    )

    async with (
        serving(node, kind="controller", description="", report=lambda: _report("forged")),
        serving(node, instance="1", description="a node", report=lambda: _report("generating")),
        hearing_reports(operator, lambda who, report: heard.update({who: report})) as ask,
    ):
        await ask()
        await until(lambda: bool(asked) and bool(heard))
        read = f"$JS.API.DIRECT.GET.{names.trajectories_stream}"
        await node.connection.publish(read, json.dumps({"seq": stored.sequence}).encode(), reply=asked[0])
        await node.get_message(names.trajectories_stream, stored.sequence)
        heard |= await gather_reports(operator, within_s=0.5)

    assert list(heard) == [("node", "1")]


@pytest.mark.parametrize("headers", [b"NATS/1.0\r\nX: yzz", b"NATS/1.0\r\nX", b"NATS/1.0 404\r\nX: yzz", b"NATS/1.0 "])
async def test_headers_without_an_end_do_not_hide_who_answers(open_role: OpenRole, headers: bytes) -> None:
    """The broker adds its word on the account behind them, as they are."""
    operator, node = await open_role(Role.OPERATOR), await open_role(Role.NODE, "1")
    heard: dict[tuple[str, str], Report] = {}
    asked: list[str] = []
    body = json.dumps({**STATISTICS, "name": "areal-controller"}).encode()
    own = json.dumps({**STATISTICS, "name": "areal-node"}).encode()
    await node.connection.listen("$SRV.STATS", lambda message: asked.append(message.reply))
    await node.api.ask("$JS.API.INFO")

    async with hearing_reports(operator, lambda who, report: heard.update({who: report})) as ask:
        await ask()
        await until(lambda: bool(asked))
        size = f"{len(headers)} {len(headers) + len(body)}"
        await node.connection.client._send_command(f"HPUB {asked[0]} {size}\r\n".encode() + headers + body + b"\r\n")
        await node.connection.publish(asked[0], own)
        await until(lambda: bool(heard))

    assert list(heard) == [("node", "0")]


@pytest.mark.parametrize(
    "said",
    [
        {"metadata": {"run": "test", "instance": ["0"]}},
        {"metadata": {"run": "test", "instance": {}}},
        {"metadata": {"run": "test", "instance": None}},
        {"metadata": {"run": "test"}},
        {"metadata": ["run"]},
        {"endpoints": [{"name": "status", "data": [1]}]},
        {"endpoints": [{"name": "status", "data": "x"}]},
        {"endpoints": [{"name": "status"}]},
        {"endpoints": {"status": 1}},
        {"name": 7},
    ],
)
async def test_an_answer_of_another_shape_is_nobodys(open_role: OpenRole, said: dict[str, Any]) -> None:
    operator, node = await open_role(Role.OPERATOR), await open_role(Role.NODE, "1")
    answers = [json.dumps({**STATISTICS, "name": "areal-node", **one}).encode() for one in (said, {})]

    async def answer(reply: str) -> None:
        for one in answers:
            await node.connection.publish(reply, one)

    async with anyio.create_task_group() as tasks:

        def hear(message: Received) -> None:
            tasks.start_soon(answer, message.reply)

        await node.connection.listen("$SRV.STATS", hear)
        await node.api.ask("$JS.API.INFO")

        heard: dict[tuple[str, str], Report] = {}
        async with hearing_reports(operator, lambda who, report: heard.update({who: report})) as ask:
            await ask()
            await until(lambda: bool(heard))  # the other answer comes before it

    assert heard == {("node", "0"): {"state": "forged"}}
