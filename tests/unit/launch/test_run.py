"""A run from its broker to its end: streams, address and state, with the real broker and stand-ins for the roles."""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from areal_async.bus import Bus, EmbeddedBroker, Role, credentials_for, declare, open_bus
from areal_async.bus.streams import list_runs
from areal_async.config.live import settings_now
from areal_async.config.settings import DatasetSettings, Settings, TaskSettings
from areal_async.errors import FencedError, PipelineError, UserError
from areal_async.launch import rotation
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.heartbeat_lock import own_holder
from areal_async.launch.local import LocalBackend, LocalProcess
from areal_async.launch.run import launch
from areal_async.launch.run_directory import FirstStart, RunDirectory
from areal_async.launch.starts import Start
from areal_async.launch.supervisor import Notify, RunEnd
from areal_async.monitor.snapshot import read_events
from areal_async.protocol.run_state import Change, Changes, Holder, RunState
from areal_async.protocol.subjects import ADMITTED, CHANGES, CHECKPOINT, LAUNCHER, LINEAGE, RUN_STATE
from areal_async.protocol.types import (
    Admitted,
    CheckpointRecord,
    Cut,
    CutKind,
    LineageRecord,
    Mix,
    Ticket,
    WeightsVersion,
)
from tests.brokers import until

pytestmark = pytest.mark.anyio


class _StandIns(LocalBackend):
    """Starts a line of Python for each role: the controller's is given, the others work until they are ended."""

    def __init__(self, controller: str) -> None:
        self.controller = controller
        self.started: list[str] = []

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        self.started.append(spec.name)
        code = self.controller if spec.name == "controller" else "import time; time.sleep(600)"
        return await super().start(
            ProcessSpec(
                name=spec.name,
                command=(sys.executable, "-S", "-c", code),
                environment=spec.environment,
                output=spec.output,
            )
        )


@pytest.fixture
def directory(settings: Settings) -> RunDirectory:
    return RunDirectory(settings.run_directory)


async def _launch(
    settings: Settings,
    backend: LocalBackend,
    *,
    declare_failed: str = "",
    taken_by: Holder | None = None,
    notify: Notify = lambda text: None,
    named: Collection[str] = (),
    first: FirstStart | None = None,
    admits: bool = False,
) -> tuple[RunEnd, list[str]]:
    """Launch, and while it runs read the run's state (the first of what is returned) and perhaps change it.

    Args:
        named: settings that the start speaks of.
        admits: a prompt is admitted meanwhile.
    """
    states: list[str] = []

    async def watch(bus: Bus) -> None:
        state, _ = await bus.get(RUN_STATE, RunState)
        states.append(state.state if state else "none")
        if declare_failed:
            await bus.put(RUN_STATE, RunState(state="failed", reason=declare_failed))
        if taken_by is not None:
            await bus.put(LAUNCHER, taken_by)
        if admits:
            ticket = Ticket(group_id="0-0-0", workflow="a", row={}, group_size=2, version="1-0", number=1)
            await bus.publish(bus.names.tickets("a"), ticket, msg_id="ticket")
        await anyio.Path(settings.run_directory / "seen").touch()

    with anyio.fail_after(100):
        end = await launch(
            settings,
            RunDirectory(settings.run_directory),
            backend=backend,
            start=Start(by="ann", named=frozenset(named)),
            notify=notify,
            watch=watch,
            first=first,
        )
    return end, states


@asynccontextmanager
async def _bucket(settings: Settings) -> AsyncIterator[Bus]:
    """What is in the bus while the run is not."""
    broker = EmbeddedBroker(settings)
    await broker.start()
    async with open_bus(
        broker.url, names=settings.names, role=Role.OPERATOR, credentials=broker.credentials(Role.OPERATOR)
    ) as bus:
        await declare(bus, settings)
        yield bus
    await broker.aclose()


async def _put_state(settings: Settings, state: RunState) -> None:
    """Leave a state as an earlier start would have."""
    async with _bucket(settings) as bus:
        await bus.put(RUN_STATE, state)


def _after_the_watch(settings: Settings, then: str) -> str:
    return (
        "import os, sys, time\n"
        f"while not os.path.exists({str(settings.run_directory / 'seen')!r}): time.sleep(0.01)\n"
        f"{then}\n"
    )


