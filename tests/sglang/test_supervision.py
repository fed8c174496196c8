"""A supervised server never serves weights it does not wholly have, whatever happens to an update or to itself.

Real processes under a real ``Fleet``, one for all tests of a kind of server. Each test begins with one whole server.
"""

import hashlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import pytest
import structlog
import torch
from safetensors.torch import load_file

from areal_async.config.settings import InferenceSettings, ModelSettings, Settings
from areal_async.inference.client import InferenceClient
from areal_async.inference.pool import ServerHandle
from areal_async.inference.supervision.fleet import Fleet
from areal_async.inference.weight_group import GLOO, WeightGroup, describe, flatten
from areal_async.protocol.types import Turn, UpdateGroup, WeightsVersion
from tests.sglang.conftest import find_sglang
from tests.sglang.relay import only_beginnings
from tests.sglang.scoring import assert_scored_by, assert_whole
from tests.unit.inference.embedded_engine import VOCAB_SIZE, prompt_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]  # of which starts take most

LOOPBACK = "127.0.0.1"
NUM_TOKENS = 200
NUM_STREAMS = 3
PARAMS = {"max_new_tokens": NUM_TOKENS, "temperature": 1.0, "ignore_eos": True}
DEADLINE_S = 400.0
LEAST_RUNNING = 8
"""What the server runs at once, and a half of what it is sent at first."""
TRANSFER_DEADLINE_S = 20.0


class State(NamedTuple):
    """One published state of a server."""

    server_id: str
    version: str
    fence: str


