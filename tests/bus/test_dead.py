"""Dead letters are listed with their cause, and tried again when the operator asks, whether the run is alive or not."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import structlog

from areal_async.bus import Bus, EmbeddedBroker, Role, declare, open_bus
from areal_async.cli.dead import readmit, show
from areal_async.cli.main import main
from areal_async.config.settings import BusSettings, RolloutSettings, RunSettings, Settings
from areal_async.controller.accounts import Accounts
from areal_async.controller.controller import Controller
from areal_async.controller.tasks import Tasks
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.register import AGAIN, DEAD, WAITING, DeadGroup, read_register
from areal_async.protocol.run_state import RunState, ServerState
from areal_async.protocol.subjects import CHECKPOINT, LINEAGE, RUN_STATE
from areal_async.protocol.types import (
    CheckpointRecord,
    Cut,
    CutKind,
    LineageRecord,
    Outcome,
    OutcomeKind,
    Ticket,
    WeightsVersion,
)
from areal_async.protocol.wire import decode
from tests.brokers import OpenRole, until

ROWS = [{"question": str(index)} for index in range(3)]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        run=RunSettings(name="test", directory=tmp_path, steps=2),
        rollout=RolloutSettings(group_size=2, min_group_size=1, batch_groups=1, max_staleness=0, max_attempts=2),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()  # a verb silences the log of its process


async def dead_letter(bus: Bus, group_id: str = "0-1-1", *, lineage: int = 1) -> None:
    outcome = Outcome(
        group_id=group_id,
        kind=OutcomeKind.DEAD,
        lineage=lineage,
        reason="it broke",
        num_failed_attempts=2,
        workflow="w",
    )
    await bus.publish(bus.names.outcomes, outcome)


async def begin(bus: Bus) -> None:
    await bus.publish(bus.names.cuts, Cut(kind=CutKind.BEGIN, lineage=1, step=0))
    await bus.put(bus.names.weights_key(), WeightsVersion(version="1-0", path="x"))


async def letters(bus: Bus) -> list[DeadGroup]:
    return (await read_register(bus)).letters


@asynccontextmanager
async def controlling(bus: Bus, settings: Settings) -> AsyncIterator[Controller]:
    accounts = Accounts(max_groups_in_flight=settings.rollout.max_groups_in_flight)
    controller = Controller(bus, settings, Tasks([("w", ROWS)]), None, accounts=accounts)
    async with anyio.create_task_group() as running:
        running.start_soon(controller.run)
        yield controller
        running.cancel_scope.cancel()


async def tickets(bus: Bus) -> list[Ticket]:
    stored = await bus.read_log(bus.names.tickets_stream, bus.names.all_tickets)
    return [decode(message.data, Ticket) for message in stored]


@pytest.mark.anyio
async def test_a_live_run_tries_a_dead_prompt_again_on_a_fresh_credit(open_role: OpenRole, settings: Settings) -> None:
    operator, trainer, node = [await open_role(role) for role in (Role.OPERATOR, Role.TRAINER, Role.NODE)]
    await begin(trainer)
    await node.put(node.names.server_key("s"), ServerState(server_id="s", node_id="n", url="", version="1-0"))
    async with controlling(await open_role(Role.CONTROLLER), settings) as controller:

        async def admitted(count: int) -> list[Ticket]:
            async def is_so() -> bool:
                return len(await tickets(operator)) == count and controller.waits_for.startswith("a credit")

            await until(is_so)
            return await tickets(operator)

        (first,) = await admitted(1)
        await dead_letter(trainer, first.group_id)
        await admitted(2)
        (letter,) = await letters(operator)
        assert (letter.group, letter.workflow, letter.attempts, letter.reason) == (first.group_id, "w", 2, "it broke")
        assert (letter.prompt, letter.state) == (first.prompt.index, DEAD)
        assert letter.when.startswith("20")

        assert await readmit(operator, settings, [first.group_id]) == [first.group_id]
        assert [one.state for one in await letters(operator)] == [WAITING], "no credit is free"
        second = (await tickets(operator))[1]
        await trainer.publish(
            trainer.names.outcomes, Outcome(group_id=second.group_id, kind=OutcomeKind.STALE, lineage=1)
        )

        again = (await admitted(3))[2]
        assert again.group_id == first.group_id[:-1] + "1"
        assert again.num_failed_attempts == 0
        assert [one.state for one in await letters(operator)] == [AGAIN]


@pytest.mark.anyio
async def test_what_is_not_dead_is_not_tried_again(open_role: OpenRole, settings: Settings) -> None:
    operator, trainer = await open_role(Role.OPERATOR), await open_role(Role.TRAINER)
    await dead_letter(trainer)

    with pytest.raises(UserError, match="--readmit 0-7-0: got no dead group"):
        await readmit(operator, settings, ["0-7-0"])
    assert await readmit(operator, settings, None) == ["0-1-1"]
    with pytest.raises(UserError, match="--readmit 0-1-1: got to be tried again"):
        await readmit(operator, settings, ["0-1-1"])
    assert await readmit(operator, settings, None) == []


@pytest.mark.anyio
async def test_a_run_that_can_try_nothing_more_says_so(open_role: OpenRole, settings: Settings) -> None:
    operator, trainer = await open_role(Role.OPERATOR), await open_role(Role.TRAINER)
    await dead_letter(trainer)
    await trainer.publish(trainer.names.cuts, Cut(lineage=1, step=2))
    with pytest.raises(UserError, match="run test: the batch of its last step 2 is cut"):
        await readmit(operator, settings, None)

    await operator.put(RUN_STATE, RunState(state="finished"))

    with pytest.raises(UserError, match="run test: it has finished"):
        await readmit(operator, settings, None)


def test_a_stopped_run_is_visited_with_a_broker_of_its_own_and_left_as_it_was(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(settings.run_directory)

    async def leave_a_run() -> None:
        broker = EmbeddedBroker(settings)
        await broker.start()
        credentials = broker.credentials(Role.OPERATOR)
        try:
            async with open_bus(broker.url, names=settings.names, role=Role.OPERATOR, credentials=credentials) as bus:
                await declare(bus, settings)
                await bus.put(LINEAGE, LineageRecord(lineage=1))
                await bus.put(CHECKPOINT, CheckpointRecord(version="1-0", path=""))
                await begin(bus)
                await dead_letter(bus)
                directory.write_settings(settings)
                directory.write_bus_url(broker.url)
        finally:
            await broker.aclose()

    anyio.run(leave_a_run)
    capsys.readouterr()
    verb = ["dead", "--run", str(directory.path)]

    assert main([*verb, "--readmit", "0-1-1"]) == 0
    assert capsys.readouterr().out == "0-1-1: to be tried again as 0-1-2\n"
    assert main([*verb, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["state"] == WAITING
    assert main([*verb, "--readmit", "0-1-1"]) == 2
    assert "got to be tried again" in capsys.readouterr().err
    with directory.locked("test"):
        pass


@pytest.mark.parametrize("words", [["--all"], ["--readmit"], ["--readmit", "0-1-0", "--all"]])
def test_an_ambiguous_request_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dead", "--run", "x", *words]) == 2
    assert "--readmit" in capsys.readouterr().err


def test_people_see_a_table_or_that_there_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    show([], is_json=False)
    assert capsys.readouterr().out == "no dead letters\n"

    letter = DeadGroup("0-1-1", 1, "w", 2, "it [broke]", "2026-01-01T00:00:00.123456789Z", DEAD)
    show([letter], is_json=False)

    assert "it [broke]" in capsys.readouterr().out
