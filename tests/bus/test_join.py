"""A node that joins learns the run from its bucket, is refused where it has no place, and ends with the run."""

import dataclasses
from pathlib import Path

import anyio
import pytest

import areal_async
from areal_async.bus import Bus, EmbeddedBroker, Role
from areal_async.errors import UserError
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.join import Invitation, fresh_node_id, join, localised
from areal_async.launch.local import LocalBackend, LocalProcess
from areal_async.launch.run import note_end
from areal_async.launch.run_directory import RunDirectory
from areal_async.launch.supervisor import RunEnd
from areal_async.run_state import Control, CrewState, SharedSettings
from areal_async.settings import Settings
from areal_async.subjects import CONTROL, RUN_STATE, SETTINGS
from areal_async.types import RunState
from tests.brokers import OpenRole, until

pytestmark = pytest.mark.anyio


class Sleepers:
    """Processes of this host that only sleep, whatever they were to do."""

    def __init__(self) -> None:
        self.started: list[ProcessSpec] = []

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        self.started.append(spec)
        return await LocalBackend().start(dataclasses.replace(spec, command=("sleep", "60")))


@pytest.fixture
async def operator(open_role: OpenRole, settings: Settings) -> Bus:
    bus = await open_role(Role.OPERATOR)
    await bus.put(RUN_STATE, RunState())
    shared = SharedSettings(settings=settings.model_dump_json(), library=areal_async.__version__)
    await bus.put(SETTINGS, shared)
    return bus


@pytest.fixture
def invitation(broker: EmbeddedBroker, tmp_path: Path) -> Invitation:
    return Invitation(run="test", url=broker.url, credentials=None, ca=None, directory=tmp_path)


async def _join(invitation: Invitation, node_id: str = "far", backend: Sleepers | None = None) -> RunEnd:
    with anyio.fail_after(15):
        return await join(
            invitation,
            node_id=node_id,
            backend=backend or Sleepers(),
            prepare=lambda settings, _: settings,
            notify=lambda _: None,
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
    operator: Bus, invitation: Invitation, key: str, record: RunState | Control
) -> None:
    backend, ends = Sleepers(), []
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            ends.append(await _join(invitation, backend=backend))

        tasks.start_soon(run)
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


@pytest.mark.parametrize(("before", "after"), [("running", "stopped"), ("failed", "failed"), ("finished", "finished")])
async def test_a_launcher_that_ends_leaves_word_for_joined_nodes_unless_another_has_said_why(
    operator: Bus, before: str, after: str
) -> None:
    await operator.put(RUN_STATE, RunState(state=before, reason="why"))

    await note_end(operator)

    state, _ = await operator.get(RUN_STATE, RunState)
    assert state is not None
    assert state.state == after


async def test_a_node_is_refused_where_it_has_no_place(operator: Bus, invitation: Invitation) -> None:
    await operator.put(operator.names.crew_key("node-far"), CrewState(name="node-far", state="running", num_starts=1))
    with pytest.raises(UserError, match="--node-id: run test has a node far already, need another id"):
        await _join(invitation)
    with pytest.raises(UserError, match="--node-id: run test has a node 0 already, need another id"):
        await _join(invitation, "0")
    with pytest.raises(UserError, match=r"--node-id: got 'a\.b', need letters"):
        await _join(invitation, "a.b")

    await operator.put(RUN_STATE, RunState(state="failed", reason="it broke"))
    with pytest.raises(UserError, match="run test: it has failed; start it again"):
        await _join(invitation)
    await operator.put(SETTINGS, SharedSettings(settings='{"newer": {}}', library="9.9.9"))
    with pytest.raises(UserError, match=r"written by areal_async 9\.9\.9, mean nothing to this one"):
        await _join(invitation)
    await operator.delete(SETTINGS)
    with pytest.raises(UserError, match="run test: nothing is known of it at this broker"):
        await _join(invitation)


async def test_an_invitation_without_credentials_finds_the_key_that_the_run_left_here(
    invitation: Invitation, settings: Settings, tmp_path: Path
) -> None:
    other = dataclasses.replace(invitation, credentials=tmp_path / "mine.nk", ca=tmp_path / "ca.pem")

    assert invitation.key == tmp_path / "test" / "credentials" / "node.nk"
    assert dataclasses.replace(invitation, directory=tmp_path / "elsewhere").key is None
    assert localised(settings, other).bus.credentials == tmp_path / "mine.nk"
    assert localised(settings, other).bus.ca == tmp_path / "ca.pem"
    assert fresh_node_id() != fresh_node_id()