class Yard:
    """A fleet with its client, what it published, and the versions that were announced to it."""

    def __init__(self, settings: Settings, folder: Path, models: list[Path]) -> None:
        self.states: list[State] = []
        self.models: dict[str, Path] = {}
        self.pids: dict[str, int] = {}
        self._newest = 0
        self._num_groups = 0
        self._folder = folder
        self._models = models
        self._changed = anyio.Event()
        self.fleet = Fleet(settings, node_id="n0", log_directory=folder / "logs", publish=self._publish)
        self.client = InferenceClient(self.fleet.pool, settings.inference, max_streams=64, vocab_size=VOCAB_SIZE)

    async def _publish(self, server: ServerHandle) -> None:
        self.states.append(State(server.id, server.version, server.fence))
        self._changed.set()
        self._changed = anyio.Event()

    def on_log(self, logger: object, method: str, entry: dict[str, Any]) -> dict[str, Any]:
        """Note the process of every server that starts."""
        if entry["event"] == "server.started":
            self.pids[entry["server_id"]] = entry["pid"]
        return entry

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a published state."""
        with anyio.fail_after(DEADLINE_S):
            while not condition():
                await self._changed.wait()

    async def until_fenced(self, reason: str = "") -> State:
        """Wait until some server is fenced from now on, for this or whatever reason; return that state."""
        start = len(self.states)

        def found() -> list[State]:
            return [state for state in self.states[start:] if state.fence and reason in state.fence]

        await self.until(lambda: bool(found()))
        return found()[0]

    async def until_all_hold(self, version: str) -> list[ServerHandle]:
        """Wait until exactly the wanted servers serve this version."""
        pool = self.fleet.pool
        await self.until(lambda: all(one.version == version and one.is_serviceable for one in pool.servers.values()))
        return list(pool.servers.values())

    def next_version(self, model: int) -> tuple[str, Path]:
        """Name the next version; it has the weights of one of the models."""
        self._newest += 1
        version = f"1-{self._newest}"
        self.models[version] = self._models[model]
        return version, self._models[model]

    def announce(self, model: int, **tensors_sha256: str) -> str:
        """Announce a whole version on disk."""
        version, path = self.next_version(model)
        hashes = tensors_sha256 or tensor_hashes(path)
        self.fleet.target.announce(WeightsVersion(version=version, path=str(path), tensors_sha256=hashes))
        return version

    def announce_torn(self, model: int) -> str:
        """Announce a version whose file lacks its end, which no hash gives away."""
        version, path = self.next_version(model)
        torn = shutil.copytree(path, self._folder / version)
        file = torn / "model.safetensors"
        os.truncate(file, file.stat().st_size * 2 // 3)
        self.fleet.target.announce(WeightsVersion(version=version, path=str(torn)))
        return version

    async def broadcast(self, model: int, *, num_buckets_sent: int) -> str:
        """Be a trainer that broadcasts a version in two buckets, or stops after the first."""
        version, path = self.next_version(model)
        tensors = list(load_file(path / "model.safetensors").items())
        half = len(tensors) // 2
        parts = [tensors[:half], tensors[half:]]
        self._num_groups += 1
        group = WeightGroup.host(
            address=LOOPBACK, size=2, name=f"run-1-{self._num_groups}", backend=GLOO, deadline_s=TRANSFER_DEADLINE_S
        )
        where = UpdateGroup(
            name=group.name, address=LOOPBACK, port=group.port, backend=GLOO, size=2, ranks={"n0-0": 1},
            incarnations={"n0-0": self.fleet.pool.servers["n0-0"].incarnation},
        )  # fmt: skip
        buckets = [[describe(name, tensor) for name, tensor in part] for part in parts]

        def send() -> None:
            with closing(group):
                group.meet()
                for part in parts[:num_buckets_sent]:
                    group.broadcast(flatten(tensor for _, tensor in part))

        self.fleet.target.announce(WeightsVersion(version=version, kind="distributed", group=where, buckets=buckets))
        await anyio.to_thread.run_sync(send)
        return version

    async def generate_while(
        self, event: Callable[[], Any], *, num_received: int = 20 * NUM_STREAMS
    ) -> list[tuple[list[int], Turn]]:
        """Stream several answers, have ``event`` happen in their midst; return prompts and turns."""
        answers: list[tuple[list[int], Turn]] = []
        pool, before = self.fleet.pool, self.fleet.pool.num_generated_tokens
        first = pool.servers["n0-0"]

        async def generate(prompt: list[int]) -> None:
            turn, _ = await self.client.generate(prompt, PARAMS, preferred=first)
            answers.append((prompt, turn))

        with anyio.fail_after(DEADLINE_S):
            async with anyio.create_task_group() as tasks:
                for index in range(NUM_STREAMS):
                    tasks.start_soon(generate, prompt_of(8 + index, seed=index))
                while pool.num_generated_tokens < before + num_received:  # noqa: ASYNC110 -- a counter has no event
                    await anyio.sleep(0.01)
                await event()
        assert len(answers) == NUM_STREAMS
        return answers

    def assert_answers(self, answers: list[tuple[list[int], Turn]], *versions: str) -> None:
        """Every token is there once, of one of these versions, and scored by its model."""
        for prompt, turn in answers:
            assert_whole(turn, NUM_TOKENS)
            assert {span.version for span in turn.spans} <= set(versions)
            for span in turn.spans:
                assert_scored_by(self.models[span.version], prompt, turn, span.start, span.end)

    async def assert_serves(self, version: str) -> None:
        """A new answer is this version's, and its model's."""
        prompt = prompt_of(12, seed=9)
        turn, _ = await self.client.generate(prompt, {**PARAMS, "max_new_tokens": 30})
        assert [span.version for span in turn.spans] == [version]
        assert_scored_by(self.models[version], prompt, turn)


def tensor_hashes(model: Path) -> dict[str, str]:
    """Return what a trainer announces of a model's tensors."""
    return {
        name: hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().data).hexdigest()
        for name, tensor in load_file(model / "model.safetensors").items()
        if "norm" in name or "down_proj" in name
    }


@contextmanager
def watching_log(yard: Yard) -> Iterator[None]:
    before = structlog.get_config()["processors"]
    structlog.configure(processors=[yard.on_log, *before])
    yield
    structlog.configure(processors=before)


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
async def shared_yard(
    request: pytest.FixtureRequest, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Yard]:
    settings = Settings(
        model=ModelSettings(path=str(models[0]), dtype="float32"),
        inference=InferenceSettings(
            backend=request.param,
            python=find_sglang() if request.param == "sglang" else None,
            stream_interval=1,
            transfer_deadline_s=TRANSFER_DEADLINE_S,
            weight_transfer="distributed",
            max_running_requests=2 * LEAST_RUNNING,
            flags=("--max-running-requests", str(LEAST_RUNNING)),
        ),
    )
    yard = Yard(settings, tmp_path_factory.mktemp("yard"), models)
    with watching_log(yard):
        async with yard.client, anyio.create_task_group() as tasks:
            tasks.start_soon(yard.fleet.run)
            yield yard
            tasks.cancel_scope.cancel()


