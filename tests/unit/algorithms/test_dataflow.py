"""A graph that cannot run is refused in one sentence before it runs; one that can keeps the order of each thread."""

from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from areal_async.algorithms.dataflow import CallKind, FunctionCall, Graph, execute
from areal_async.errors import UserError

ROLES = ("actor", "critic")


def call(name: str, takes: str = "", makes: str = "", *, role: str = "") -> FunctionCall:
    kind = CallKind.INFERENCE if role else CallKind.COMPUTE
    return FunctionCall(name=name, kind=kind, role=role, inputs=tuple(takes.split()), outputs=tuple(makes.split()))


PPO = Graph(
    calls=(
        call("train_critic", "rows returns", "value_loss", role="critic"),
        call("train_actor", "rows advantages", "loss", role="actor"),
        call("gae", "rows values", "advantages returns"),
        call("values", "rows", "values", role="critic"),
    ),
    given=("rows",),
    results=("loss", "value_loss"),
)


def names(graph: Graph) -> list[str]:
    return [one.name for one in graph.calls]


def test_calls_are_put_after_those_they_take_from() -> None:
    assert names(PPO.checked(ROLES)) == ["values", "gae", "train_critic", "train_actor"]


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        ((call("a", "rows", "x"), call("a", "x", "loss")), "several calls named a, need a name of its own"),
        ((call("a", "rows nothing", "loss"),), "a takes nothing, which nobody makes; there are rows, loss"),
        ((call("a", "rows", "x y"), call("b", "x", "loss")), "a makes y, which nobody takes"),
        ((call("a", "rows", "loss"), call("b", "rows", "loss")), "loss is made by a and by b, need one maker"),
        ((call("a", "rows", "rows loss"),), "rows is made by the caller and by a"),
        ((call("a", "rows", "loss", role="judge"),), r"call a \(inference\) got the model judge, need one of actor"),
        (
            (call("a", "rows z", "x"), call("b", "x", "z y"), call("c", "y", "loss")),
            "the calls a, b wait for each other's values",
        ),
    ],
)
def test_a_graph_that_cannot_run_is_one_sentence(calls: tuple[FunctionCall, ...], sentence: str) -> None:
    graph = Graph(calls=calls, given=("rows",), results=("loss",))

    with pytest.raises(UserError, match=sentence):
        graph.checked(ROLES)


def test_a_call_that_computes_names_no_model() -> None:
    wrong = FunctionCall(name="a", kind=CallKind.COMPUTE, role="actor", outputs=("loss",))

    with pytest.raises(UserError, match="call a computes and names the model actor"):
        Graph(calls=(wrong,), results=("loss",)).checked(ROLES)


def test_what_ran_elsewhere_is_given() -> None:
    rest = PPO.checked(ROLES).rest({"values"})

    assert (names(rest), rest.given) == (["gae", "train_critic", "train_actor"], ("rows", "values"))
    assert rest.checked(ROLES) == rest


def test_a_call_of_a_users_own_comes_between_maker_and_takers() -> None:
    graph = PPO.having(call("clip", "rows advantages", "advantages")).checked(ROLES)

    assert names(graph) == ["values", "gae", "train_critic", "clip", "train_actor"]
    by_name = {one.name: one for one in graph.calls}
    assert by_name["gae"].outputs == ("advantages_before_clip", "returns")
    assert by_name["clip"].inputs == ("rows", "advantages_before_clip")


def test_the_picture_has_every_call_and_every_value() -> None:
    picture = PPO.checked(ROLES).mermaid().splitlines()

    assert picture[0] == "flowchart TD"
    assert '  values["values<br/>inference critic"]' in picture
    assert "  rows_value --> values" in picture
    assert "  gae -- returns --> train_critic" in picture
    assert "  train_critic --> value_loss_value([value_loss])" in picture


async def _add_up(one: FunctionCall, inputs: dict[str, Any]) -> Mapping[str, Any]:
    return {name: f"{name}({','.join(f'{key}={value}' for key, value in inputs.items())})" for name in one.outputs}


@pytest.mark.anyio
async def test_values_reach_the_calls_that_take_them() -> None:
    graph = PPO.checked(ROLES)

    results = await execute(graph, _add_up, {"rows": 1}, thread=lambda one: one.role)

    returns = "returns(rows=1,values=values(rows=1))"
    assert results["value_loss"] == f"value_loss(rows=1,returns={returns})"
    assert set(results) == {"loss", "value_loss"}


@pytest.mark.anyio
async def test_independent_calls_run_together_and_those_of_a_lane_do_not() -> None:
    graph = PPO.checked(ROLES)
    running: set[str] = set()
    together: set[frozenset[str]] = set()

    async def work(one: FunctionCall, inputs: dict[str, Any]) -> Mapping[str, Any]:
        running.add(one.name)
        await anyio.wait_all_tasks_blocked()
        together.add(frozenset(running))
        await anyio.wait_all_tasks_blocked()
        running.remove(one.name)
        return dict.fromkeys(one.outputs)

    await execute(graph, work, {"rows": 1}, thread=lambda one: one.role)
    beside = max(together, key=len)
    together.clear()
    await execute(graph, work, {"rows": 1}, thread=lambda _: "one")

    assert beside == {"train_critic", "train_actor"}
    assert all(len(names) == 1 for names in together)


@pytest.mark.anyio
async def test_a_call_that_fails_ends_the_others() -> None:
    async def work(one: FunctionCall, inputs: dict[str, Any]) -> Mapping[str, Any]:
        if one.name == "train_actor":
            raise UserError("no")
        if one.name == "train_critic":
            await anyio.sleep_forever()
        return dict.fromkeys(one.outputs)

    with pytest.raises(ExceptionGroup) as caught:
        await execute(PPO.checked(ROLES), work, {"rows": 1}, thread=lambda one: one.role)

    assert [str(error) for error in caught.value.exceptions] == ["no"]
