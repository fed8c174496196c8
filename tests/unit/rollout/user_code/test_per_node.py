"""What a workflow's file makes once per node is made before its first workflow, given to it, and ended at the end."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async import per_node
from areal_async.api import is_group_workflow
from areal_async.cli.starting.checks import check_policies
from areal_async.errors import PipelineError, UserError, leaves_of
from areal_async.rollout.user_code import per_node as made
from areal_async.rollout.user_code.per_node import given_per_node
from areal_async.rollout.user_code.workflows import load_workflow, policies_taken

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

FILE = """
from areal_async import group_workflow, per_node

events = []


@per_node
async def browser():
    events.append("browser up")
    yield {"pages": events}
    events.append("browser down")


@per_node
async def quiet():
    events.append("quiet up")
    yield
    events.append("quiet down")


async def shop(prompt, policy, browser, judge=None):
    browser["pages"].append(f"shop {prompt} {policy} {judge}")
    return 1.0


@group_workflow
async def shops(prompt, siblings, browser):
    browser["pages"].append("shops")
    return [1.0 for _ in siblings]
"""
MAKING = """
from areal_async import per_node

@per_node
async def browser():
    {body}

async def shop(prompt, policy, browser):
    return 1.0
"""
SHOP = """
async def shop(prompt, policy):
    return 1.0
"""


def write(folder: Path, text: str) -> str:
    (folder / "shop.py").write_text(text)
    return str(folder / "shop.py")


def given(spec: str, *names: str, deadline_s: float = 60.0) -> Any:
    workflows = {name: load_workflow(f"{spec}:{name}") for name in names}
    return given_per_node(workflows, deadline_s=deadline_s, waiter="node", tell=print)


def entered(making: Any, tell: Callable[[str], None] = print) -> Any:
    """Enter one that stands in a file beside a workflow which does not take it."""
    namespace = {making.__name__: making}
    exec(SHOP, namespace)
    return given_per_node({"shop": namespace["shop"]}, deadline_s=60.0, waiter="node", tell=tell)


async def test_each_is_made_once_and_given_by_name(tmp_path: Path) -> None:
    spec = write(tmp_path, FILE)
    check_policies([spec], [])
    check_policies([spec], ["judge"])
    async with given(spec, "shop", "shops") as bound:
        assert policies_taken(bound["shop"], {"judge"}) == ("judge",)
        assert is_group_workflow(bound["shops"])
        assert not is_group_workflow(bound["shop"])
        await bound["shop"]("p", "one")
        await bound["shop"]("p", "two", judge="j")
        await bound["shops"]("p", ["one"])
        events = bound["shop"].keywords["browser"]["pages"]
        assert events == ["browser up", "quiet up", "shop p one None", "shop p two j", "shops"]
    assert events[5:] == ["quiet down", "browser down"], "the last is left first"


@pytest.mark.parametrize(
    ("body", "deadline_s", "sentence"),
    [
        ("raise OSError('no display')\n    yield", 60.0, "per_node browser: OSError: no display"),
        ("import sys; sys.exit(3)\n    yield", 60.0, "per_node browser: called sys.exit(3)"),
        ("if False: yield", 60.0, "per_node browser: RuntimeError: generator didn't yield"),
        (
            "import asyncio; await asyncio.Event().wait()\n    yield",
            0.01,
            "per_node browser: was not made within rollout.setup_deadline_s = 0.01 s; raise that if it is only slow",
        ),
    ],
)
async def test_one_that_cannot_be_made_is_told_in_one_sentence(
    tmp_path: Path, body: str, deadline_s: float, sentence: str
) -> None:
    spec = write(tmp_path, MAKING.format(body=body))
    with pytest.raises((PipelineError, ExceptionGroup)) as caught:
        async with given(spec, "shop", deadline_s=deadline_s):
            pytest.fail("it was entered")
    (cause,) = leaves_of(caught.value)
    assert isinstance(cause, PipelineError)
    assert str(cause) == sentence


async def test_one_that_ends_by_itself_ends_the_node() -> None:
    async def crash() -> None:
        await asyncio.sleep(0)
        sys.exit("gone")

    @per_node
    async def browser() -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(crash())
            yield

    with pytest.raises(ExceptionGroup) as caught:
        async with entered(browser):
            await anyio.sleep_forever()
    (cause,) = leaves_of(caught.value)
    assert str(cause) == "per_node browser: called sys.exit('gone')"


async def test_one_that_does_not_end_well_is_told_of_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "LEAVE_DEADLINE_S", 0.01)
    told: list[str] = []

    @per_node
    async def clumsy() -> AsyncIterator[None]:
        yield
        raise ValueError("not closed")

    @per_node
    async def stubborn() -> AsyncIterator[None]:
        yield
        await asyncio.Event().wait()

    async with entered(clumsy, tell=told.append), entered(stubborn, tell=told.append):
        pass
    assert told == [
        "per_node stubborn: did not end within 0.01 s, and was cancelled",
        "per_node clumsy: ValueError: not closed",
    ]


@pytest.mark.parametrize(
    "function",
    ["async def browser(port):\n    yield", "async def browser():\n    return 1", "def browser():\n    yield"],
)
def test_what_cannot_be_made_once_per_node_is_refused_where_it_stands(tmp_path: Path, function: str) -> None:
    spec = write(tmp_path, f"from areal_async import per_node\n\n@per_node\n{function}\n")
    with pytest.raises(UserError, match=r"per_node browser: got .*, need `async def browser\(\)` that yields"):
        load_workflow(spec)


def test_name_that_a_policy_has_too_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"policies.browser is made once per node too"):
        load_workflow(write(tmp_path, FILE), policies=["browser"])
