"""A server follows what is announced; one whose update fails makes no token before it is restored and verified."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from anyio import wait_all_tasks_blocked

from areal_async.config.settings import InferenceSettings
from areal_async.inference.http import ServerApi, make_client
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.inference.supervision.updates import FleetContext, Updater
from areal_async.inference.supervision.verify import Verifier
from areal_async.protocol.types import TensorSpec, UpdateGroup, WeightsVersion
from tests.fakes.fake_sglang import FakeSglang

pytestmark = pytest.mark.anyio

HASH = hashlib.sha256(b"norm").hexdigest()
BUCKETS = [[TensorSpec(name=name, dtype="float32", shape=[1])] for name in "ab"]
RESTORED = ["/pause_generation", "/update_weights_from_disk", "/model_info", "/continue_generation"]
RECEIVE = "/update_weights_from_distributed"


class Scene:
    """One fake server, the updater that looks after it, and what became public of it."""

    def __init__(self, fake: FakeSglang, around: FleetContext, updater: Updater) -> None:
        self.fake, self.around, self.updater = fake, around, updater
        (self.server,) = around.pool.servers.values()
        self.states: list[tuple[str, str]] = []
        self.reasons: list[str] = []
        self.given_up = anyio.Event()
        self._changed = anyio.Event()

    async def publish(self, server: ServerHandle) -> None:
        self.states.append((server.version, server.fence))
        self._changed.set()
        self._changed = anyio.Event()

    def announce(self, version: WeightsVersion) -> None:
        self.around.target.announce(version)

    async def until(self, version: str, *, num_states: int = 0) -> None:
        """Wait until it is known to hold a version, and at least that many states were published."""
        while self.server.version != version or len(self.states) < num_states:
            await self._changed.wait()

    async def until_waiting(self) -> None:
        """Wait until it has said that it waits for weights."""
        while not self.server.wants_weights:
            await self._changed.wait()

    @property
    def routes(self) -> list[str]:
        """What the server was told since this was last asked."""
        routes = [route for route, _ in self.fake.calls]
        self.fake.calls.clear()
        return routes


@asynccontextmanager
async def scene_of(
    fake: FakeSglang, *, transfer_deadline_s: float = 0.5, start_deadline_s: float = 60
) -> AsyncIterator[Scene]:
    scenes: list[Scene] = []
    around = FleetContext(
        settings=InferenceSettings(transfer_deadline_s=transfer_deadline_s, start_deadline_s=start_deadline_s),
        pool=ServerPool(["s0"], deadline_s=60),
        verifier=Verifier(has_sha256=True),
        publish=lambda server: scenes[0].publish(server),
    )
    async with fake, make_client(max_connections=4) as http, anyio.create_task_group() as tasks:
        api = ServerApi(http, fake.url)
        around.pool.servers["s0"].incarnation = "first"
        updater = Updater(around.pool.servers["s0"], api, around)
        scene = Scene(fake, around, updater)
        scenes.append(scene)

        async def run() -> None:
            scene.reasons.append(await updater.run())
            scene.given_up.set()

        tasks.start_soon(run)
        with anyio.fail_after(60):
            yield scene
        tasks.cancel_scope.cancel()


def on_disk(version: str, path: str = "/w", **hashes: dict[str, str]) -> WeightsVersion:
    return WeightsVersion(version=version, path=path, **hashes)


def broadcast(
    version: str, fake: FakeSglang, *, name: str = "g1", member: str = "s0", incarnation: str = "first"
) -> WeightsVersion:
    """A broadcast whose store is said to be where the fake listens: somebody is there."""
    port = int(fake.url.rsplit(":", 1)[1])
    group = UpdateGroup(
        name=name, address="127.0.0.1", port=port, backend="gloo", size=2, ranks={member: 1},
        incarnations={member: incarnation},
    )  # fmt: skip
    return WeightsVersion(version=version, kind="distributed", group=group, buckets=BUCKETS)


async def test_server_that_has_started_is_admitted_with_the_newest_version_once_that_is_verified() -> None:
    fake = FakeSglang(version="0-0")
    fake.checksums = {"model.norm.weight": HASH[:16]}
    async with scene_of(fake) as scene:
        scene.announce(on_disk("1-5", tensors_sha256={"model.norm.weight": HASH}))
        await scene.until("1-5")

        assert scene.routes == [*RESTORED[:3], "/weights_checker", RESTORED[3]]
        assert scene.states == [("1-5", "")]
        scene.announce(on_disk("1-6", tensors_sha256={"model.norm.weight": HASH}))
        await scene.until("1-6")
        assert "/weights_checker" not in scene.routes, "only who was fenced has to prove what it runs"
        assert scene.server.num_swaps == 2
        assert scene.server.swap_total_s > 0


async def test_server_with_other_tensors_than_announced_is_not_admitted_and_the_reason_says_so() -> None:
    fake = FakeSglang(version="0-0")
    fake.checksums = {"model.norm.weight": "0123456789abcdef"}
    async with scene_of(fake) as scene:
        scene.announce(on_disk("1-5", tensors_sha256={"model.norm.weight": HASH}))
        await scene.given_up.wait()

    assert scene.reasons == [f"weights 1-5: tensor model.norm.weight has checksum '0123456789abcdef', need {HASH}"]
    assert (scene.states, fake.is_paused) == ([], True)


async def test_member_joins_before_it_pauses_and_stays_in_the_group() -> None:
    fake = FakeSglang()
    async with scene_of(fake) as scene:
        scene.announce(on_disk("1-0"))
        await scene.until("1-0")
        assert scene.routes == RESTORED
        received = ["/pause_generation", "/begin_weight_update", RECEIVE, RECEIVE, "/end_weight_update"]
        received += ["/model_info", "/continue_generation"]
        scene.announce(broadcast("1-1", fake))
        await scene.until("1-1")
        assert scene.routes == ["/init_weights_update_group", *received]
        scene.announce(broadcast("1-2", fake))
        await scene.until("1-2")
        assert scene.routes == received
        scene.announce(broadcast("1-3", fake, name="g2"))
        await scene.until("1-3")
        assert scene.routes == ["/destroy_weights_update_group", "/init_weights_update_group", *received]


@pytest.mark.parametrize(("member", "incarnation"), [("s1", "first"), ("s0", "zeroth")])
async def test_server_that_a_broadcast_does_not_wait_for_waits_for_the_copy_on_disk(
    member: str, incarnation: str
) -> None:
    """Neither a stranger to the group, nor a new process of a member: its place in the group died with the old one."""
    fake = FakeSglang()
    async with scene_of(fake) as scene:
        scene.announce(on_disk("1-0"))
        await scene.until("1-0")
        assert scene.routes == RESTORED
        scene.announce(broadcast("1-1", fake, member=member, incarnation=incarnation))
        await wait_all_tasks_blocked()
        assert scene.routes == []
        scene.announce(on_disk("1-1"))
        await scene.until("1-1")

    assert scene.states == [("1-0", ""), ("1-1", "")]


async def test_server_whose_broadcast_breaks_is_fenced_and_continued_only_with_the_whole_of_the_newest() -> None:
    fake = FakeSglang()
    async with scene_of(fake) as scene:
        scene.announce(on_disk("1-0"))
        await scene.until("1-0")
        fake.calls.clear()
        fake.failing[RECEIVE] = (400, {"success": False, "message": "Failed to receive weights"})
        scene.announce(broadcast("1-1", fake))
        await scene.until_waiting()

        why = f"update to 1-1 failed: {RECEIVE}: status 400: Failed to receive weights"
        assert scene.states[1:] == [("", why), ("", why)]
        assert (scene.server.wants_weights, fake.is_paused) == (True, True)
        assert scene.routes == [
            "/init_weights_update_group", "/pause_generation", "/begin_weight_update",
            "/abort_request", "/end_weight_update", "/destroy_weights_update_group",
        ]  # fmt: skip
        scene.announce(on_disk("1-1"))
        await scene.until("1-1")
        assert scene.routes == RESTORED
        assert (scene.reasons, scene.server.wants_weights) == ([], False)


async def test_server_whose_sender_is_replaced_in_mid_broadcast_takes_weights_of_the_newer_one_alone() -> None:
    fake = FakeSglang()
    async with scene_of(fake, transfer_deadline_s=50.0) as scene:
        scene.announce(on_disk("1-0"))
        await scene.until("1-0")
        fake.calls.clear()
        fake.silent.add(RECEIVE)
        sent = broadcast("1-1", fake)
        scene.announce(sent)
        await fake.wait_called("/begin_weight_update")
        scene.announce(msgspec.structs.replace(sent, kind="disk", group=None, taken_by=2))
        await scene.until_waiting()

        why = "update to 1-1 failed: another trainer has taken over from the one that sends it"
        assert scene.states[1] == ("", why)
        assert fake.is_paused
        scene.announce(on_disk("2-1"))
        await scene.until("2-1")
        assert [version for version, _ in scene.states if version] == ["1-0", "2-1"]


async def test_server_without_a_version_waits_for_the_newest_and_serves_no_older_one() -> None:
    """One that has joined counts for nobody before it holds what the others do."""
    fake = FakeSglang()
    async with scene_of(fake) as scene:
        scene.announce(on_disk("1-0"))
        scene.announce(broadcast("1-1", fake, member="s1"))
        await scene.until_waiting()
        await wait_all_tasks_blocked()
        assert (scene.routes, scene.server.fence) == ([], "starting")

        scene.announce(on_disk("1-2"))
        await scene.until("1-2")

    assert scene.states == [("", "starting"), ("", "starting"), ("1-2", "")], "it waits, it loads, it serves"


async def test_server_that_cannot_read_the_files_receives_all_of_a_broadcast_and_proves_it(tmp_path: Path) -> None:
    fake = FakeSglang()
    fake.checksums = {"model.norm.weight": HASH[:16]}
    unseen = on_disk(
        "1-1", str(tmp_path), sha256={"model.safetensors": HASH}, tensors_sha256={"model.norm.weight": HASH}
    )
    async with scene_of(fake) as scene:
        scene.announce(unseen)
        await scene.until_waiting()
        sent = broadcast("1-1", fake)
        scene.announce(msgspec.structs.replace(unseen, kind=sent.kind, group=sent.group, buckets=sent.buckets))
        await scene.until("1-1")

        assert "/weights_checker" in scene.routes
    assert (scene.server.unreadable, scene.server.wants_weights) == ("", False)


async def test_server_without_a_version_whose_broadcast_breaks_waits_for_the_next_one() -> None:
    """It is no reason to start it again, which ends a node that has to do so a few times in a row."""
    fake = FakeSglang()
    async with scene_of(fake) as scene:
        fake.failing[RECEIVE] = (400, {"success": False, "message": "Failed to receive weights"})
        scene.announce(broadcast("1-1", fake))
        await scene.until("", num_states=3)
        assert scene.server.wants_weights
        assert "/destroy_weights_update_group" in scene.routes
        assert scene.server.failure.startswith("update to 1-1 failed: ")
        assert (scene.server.incarnation != "first", fake.is_paused) == (True, True)
        fake.failing.clear()
        scene.announce(broadcast("1-2", fake, name="g2", incarnation=scene.server.incarnation))
        await scene.until("1-2")

    assert scene.reasons == []


async def test_broadcast_whose_trainer_is_gone_is_missed_without_a_pause() -> None:
    fake, gone = FakeSglang(), FakeSglang()
    async with gone:
        missed = broadcast("1-1", gone)
    async with scene_of(fake) as scene:
        scene.announce(on_disk("1-0"))
        await scene.until("1-0")
        fake.calls.clear()
        scene.announce(missed)
        await fake.wait_called("/health")
        await wait_all_tasks_blocked()
        assert scene.routes == ["/health"]
        assert (scene.server.version, scene.server.is_serviceable) == ("1-0", True)
        assert scene.states == [("1-0", ""), ("1-0", "")], "it says that it has missed it"
        assert scene.server.missed.startswith("g1: nobody at 127.0.0.1:")
        scene.announce(broadcast("1-1", fake, name="g2"))
        await wait_all_tasks_blocked()
        assert scene.routes == [], "nobody waits for it any more"
        scene.announce(broadcast("1-1", fake, name="g3", incarnation=scene.server.incarnation))
        await scene.until("1-1")
        assert scene.server.missed == ""


async def test_server_that_answers_nothing_any_more_is_given_up_with_both_causes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("areal_async.inference.supervision.swap.ABANDON_DEADLINE_S", 0.1)
    fake = FakeSglang()
    async with scene_of(fake) as scene:
        scene.announce(on_disk("1-0"))
        await scene.until("1-0")
        fake.silent |= {RECEIVE, "/end_weight_update"}
        scene.announce(broadcast("1-1", fake))
        await scene.given_up.wait()

    assert "not over within inference.transfer_deadline_s" in scene.reasons[0]
    assert "cannot be repaired in place: /end_weight_update: " in scene.reasons[0]
    assert (scene.server.version, fake.is_paused) == ("", True)


async def test_server_that_does_not_answer_an_update_from_disk_is_not_asked_for_it_again() -> None:
    """One that answers every other order would be asked for the same again, and be waited for as long."""
    fake = FakeSglang()
    async with scene_of(fake, start_deadline_s=1.0) as scene:
        scene.announce(on_disk("1-0"))
        await scene.until("1-0")
        assert scene.routes == RESTORED
        fake.silent.add("/update_weights_from_disk")
        scene.announce(on_disk("1-1"))
        await scene.given_up.wait()

    assert scene.reasons[0].startswith("weights 1-1: /update_weights_from_disk: ")
    assert scene.server.fence.startswith("update to 1-1 failed: /update_weights_from_disk: ")
    assert scene.routes == ["/pause_generation"], "what is not answered is not noted"
    assert (scene.server.version, fake.is_paused) == ("", True)


async def test_file_that_is_damaged_after_it_was_checked_is_read_again_before_it_is_loaded_again(
    tmp_path: Path,
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"whole")
    announced = on_disk("1-1", str(tmp_path), sha256={file.name: hashlib.sha256(b"whole").hexdigest()})
    fake = FakeSglang()
    async with scene_of(fake) as scene:
        scene.announce(on_disk("1-0"))
        await scene.until("1-0")
        await scene.around.staging.stage(announced)
        file.write_bytes(b"who")
        fake.failing["/update_weights_from_disk"] = (400, {"success": False, "message": "torn"})
        scene.announce(announced)
        await scene.until("", num_states=2)
        fake.failing.clear()
        await scene.until("", num_states=3)
        assert scene.server.fence == "update to 1-1 failed: /update_weights_from_disk: status 400: torn"
        assert (fake.is_paused, scene.reasons) == (True, [])
        assert f"{file} has hash" in scene.server.unreadable
        scene.announce(on_disk("1-2"))
        await scene.until("1-2")

    assert scene.server.unreadable == ""
    assert [state for state, _ in scene.states] == ["1-0", "", "", "1-2"], "fenced, then without files to load"