async def test_roles_start_with_a_bus_and_the_run_ends_with_the_controller(
    settings: Settings, directory: RunDirectory
) -> None:
    backend = _StandIns(_after_the_watch(settings, "sys.exit(0)"))

    end, states = await _launch(settings, backend)

    assert end is RunEnd.FINISHED
    assert states == ["running"]
    assert sorted(backend.started) == ["controller", "node-0", "trainer-0"]
    assert directory.read_bus_url().startswith("nats://127.0.0.1:")


async def test_a_broker_that_other_hosts_reach_is_told_of(settings: Settings, directory: RunDirectory) -> None:
    other = settings.model_copy(update={"bus": settings.bus.model_copy(update={"host": "127.0.0.2"})})
    said: list[str] = []

    await _launch(other, _StandIns(_after_the_watch(settings, "sys.exit(0)")), notify=said.append)

    assert directory.read_bus_url().startswith("nats://127.0.0.2:")
    assert said[0].startswith("the broker listens at 127.0.0.2: it asks for keys, and encrypts nothing")


async def test_an_address_that_every_host_takes_for_its_own_is_refused_before_the_broker_starts(
    settings: Settings, directory: RunDirectory
) -> None:
    """Though a scheduler has given it."""
    backend = _StandIns("pass")
    backend.hosts = ("here", "there")

    with pytest.raises(UserError, match=r"the broker's address 127\.0\.0\.1 is the loopback, where there find"):
        await _launch(settings, backend)

    assert not directory.path.exists()


def _mixed(settings: Settings, *ratios: float) -> Settings:
    rows = DatasetSettings(path="x")
    tasks = [
        TaskSettings(workflow=f"{name}.py", dataset=rows, ratio=one) for name, one in zip("ab", ratios, strict=True)
    ]
    return settings.model_copy(update={"tasks": tuple(tasks)})


async def test_another_mix_of_the_tasks_is_taken_at_a_resume_and_told(
    settings: Settings, directory: RunDirectory
) -> None:
    directory.write_settings(_mixed(settings, 1.0, 1.0))
    async with _bucket(settings) as bus:
        await bus.put(ADMITTED, Admitted(total=3, num_fresh=3, mixes=[Mix(start=0, weights=[1, 1], counts=[0, 0])]))
    said: list[str] = []

    await _launch(_mixed(settings, 1.0, 3.0), _StandIns("pass"), notify=said.append, named=["tasks.1.ratio"])

    assert said[0] == "tasks.1.ratio was 1.0, is 3.0: for the prompts that are admitted from now on"
    assert [task.ratio for task in directory.read_settings().tasks] == [1.0, 3.0]
    (event,) = await _changes_told(settings)
    what = {"event": "setting.changed", "setting": "tasks.1.ratio", "before": 1.0, "after": 3.0}
    assert event == what | {"by": "ann", "reason": "the run was resumed with it", "at": event["at"]}
    assert [json.loads(line) for line in (directory.path / "changes.jsonl").read_text().splitlines()] == [event]
    (start,) = map(json.loads, (directory.path / "orders.jsonl").read_text().splitlines())
    assert (start["order"], start["by"]) == ("start", "ann")


async def _changes_told(settings: Settings) -> list[dict[str, Any]]:
    """Return the events of changed settings that the broker has, without who told them."""
    async with _bucket(settings) as bus:
        events = await read_events(bus, limit=100)
    changes = [event for event in events if event["event"] == "setting.changed"]
    return [{key: value for key, value in event.items() if key != "teller"} for event in changes]


