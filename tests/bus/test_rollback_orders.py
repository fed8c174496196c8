"""An order to go back names a checkpoint that the run stands on, is on record, and has the trainer begin anew once."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from areal_async.bus import Bus, Role, ask_service, order_rollback, serving
from areal_async.config.settings import RunSettings, Settings
from areal_async.controller.rollback import RollbackOrders
from areal_async.errors import UserError
from areal_async.launch.orders import run_rollback_orders
from areal_async.launch.run_directory import RunDirectory
from areal_async.launch.starts import Start, begin, is_finished
from areal_async.process.atomic_folders import LEDGER
from areal_async.protocol.journal import Journal
from areal_async.protocol.run_state import Rollback, RunState
from areal_async.protocol.subjects import ROLLBACK, RUN_STATE
from areal_async.protocol.types import Cut, CutGroup, CutKind, Version, WeightsVersion
from tests.brokers import PATIENCE_S, OpenRole, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def settings(settings: Settings, tmp_path: Path) -> Settings:
    """Of a run with three checkpoints, of which it has gone back behind the last two."""
    made = settings.model_copy(update={"run": RunSettings(name=settings.run.name, directory=tmp_path, steps=9)})
    for version, steps in (("1-1", 1), ("1-2", 2), ("2-3", 3)):
        folder = made.run_directory / "checkpoints" / version
        folder.mkdir(parents=True)
        trained = {str(step): [f"0-{step}-0"] for step in range(1, steps + 1)}
        (folder / LEDGER).write_text(json.dumps({"version": version, "trained": trained}))
    return made


def journal() -> Journal:
    made = Journal()
    cuts = [
        Cut(lineage=1, step=step, groups=[CutGroup(group_id=f"0-{step}-0", workflow="w", slots=[])]) for step in (1, 2)
    ]
    branch = Cut(kind=CutKind.BRANCH, lineage=2, step=1, branches={"2": 1})
    for entry in (
        Cut(kind=CutKind.BEGIN, lineage=1, step=0),
        *cuts,
        Cut(kind=CutKind.BEGIN, lineage=2, step=1),
        branch,
    ):
        made.add_cut(entry, sequence=1)
    return made


async def order(open_role: OpenRole, settings: Settings, **body: Any) -> dict[str, Any]:
    controller, operator = await open_role(Role.CONTROLLER), await open_role(Role.OPERATOR)
    endpoints = RollbackOrders(controller, settings, journal).endpoints
    async with serving(controller, description="", report=dict, endpoints=endpoints):
        return await ask_service(operator, operator.names.control("rollback"), body, deadline_s=PATIENCE_S)


@pytest.mark.parametrize("wanted", ["1-1", "1"])
async def test_an_order_is_kept_and_on_record(open_role: OpenRole, settings: Settings, wanted: str) -> None:
    answer = await order(open_role, settings, version=wanted, by="ann", reason="it diverged")

    assert answer == {"version": "1-1", "number": 1}
    held, _ = await (await open_role(Role.TRAINER)).get(ROLLBACK, Rollback)
    assert held is not None
    assert (held.is_due, held.version, held.by, held.reason) == (True, "1-1", "ann", "it diverged")
    line = msgspec.json.decode((settings.run_directory / "orders.jsonl").read_bytes())
    assert (line["order"], line["by"], line["at"]) == ("rollback to 1-1", "ann", held.at)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("1-2", r"got 1-2, whose steps the run has given up, need one of 1-1, 2-3, best, last$"),
        ("7", r"has no version 7, need one of 1-1, 2-3, best, last$"),
        ("2-3", r"^--to: got 2-3, whose steps were trained otherwise since"),
        ("x" * 201, r"version: got "),
    ],
    ids=["given up", "not there", "unknown to the journal", "too long"],
)
async def test_an_order_that_cannot_be_carried_out_is_refused_with_what_there_is(
    open_role: OpenRole, settings: Settings, wanted: str, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        await order(open_role, settings, version=wanted)

    assert (await (await open_role(Role.OPERATOR)).get(ROLLBACK, Rollback))[0] is None


async def test_a_run_that_has_trained_its_last_step_takes_none(open_role: OpenRole, settings: Settings) -> None:
    operator = await open_role(Role.OPERATOR)
    await operator.put(operator.names.weights_key(), WeightsVersion(version="1-9", final=True))

    with pytest.raises(UserError, match="has trained its last step, and is about to end"):
        await order(open_role, settings, version="1-1")


async def test_an_alarm_orders_so_often_and_never_beside_an_order(open_role: OpenRole) -> None:
    bus, version = await open_role(Role.TRAINER), Version(1, 1)

    async def by_alarm() -> bool:
        return await order_rollback(bus, version, by="alarm", reason="flat", max_by_alarm=2) is not None

    async def end() -> None:
        held, revision = await bus.get(ROLLBACK, Rollback)
        assert held is not None
        await bus.compare_and_set(ROLLBACK, msgspec.structs.replace(held, lineage=2), revision)

    assert await order_rollback(bus, version, by="ann", reason="") is not None
    assert not await by_alarm()
    taken = []
    for _ in range(3):
        await end()
        taken.append(await by_alarm())

    assert taken == [True, True, False]


@contextmanager
def watched(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> Iterator[anyio.Event]:
    """Give the event of the launcher having begun to look."""
    watching, watch = anyio.Event(), bus.watch_key

    def begin_watching(key: str, kind: Any) -> Any:
        watching.set()
        return watch(key, kind)

    monkeypatch.setattr(bus, "watch_key", begin_watching)
    yield watching


@pytest.mark.parametrize("is_refused", [False, True], ids=["due at the start", "refused before"])
async def test_the_launcher_has_the_trainer_begin_anew_for_each_order_after_its_start(
    open_role: OpenRole, monkeypatch: pytest.MonkeyPatch, *, is_refused: bool
) -> None:
    bus, told, renewed = await open_role(Role.OPERATOR), list[str](), list[tuple[str, str]]()
    before = await order_rollback(bus, Version(1, 1), by="ann", reason="")
    assert before is not None
    if is_refused:
        before = msgspec.structs.replace(before, lineage=2, refusal="its folder is gone")
        await bus.put(ROLLBACK, before)

    async def follow() -> None:
        await run_rollback_orders(bus, before=before, renew=lambda *what: renewed.append(what), notify=told.append)

    with watched(bus, monkeypatch) as watching:
        async with anyio.create_task_group() as following:
            following.start_soon(follow)
            with anyio.fail_after(PATIENCE_S):
                await watching.wait()
            if not is_refused:
                await bus.put(ROLLBACK, msgspec.structs.replace(before, lineage=2, refusal="its folder is gone"))
                await until(lambda: len(told) == 1)
            await order_rollback(bus, Version(1, 2), by="bob", reason="it diverged")
            await until(lambda: len(renewed) == 1)
            following.cancel_scope.cancel()

    assert renewed == [("trainer", "started anew to go back to 1-2")]
    refused = [] if is_refused else ["run test does not go back to 1-1: its folder is gone"]
    assert told == [*refused, "run test goes back to 1-2, as bob has ordered: it diverged"]


async def test_a_run_that_had_finished_is_not_finished_any_more_once_it_is_to_go_back(
    open_role: OpenRole, settings: Settings
) -> None:
    """Its last version is no end any more, before any process of the next start could take it for one."""
    bus, told = await open_role(Role.OPERATOR), list[str]()
    directory = RunDirectory(settings.run_directory)
    await bus.put(RUN_STATE, RunState(state="finished"))
    await bus.put(bus.names.weights_key(), WeightsVersion(version="1-9", final=True))
    assert await is_finished(bus, steps=9)
    await order_rollback(bus, Version(1, 1), by="ann", reason="")
    assert not await is_finished(bus, steps=9)

    await begin(bus, directory, settings, Start(by="ann"), notify=told.append)

    newest, _ = await bus.get(bus.names.weights_key(), WeightsVersion)
    assert newest is not None
    assert (newest.version, newest.final) == ("1-9", False)
    assert told == ["run test had finished, and goes back to 1-1, as ann has ordered"]
