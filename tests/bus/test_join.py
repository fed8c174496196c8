"""A node that joins learns the run from its bucket, is refused where it has no place, and ends with the run."""

import dataclasses
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import msgspec
import pytest
from anyio.abc import TaskGroup, TaskStatus

import areal_async
from areal_async.bus import Bus, EmbeddedBroker, Role
from areal_async.config.settings import DatasetSettings, Settings, TaskSettings
from areal_async.config.sources import override_settings
from areal_async.errors import FencedError, PipelineError, UserError, leaves_of
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.heartbeat_lock import own_holder, run_beats, wait_released
from areal_async.launch.join import Invitation, Prepare, fresh_node_id, join, localised
from areal_async.launch.local import LocalBackend, LocalProcess
from areal_async.launch.run import forget_earlier, note_end
from areal_async.launch.run_directory import RunDirectory
from areal_async.launch.supervisor import RunEnd
from areal_async.protocol.run_state import Control, CrewState, Holder, RunState, SharedSettings
from areal_async.protocol.subjects import CONTROL, LAUNCHER, NODES, RUN_STATE, SETTINGS
from areal_async.rollout.user_code.source_hashes import source_hashes
from tests.brokers import PATIENCE_S, OpenRole, until

pytestmark = pytest.mark.anyio


SOON_S = 0.2
"""Between two beats, where no living holder is judged by them."""


class Sleepers:
    """Processes of this host that only sleep, whatever they were to do."""

    hosts = LocalBackend.hosts

    def __init__(self) -> None:
        self.started: list[ProcessSpec] = []

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        self.started.append(spec)
        return await LocalBackend().start(dataclasses.replace(spec, command=("sleep", "60")))