@pytest.mark.parametrize(
    ("was", "given", "told", "holds"),
    [
        (1.0, 2.0, [], 2.0),
        (1.0, 3.0, [(2.0, 3.0)], 3.0),
        (3.0, 1.0, [(3.0, 1.0)], 1.0),
        (1.0, 1.0, [], 2.0),
    ],
    ids=["what an operator had set", "something else", "what it was when that was set", "the same command"],
)
async def test_a_resume_with_another_value_goes_before_what_operators_had_changed(
    settings: Settings,
    directory: RunDirectory,
    was: float,
    given: float,
    told: list[tuple[float, float]],
    holds: float,
) -> None:
    """They had changed a ratio of 1 to 2."""
    directory.write_settings(_mixed(settings, 1.0, was))
    async with _bucket(settings) as bus:
        await bus.put(CHANGES, Changes(by_setting={"tasks.1.ratio": Change(value=2.0, given=1.0, by="bob")}))
    said: list[str] = []

    await _launch(_mixed(settings, 1.0, given), _StandIns("pass"), named=["tasks.1.ratio"], notify=said.append)

    assert [(event["before"], event["after"]) for event in await _changes_told(settings)] == told
    async with _bucket(settings) as bus:
        changes, _ = await bus.get(CHANGES, Changes)
        assert changes is not None
    assert settings_now(directory.read_settings(), changes).tasks[1].ratio == holds
    notice = "tasks.1.ratio is 2.0, as bob has changed it: resume --set tasks.1.ratio=... changes it"
    assert any(one.startswith(notice) for one in said) == (given == 1.0 == was)


async def test_a_run_that_has_finished_keeps_the_settings_that_it_had(
    settings: Settings, directory: RunDirectory
) -> None:
    """Whatever a start of it was given: nothing is made by those."""
    directory.write_settings(_mixed(settings, 1.0, 1.0))
    async with _bucket(settings) as bus:
        await bus.put(RUN_STATE, RunState(state="finished"))
    said: list[str] = []

    end, _ = await _launch(_mixed(settings, 1.0, 3.0), _StandIns("pass"), notify=said.append)

    assert end is RunEnd.ALREADY_FINISHED
    assert said == []
    assert directory.read_settings() == _mixed(settings, 1.0, 1.0)


async def test_a_mix_whose_prompts_follow_from_its_ratios_stays_however_often_it_is_tried(
    settings: Settings, directory: RunDirectory
) -> None:
    directory.write_settings(_mixed(settings, 1.0, 1.0))
    async with _bucket(settings) as bus:
        await bus.put(ADMITTED, Admitted(total=3, num_fresh=3))
    backend = _StandIns("pass")

    for _ in range(2):
        refusal = pytest.RaisesExc(UserError, match=r"tasks\.1\.ratio was 1\.0, is 3\.0; its prompts .* put back")
        with pytest.RaisesGroup(refusal, flatten_subgroups=True):
            await _launch(_mixed(settings, 1.0, 3.0), backend)

    assert not backend.started
    assert [task.ratio for task in directory.read_settings().tasks] == [1.0, 1.0]
    await _launch(_mixed(settings, 1.0, 1.0), backend)


async def test_finished_run_is_not_started_again(settings: Settings) -> None:
    await _put_state(settings, RunState(state="finished"))
    backend = _StandIns("pass")

    end, states = await _launch(settings, backend)

    assert (end, states, backend.started) == (RunEnd.ALREADY_FINISHED, [], [])


def _with_steps(settings: Settings, steps: int) -> Settings:
    return settings.model_copy(update={"run": settings.run.model_copy(update={"steps": steps})})


async def test_a_finished_run_goes_on_when_it_is_given_more_steps(settings: Settings, directory: RunDirectory) -> None:
    directory.write_settings(_with_steps(settings, 3))
    for name in ("model", "checkpoints/2-3"):
        (directory.path / name).mkdir(parents=True)
    async with _bucket(settings) as bus:
        await bus.put(RUN_STATE, RunState(state="finished"))
        await bus.put(bus.names.weights_key(), WeightsVersion(version="2-3", final=True))
        await bus.put(LINEAGE, LineageRecord(lineage=2))
        await bus.put(CHECKPOINT, CheckpointRecord(version="2-3", path="x"))
        await bus.publish(bus.names.cuts, Cut(kind=CutKind.BEGIN, lineage=2, step=0))
    said: list[str] = []

    for steps in (2, 3):
        end, _ = await _launch(_with_steps(settings, steps), _StandIns("pass"), notify=said.append)
        assert (end, said) == (RunEnd.ALREADY_FINISHED, [])
    end, states = await _launch(
        _with_steps(settings, 5), _StandIns(_after_the_watch(settings, "sys.exit(0)")), notify=said.append
    )

    assert (end, states) == (RunEnd.FINISHED, ["running"])
    assert said[:2] == [
        "run test had finished, and goes on from step 3; the model of that step is kept as model_2-3",
        "run.steps was 3, is 5",
    ]
    assert (directory.path / "model_2-3").is_dir()
    assert directory.read_settings().run.steps == 5


