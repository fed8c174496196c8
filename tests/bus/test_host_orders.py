"""Hosts are added and removed by order: what the run cannot do without stays, with the reason said in one sentence."""

from typing import Any

import pytest

from areal_async.bus import Bus, Role, ask_service, serving
from areal_async.config.settings import LaunchSettings, Settings
from areal_async.controller.host_orders import ADD, REMOVE, HostOrders
from areal_async.errors import UserError
from areal_async.protocol.run_state import CrewState, OrderedHosts
from areal_async.protocol.subjects import HOSTS
from tests.brokers import PATIENCE_S, OpenRole

pytestmark = pytest.mark.anyio

CREWS = {"trainer": ["here", "a"], "node-0": ["b"], "node-1": ["c"], "controller": ["here"]}


async def _crews(operator: Bus, **hosts: list[str]) -> None:
    for name, own in (CREWS | {name.replace("_", "-"): own for name, own in hosts.items()}).items():
        await operator.put(operator.names.crew_key(name), CrewState(name=name, state="running", hosts=own))


async def _asked(open_role: OpenRole, settings: Settings, *orders: tuple[str, str], operator: Bus) -> list[str]:
    """Return what each of these orders is answered with; of one that is refused, why."""
    controller = await open_role(Role.CONTROLLER)
    said: list[str] = []
    async with serving(controller, description="", report=dict, endpoints=HostOrders(controller, settings).endpoints):
        for order, host in orders:
            try:
                body = {"host": host, "by": "ann"}
                answer = await ask_service(operator, operator.names.control(order), body, deadline_s=PATIENCE_S)
                said.append(str(answer["sentence"]))
            except UserError as exc:
                said.append(f"no: {exc}")
    return said


def _of(settings: Settings, **launch: Any) -> Settings:
    return settings.model_copy(update={"launch": LaunchSettings(**launch)})


async def test_hosts_come_and_go_but_for_those_that_the_run_cannot_do_without(
    open_role: OpenRole, settings: Settings
) -> None:
    operator = await open_role(Role.OPERATOR)
    await _crews(operator)
    orders = [
        (ADD, "d"), (ADD, "d"), (ADD, "b"), (ADD, "-o Proxy"), (REMOVE, "here"), (REMOVE, "a"), (REMOVE, "x"),
        (REMOVE, "b"), (REMOVE, "b"), (ADD, "b"), (REMOVE, "d"),
    ]  # fmt: skip

    said = await _asked(open_role, _of(settings, hosts=("a", "b", "c")), *orders, operator=operator)

    for sentence, begins in zip(
        said,
        (
            "host d: a node starts there", "no: host d: the run has it already", "no: host b: the run has it already",
            "no: host: got '-o Proxy', need the name", "no: host here: it is the launcher's own",
            "no: host a: it holds ranks", "no: host x: the run has none of that name; it has",
            "host b: its node takes nothing more", "no: host b: the run has none of that name",
            "host b: a node starts there", "host d: its node takes nothing more",
        ),
        strict=True,
    ):  # fmt: skip
        assert sentence.startswith(begins), said
    assert (await operator.get(HOSTS, OrderedHosts))[0] == OrderedHosts(added=["d"], removed=["d"])


@pytest.mark.parametrize(
    ("launch", "order", "host", "sentence"),
    [
        ({}, ADD, "d", "no: host d: the run has been started on one host alone"),
        ({"backend": "slurm"}, ADD, "d", "no: host d: hosts are slurm's to give"),
        ({"hosts": ("b",)}, REMOVE, "b", "no: host b: it is the last one that generates"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_changes_nothing(
    open_role: OpenRole, settings: Settings, launch: dict[str, Any], order: str, host: str, sentence: str
) -> None:
    operator = await open_role(Role.OPERATOR)
    await _crews(operator, node_1=["b"])

    (said,) = await _asked(open_role, _of(settings, **launch), (order, host), operator=operator)

    assert said.startswith(sentence)
    assert await operator.get(HOSTS, OrderedHosts) == (None, 0)