@pytest.fixture
async def yard(shared_yard: Yard) -> Yard:
    """The shared fleet: one server that runs a version of the first model's."""
    shared_yard.fleet.resize([0])
    await shared_yard.until(lambda: list(shared_yard.fleet.pool.servers) == ["n0-0"])
    await shared_yard.until_all_hold(shared_yard.announce(0))
    return shared_yard


async def test_broadcast_that_stops_half_way_is_never_served_and_the_next_one_is(yard: Yard) -> None:
    old = yard.fleet.pool.servers["n0-0"].version
    url = yard.fleet.pool.servers["n0-0"].url
    broken: list[str] = []
    copies: list[str] = []

    async def break_off() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(yard.until_fenced, "update to 1-")
            broken.append(await yard.broadcast(1, num_buckets_sent=1))
        copies.append(yard.announce(0))

    answers = await yard.generate_while(break_off)
    (copy,) = copies
    await yard.until_all_hold(copy)

    yard.assert_answers(answers, old, copy)
    await yard.assert_serves(copy)
    new = await yard.broadcast(1, num_buckets_sent=2)
    (server,) = await yard.until_all_hold(new)
    await yard.assert_serves(new)
    assert server.url == url, "it was repaired in place: a new start takes another port"
    assert broken[0] not in [state.version for state in yard.states]


async def test_torn_file_is_never_served_and_the_next_version_is(yard: Yard) -> None:
    old = yard.fleet.pool.servers["n0-0"].version
    versions: list[str] = []

    async def tear_and_mend() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(yard.until_fenced)
            versions.append(yard.announce_torn(1))
        versions.append(yard.announce(1))

    answers = await yard.generate_while(tear_and_mend)
    torn, good = versions
    await yard.until_all_hold(good)

    yard.assert_answers(answers, old, good)
    await yard.assert_serves(good)
    assert torn not in [state.version for state in yard.states]


async def test_server_whose_tensors_are_not_the_announced_ones_is_not_taken_back(yard: Yard) -> None:
    """A swap is believed, its files were checked; whoever comes back from a repair has to prove what it runs."""
    name = "model.norm.weight"
    wrong = ""

    async with anyio.create_task_group() as tasks:
        refused: list[State] = []

        async def note() -> None:
            refused.append(await yard.until_fenced(f"weights {wrong}: tensor {name} has checksum"))

        async with anyio.create_task_group() as breaking:
            breaking.start_soon(yard.until_fenced, "update to 1-")
            await yard.broadcast(0, num_buckets_sent=1)
        wrong = yard.announce(1, **{name: "0" * 64})
        tasks.start_soon(note)
    good = yard.announce(0)
    await yard.until_all_hold(good)

    await yard.assert_serves(good)
    since = yard.states[yard.states.index(refused[0]) :]
    assert [state.version for state in since if state.version] == [good]


async def test_streams_of_a_killed_server_go_on_at_the_other_and_it_comes_back(yard: Yard) -> None:
    version = yard.fleet.pool.servers["n0-0"].version
    yard.fleet.resize(range(2))
    await yard.until(lambda: len(yard.fleet.pool.servers) == 2)
    first, second = await yard.until_all_hold(version)
    incarnation, before = first.incarnation, second.num_generated_tokens

    async def kill() -> None:
        os.kill(yard.pids[first.id], signal.SIGKILL)

    async with only_beginnings(first.url) as first.url:  # a server that comes back has another address
        answers = await yard.generate_while(kill, num_received=NUM_STREAMS)
    assert second.num_generated_tokens > before
    await yard.until(lambda: first.incarnation != incarnation)
    await yard.until_all_hold(version)

    yard.assert_answers(answers, version)
    await yard.assert_serves(version)


async def test_server_that_queues_is_sent_fewer_requests_until_it_does_so_no_more(yard: Yard) -> None:
    version = yard.fleet.pool.servers["n0-0"].version
    (server,) = await yard.until_all_hold(version)
    first = server.limit
    answers: list[tuple[list[int], Turn]] = []

    async def keep_asking(index: int) -> None:
        while server.limit > LEAST_RUNNING + 1:  # one may wait, to be at hand
            prompt = prompt_of(8 + index, seed=index)
            turn, _ = await yard.client.generate(prompt, PARAMS)
            answers.append((prompt, turn))

    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            for index in range(3 * LEAST_RUNNING):
                tasks.start_soon(keep_asking, index)

    assert first == 2 * LEAST_RUNNING
    assert server.limit >= LEAST_RUNNING - 1
    yard.assert_answers(answers[-2 * LEAST_RUNNING :], version)