def _cut(step: int, kind: CutKind = CutKind.CUT) -> Cut:
    return Cut(kind=kind, lineage=1, step=step)


@pytest.mark.parametrize(
    ("checkpoint", "cuts", "sentence"),
    [
        (
            4,
            [_cut(4), _cut(5), _cut(6)],
            "4, its newest checkpoint; first it trains steps 5 to 6 as cut before, from what is",
        ),
        (4, [_cut(4), _cut(5, CutKind.END)], "4, its newest checkpoint"),
        (None, [_cut(0, CutKind.BEGIN)], "0"),
    ],
)
async def test_a_run_says_from_which_step_it_goes_on_and_where_another_start_would(
    settings: Settings, directory: RunDirectory, checkpoint: int | None, cuts: list[Cut], sentence: str
) -> None:
    """Whatever step was the last to be shown."""
    directory.write_settings(settings)
    (directory.path / "metrics.jsonl").write_text('{"step": 9}\n')
    async with _bucket(settings) as bus:
        await bus.put(RUN_STATE, RunState())  # as kill -9 leaves it
        await bus.put(LINEAGE, LineageRecord(lineage=1))
        path = "" if checkpoint is None else "x"
        await bus.put(CHECKPOINT, CheckpointRecord(version=f"1-{checkpoint or 0}", path=path))
        for cut in cuts:
            await bus.publish(bus.names.cuts, cut)
    said: list[str] = []

    with pytest.raises(ExceptionGroup):
        await _launch(settings, _StandIns(_after_the_watch(settings, "sys.exit(2)")), notify=said.append, admits=True)

    assert said[0].startswith(f"run test goes on from step {sentence}")
    assert said[-1] == f"another start goes on from step {checkpoint or 0}"


async def test_a_run_comes_no_shorter_than_it_is_cut(settings: Settings, directory: RunDirectory) -> None:
    directory.write_settings(_with_steps(settings, 9))
    async with _bucket(settings) as bus:
        await bus.put(RUN_STATE, RunState(state="stopped"))
        await bus.put(LINEAGE, LineageRecord(lineage=1))
        await bus.put(CHECKPOINT, CheckpointRecord(version="1-0", path=""))
        for cut in (_cut(1), _cut(2), _cut(3), _cut(4, CutKind.END)):
            await bus.publish(bus.names.cuts, cut)

    refusal = pytest.RaisesExc(UserError, match=r"run\.steps: got 2, need at least 3: so many are cut for training")
    with pytest.RaisesGroup(refusal, flatten_subgroups=True):
        await _launch(_with_steps(settings, 2), _StandIns("pass"))

    assert directory.read_settings().run.steps == 9
    await _launch(_with_steps(settings, 3), _StandIns("pass"))
    assert directory.read_settings().run.steps == 3


@pytest.mark.parametrize("admits", [True, False])
async def test_a_first_start_says_whether_the_run_has_begun(settings: Settings, admits: bool) -> None:
    first, said = FirstStart(), list[str]()
    then = "sys.stderr.write('no such model'); sys.exit(2)"

    with pytest.raises(ExceptionGroup):
        await _launch(
            settings, _StandIns(_after_the_watch(settings, then)), first=first, admits=admits, notify=said.append
        )

    assert first.has_begun == admits
    assert said == (["another start goes on from step 0"] if admits else [])


async def test_a_first_start_in_vain_leaves_nothing_at_a_broker_that_others_use(settings: Settings) -> None:
    broker = EmbeddedBroker(settings)
    await broker.start()
    bus_settings = settings.bus.model_copy(update={"url": broker.url, "credentials": broker.credentials(Role.OPERATOR)})
    outside = settings.model_copy(update={"bus": bus_settings})
    first = FirstStart()

    with pytest.raises(ExceptionGroup):
        await _launch(outside, _StandIns(_after_the_watch(settings, "sys.exit(2)")), first=first)

    async with open_bus(
        broker.url, names=settings.names, role=Role.OPERATOR, credentials=broker.credentials(Role.OPERATOR)
    ) as bus:
        assert await list_runs(bus) == []
    assert not first.has_begun
    await broker.aclose()