class Launcher:
    """What a launcher says in the bucket, until it is silenced as SIGKILL does it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._beats: anyio.CancelScope | None = None
        self.holder = own_holder()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        self.holder = own_holder()
        with anyio.CancelScope() as self._beats:
            await self._bus.put(LAUNCHER, self.holder)
            task_status.started()
            while True:
                await anyio.sleep(0.2)
                await self._bus.put(LAUNCHER, self.holder)

    def kill(self) -> None:
        assert self._beats is not None
        self._beats.cancel()


async def _share(bus: Bus, settings: Settings) -> None:
    shared = SharedSettings(settings=settings.model_dump_json(), library=areal_async.__version__)
    await bus.put(SETTINGS, shared)


@pytest.fixture
async def operator(open_role: OpenRole, settings: Settings) -> Bus:
    bus = await open_role(Role.OPERATOR)
    await bus.put(RUN_STATE, RunState())
    await _share(bus, settings)
    return bus


@pytest.fixture
async def tasks() -> AsyncIterator[TaskGroup]:
    async with anyio.create_task_group() as tasks:
        yield tasks
        tasks.cancel_scope.cancel()


@pytest.fixture
async def launcher(operator: Bus, tasks: TaskGroup) -> Launcher:
    launcher = Launcher(operator)
    await tasks.start(launcher.run)
    return launcher


@pytest.fixture
def invitation(broker: EmbeddedBroker, tmp_path: Path) -> Invitation:
    return Invitation(run="test", url=broker.url, credentials=None, ca=None, directory=tmp_path)


async def _join(
    invitation: Invitation,
    node_id: str = "far",
    backend: Sleepers | None = None,
    told: list[str] | None = None,
    prepare: Prepare = lambda settings: settings,
) -> RunEnd:
    with anyio.fail_after(PATIENCE_S):
        return await join(
            invitation,
            node_id=node_id,
            backend=backend or Sleepers(),
            prepare=prepare,
            notify=[].append if told is None else told.append,
        )


@pytest.mark.parametrize(
    ("key", "record"),
    [
        (RUN_STATE, RunState(state="finished")),
        (RUN_STATE, RunState(state="stopped")),
        (CONTROL, Control(is_stopping=True)),
    ],
)
async def test_a_joined_node_has_the_runs_settings_and_ends_when_the_run_does(
    operator: Bus, launcher: Launcher, invitation: Invitation, key: str, record: RunState | Control
) -> None:
    backend, ends = Sleepers(), []
    async with anyio.create_task_group() as joining:

        async def run() -> None:
            ends.append(await _join(invitation, backend=backend))

        joining.start_soon(run)
        await until(lambda: bool(backend.started))
        assert not ends
        await operator.put(key, record)

    (spec,) = backend.started
    directory = RunDirectory(invitation.directory / "test" / "nodes" / "far")
    assert ends == [RunEnd.STOPPED]
    assert spec.command[2:] == (
        *("areal_async", "node", "--node-id", "far"),
        *("--run-directory", str(directory.path)),
    )
    here = directory.read_settings()
    assert here.run_directory == invitation.directory / "test"
    assert here.bus.url == directory.read_bus_url() == invitation.url
    assert here.bus.credentials == invitation.directory / "test" / "credentials" / "node.nk"


@pytest.mark.both_loops
async def test_a_joined_node_of_a_run_that_fails_fails_with_its_cause(
    operator: Bus, launcher: Launcher, invitation: Invitation
) -> None:
    backend = Sleepers()

    async def fail() -> None:
        await until(lambda: bool(backend.started))
        await operator.put(RUN_STATE, RunState(state="failed", reason="20 groups failed"))

    async with anyio.create_task_group() as failing:
        failing.start_soon(fail)
        with pytest.raises(PipelineError, match="run test has failed: 20 groups failed"):
            await _join(invitation, backend=backend)


async def test_a_joined_node_lets_go_of_a_silent_run_and_joins_it_anew_once_it_is_started_again(
    operator: Bus,
    launcher: Launcher,
    invitation: Invitation,
    settings: Settings,
    tasks: TaskGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, told, ends = Sleepers(), [], []
    await _share(operator, _impatient(settings))
    async with anyio.create_task_group() as joining:

        async def run() -> None:
            ends.append(await _join(invitation, backend=backend, told=told))

        joining.start_soon(run)
        await until(lambda: bool(backend.started))
        launcher.kill()
        with monkeypatch.context() as soon:
            soon.setattr("areal_async.launch.join.BEAT_S", SOON_S)
            await until(lambda: any("is away; waiting up to 600 s" in one for one in told))
        assert not await _holders(operator), "its id is free meanwhile"
        seed = settings.model_copy(update={"run": settings.run.model_copy(update={"seed": 7})})
        await _share(operator, seed)
        await tasks.start(launcher.run)
        await until(lambda: len(backend.started) == 2)
        assert not ends
        await operator.put(RUN_STATE, RunState(state="finished"))

    assert ends == [RunEnd.STOPPED]
    assert "run test: its launcher has not been heard for 0.3 s" in told
    assert RunDirectory(invitation.directory / "test" / "nodes" / "far").read_settings().run.seed == 7


async def test_a_joined_node_waits_for_a_silent_run_no_longer_than_the_settings_say(
    operator: Bus, launcher: Launcher, invitation: Invitation, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = settings.launch.model_copy(update={"join_wait_s": 0.5})
    await _share(operator, _impatient(settings).model_copy(update={"launch": launch}))
    backend = Sleepers()

    async def kill() -> None:
        await until(lambda: bool(backend.started))
        launcher.kill()
        monkeypatch.setattr("areal_async.launch.join.BEAT_S", SOON_S)

    async with anyio.create_task_group() as killing:
        killing.start_soon(kill)
        with pytest.raises(PipelineError, match=r"run test: was away for 0\.5 s, need it back within"):
            await _join(invitation, backend=backend)


async def test_two_nodes_of_one_id_do_not_both_join_and_a_dead_ones_id_is_free(
    operator: Bus,
    launcher: Launcher,
    invitation: Invitation,
    tasks: TaskGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, told = Sleepers(), []
    other_host = dataclasses.replace(invitation, directory=tmp_path / "other", credentials=invitation.key)
    key = operator.names.node_key("far")
    with anyio.CancelScope() as life:
        async with anyio.create_task_group() as joining:
            joining.start_soon(functools.partial(_join, invitation, backend=backend))
            await until(lambda: bool(backend.started))
            with pytest.raises(UserError, match=r"node far of run test: kept by process \d+ of host .*need another id"):
                await _join(other_host)
            life.cancel()
    holder, _ = await operator.get(key, Holder)
    assert holder is not None
    assert holder.has_left

    dead = Holder(holder_id="x", host="elsewhere", pid=1, since="long ago")
    await operator.put(key, dead)
    taking = Sleepers()
    monkeypatch.setattr("areal_async.launch.heartbeat_lock.BEAT_S", SOON_S)
    await tasks.start(_as_task, functools.partial(_join, invitation, backend=taking, told=told))
    await until(lambda: bool(taking.started))
    assert told[0].startswith("--node-id: node far of run test was kept by process 1 of host elsewhere lately; looking")
    await operator.put(RUN_STATE, RunState(state="finished"))


async def test_a_host_that_lacks_something_is_refused_before_it_claims_an_id(
    operator: Bus, launcher: Launcher, invitation: Invitation
) -> None:
    def prepare(settings: Settings) -> Settings:
        raise UserError("metrics.prometheus_host: got 192.0.2.1, need an address of this host")

    backend = Sleepers()
    with pytest.raises(UserError, match="need an address of this host"):
        await _join(invitation, backend=backend, prepare=prepare)

    assert not backend.started
    assert not await _is_held(operator, operator.names.node_key("far")), "nobody has ever held it"
    assert not (invitation.directory / "test" / "nodes").exists()


async def test_what_a_host_has_otherwise_is_what_its_node_reads(
    operator: Bus, launcher: Launcher, invitation: Invitation
) -> None:
    def prepare(settings: Settings) -> Settings:
        return override_settings(settings, ["--inference.num_servers=2"])

    backend = Sleepers()
    async with anyio.create_task_group() as joining:
        joining.start_soon(functools.partial(_join, invitation, backend=backend, prepare=prepare))
        await until(lambda: bool(backend.started))
        await operator.put(RUN_STATE, RunState(state="finished"))

    here = RunDirectory(invitation.directory / "test" / "nodes" / "far").read_settings()
    assert (here.inference.num_servers, here.bus.url) == (2, invitation.url)


async def test_a_node_whose_id_another_has_taken_over_ends(
    operator: Bus, launcher: Launcher, invitation: Invitation
) -> None:
    backend = Sleepers()

    async def take() -> None:
        await until(lambda: bool(backend.started))
        other = Holder(holder_id="x", host="elsewhere", pid=1, since="now")
        await operator.put(operator.names.node_key("far"), other)

    async with anyio.create_task_group() as taking:
        taking.start_soon(take)
        with pytest.raises(ExceptionGroup) as caught:
            await _join(invitation, backend=backend)
    assert "node far of run test: kept by process 1 of host elsewhere" in str(leaves_of(caught.value)[0])


@pytest.mark.parametrize(
    ("before", "failure", "after"),
    [
        ("running", None, RunState(state="stopped")),
        ("running", PipelineError("died 6 times"), RunState(state="failed", reason="died 6 times")),
        ("failed", PipelineError("other"), RunState(state="failed", reason="why")),
        ("finished", None, RunState(state="finished", reason="why")),
    ],
)
async def test_a_launcher_that_ends_leaves_word_for_joined_nodes_unless_another_has_said_why(
    operator: Bus, before: str, failure: PipelineError | None, after: RunState
) -> None:
    await operator.put(RUN_STATE, RunState(state=before, reason="" if before == "running" else "why"))

    await note_end(operator, failure=failure)

    state, _ = await operator.get(RUN_STATE, RunState)
    assert state == after


async def test_a_launcher_whose_run_another_has_taken_over_ends_and_a_lost_beat_does_not_end_it(
    operator: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.launch.heartbeat_lock.BEAT_S", SOON_S)
    holder = own_holder()

    async def take_over() -> None:
        await until(lambda: _has(operator, holder))
        await operator.delete(LAUNCHER)
        await until(lambda: _has(operator, holder))
        await operator.put(LAUNCHER, own_holder())

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as taking:
            taking.start_soon(take_over)
            with pytest.raises(FencedError, match="run test: kept by process"):
                await run_beats(operator, LAUNCHER, holder, what="run test")


async def test_a_launchers_start_forgets_killed_nodes_and_the_living_say_again_that_they_are_there(
    operator: Bus, tasks: TaskGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.launch.heartbeat_lock.BEAT_S", SOON_S)
    key, living = operator.names.node_key("living"), own_holder()
    tasks.start_soon(functools.partial(run_beats, operator, key, living, what="node living"))
    await until(lambda: _is_held(operator, key))
    await operator.put(operator.names.node_key("dead"), own_holder())
    await operator.put(operator.names.crew_key("node-dead"), CrewState(name="node-dead", state="running"))

    await forget_earlier(operator, with_nodes=True)

    await until(lambda: _is_held(operator, key))
    assert await _holders(operator) == [living]
    assert not await operator.keys("crew.")


async def test_the_broker_is_kept_until_joined_nodes_have_left_but_not_for_dead_ones(operator: Bus) -> None:
    living, dead = own_holder(), own_holder()
    await operator.put(operator.names.node_key("dead"), dead)
    await operator.put(operator.names.node_key("living"), living)
    is_gone: list[bool] = []

    async def leave() -> None:
        for _ in range(25):
            await operator.put(operator.names.node_key("living"), living)
            await anyio.sleep(0.2)
        is_gone.append(True)
        await operator.put(operator.names.node_key("living"), msgspec.structs.replace(living, has_left=True))

    async with anyio.create_task_group() as leaving:
        leaving.start_soon(leave)
        await wait_released(operator, NODES)
        assert is_gone


def _impatient(settings: Settings) -> Settings:
    return settings.model_copy(update={"bus": settings.bus.model_copy(update={"operation_deadline_s": 0.4})})


async def _holders(operator: Bus) -> list[Holder]:
    return [holder for holder, _ in (await operator.entries(NODES, Holder)).values() if not holder.has_left]


async def _is_held(operator: Bus, key: str) -> bool:
    return (await operator.get(key, Holder))[0] is not None


async def _has(operator: Bus, holder: Holder) -> bool:
    return (await operator.get(LAUNCHER, Holder))[0] == holder


async def _as_task(
    run: Callable[[], Awaitable[object]], *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    task_status.started()
    await run()


async def test_a_node_is_refused_where_it_has_no_place(
    operator: Bus, launcher: Launcher, invitation: Invitation
) -> None:
    await operator.put(operator.names.crew_key("node-far"), CrewState(name="node-far", state="running", num_starts=1))
    with pytest.raises(UserError, match="--node-id: run test has a node far already, need another id"):
        await _join(invitation)
    with pytest.raises(UserError, match="--node-id: run test has a node 0 already, need another id"):
        await _join(invitation, "0")
    with pytest.raises(UserError, match=r"--node-id: got 'a\.b', need letters"):
        await _join(invitation, "a.b")

    await operator.put(RUN_STATE, RunState(state="failed", reason="it broke"))
    with pytest.raises(UserError, match="run test: it has failed: it broke; start it again"):
        await _join(invitation)
    await operator.put(SETTINGS, SharedSettings(settings='{"newer": {}}', library="9.9.9"))
    with pytest.raises(UserError, match=r"written by areal_async 9\.9\.9, mean nothing to this one"):
        await _join(invitation)
    await operator.delete(SETTINGS)
    with pytest.raises(UserError, match="run test: nothing is known of it at this broker"):
        await _join(invitation)


async def test_a_node_with_other_workflow_files_than_the_runs_is_refused_unless_told_to_go_on(
    operator: Bus, launcher: Launcher, invitation: Invitation, settings: Settings
) -> None:
    workflow = invitation.directory / "sums.py"
    workflow.write_text("async def sums(prompt, policy):\n    return 1.0\n")
    tasks = (TaskSettings(workflow=str(workflow), dataset=DatasetSettings(path="rows.jsonl")),)
    shared = SharedSettings(
        settings=settings.model_copy(update={"tasks": tasks}).model_dump_json(),
        library=areal_async.__version__,
        files=source_hashes([str(workflow)]),
    )
    await operator.put(SETTINGS, shared)
    workflow.write_text("async def sums(prompt, policy):\n    return 2.0\n")

    with pytest.raises(UserError, match=r"run test: got other files here than the run has: .*sums\.py; need the same"):
        await _join(invitation)

    backend, told = Sleepers(), []
    bold = dataclasses.replace(invitation, allows_other_files=True)
    async with anyio.create_task_group() as joining:
        joining.start_soon(functools.partial(_join, bold, backend=backend, told=told))
        await until(lambda: bool(backend.started))
        await operator.put(RUN_STATE, RunState(state="finished"))
    assert told[0].startswith("WARNING: run test: got other files here")


async def test_a_run_of_a_library_that_tells_no_files_is_not_joined_and_its_version_is_named(
    operator: Bus, invitation: Invitation, settings: Settings
) -> None:
    workflow = invitation.directory / "sums.py"
    workflow.write_text("async def sums(prompt, policy):\n    return 1.0\n")
    tasks = (TaskSettings(workflow=str(workflow), dataset=DatasetSettings(path="rows.jsonl")),)
    old = settings.model_copy(update={"tasks": tasks})
    await operator.put(SETTINGS, SharedSettings(settings=old.model_dump_json(), library="0.0.9"))

    with pytest.raises(UserError, match=r"was started by areal_async 0\.0\.9, .*start the run again with this version"):
        await _join(dataclasses.replace(invitation, allows_other_files=True))


async def test_an_invitation_without_credentials_finds_the_key_that_the_run_left_here(
    invitation: Invitation, settings: Settings, tmp_path: Path
) -> None:
    other = dataclasses.replace(invitation, credentials=tmp_path / "mine.nk", ca=tmp_path / "ca.pem")

    assert invitation.key == tmp_path / "test" / "credentials" / "node.nk"
    assert dataclasses.replace(invitation, directory=tmp_path / "elsewhere").key is None
    assert localised(settings, other).bus.credentials == tmp_path / "mine.nk"
    assert localised(settings, other).bus.ca == tmp_path / "ca.pem"
    shared = settings.model_copy(update={"inference": settings.inference.model_copy(update={"colocate": "release"})})
    assert localised(shared, other).inference.colocate is None, "the trainer's GPUs are on the launcher's host"
    assert fresh_node_id() != fresh_node_id()