async def test_failure_of_an_earlier_start_is_forgotten(settings: Settings) -> None:
    await _put_state(settings, RunState(state="failed", reason="no room on disk"))

    end, states = await _launch(settings, _StandIns(_after_the_watch(settings, "sys.exit(0)")))

    assert (end, states) == (RunEnd.FINISHED, ["running"])


async def test_declared_failure_ends_the_run_with_its_reason(settings: Settings) -> None:
    backend = _StandIns(_after_the_watch(settings, "sys.exit(1)"))

    with pytest.raises(ExceptionGroup) as caught:
        await _launch(settings, backend, declare_failed="20 groups failed; the last: boom")

    assert caught.group_contains(PipelineError, match="^20 groups failed; the last: boom$")
    assert backend.started.count("controller") == 1


async def test_a_run_that_fails_in_its_launcher_leaves_the_cause_for_joined_nodes(settings: Settings) -> None:
    backend = _StandIns(_after_the_watch(settings, "sys.stderr.write('no such data set'); sys.exit(2)"))

    with pytest.raises(ExceptionGroup) as caught:
        await _launch(settings, backend)

    assert caught.group_contains(UserError, match="^no such data set$")
    async with _bucket(settings) as bus:
        assert (await bus.get(RUN_STATE, RunState))[0] == RunState(state="failed", reason="no such data set")


async def test_a_launcher_that_kills_everything_does_not_wait_for_a_joined_node(
    settings: Settings, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.launch.run.JOINED_NODES_S", 600.0)
    deaf = anyio.Path(directory.path / "deaf")
    backend = _StandIns(
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(deaf)!r}).touch()\n"
        "time.sleep(600)\n"
    )
    said: list[str] = []
    ends: list[RunEnd] = []

    async def run() -> None:
        ends.append((await _launch(settings, backend, notify=said.append))[0])
        beating.cancel_scope.cancel()

    async def beat() -> None:
        key = credentials_for(settings, directory.path, Role.OPERATOR)
        async with open_bus(directory.read_bus_url(), names=settings.names, role=Role.OPERATOR, credentials=key) as bus:
            node = bus.names.node_key("far")
            holder = own_holder()
            await bus.put(node, holder)
            os.kill(os.getpid(), signal.SIGINT)
            await until(lambda: bool(said))
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                await bus.put(node, holder)
                await anyio.sleep(0.1)

    async with anyio.create_task_group() as beating:
        beating.start_soon(run)
        await until(deaf.exists)
        beating.start_soon(beat)
    assert ends == [RunEnd.KILLED]
    assert said[-1] == "killing everything"


async def test_a_launcher_whose_run_another_host_has_started_ends_and_leaves_it_alone(settings: Settings) -> None:
    other = Holder(holder_id="x", host="elsewhere", pid=7, since="now")

    with pytest.raises(ExceptionGroup) as caught:
        await _launch(settings, _StandIns("import time; time.sleep(600)"), taken_by=other)

    assert caught.group_contains(FencedError, match="^run test: kept by process 7 of host elsewhere since now")
    async with _bucket(settings) as bus:
        assert (await bus.get(RUN_STATE, RunState))[0] == RunState()
        assert (await bus.get(LAUNCHER, Holder))[0] == other


async def test_a_log_that_has_grown_too_large_is_set_aside_while_the_run_goes_on(
    settings: Settings, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(rotation, "INTERVAL_S", 0.05)
    older = directory.logs / "controller.out.1"
    then = (
        "print('x' * 2000, flush=True)\n"
        "ends_at_s = time.monotonic() + 60\n"
        f"while not os.path.exists({str(older)!r}) and time.monotonic() < ends_at_s: time.sleep(0.01)\n"
    )

    await _launch(settings, _StandIns(_after_the_watch(settings, then)))

    assert older.read_text() == "x" * 2000 + "\n"
