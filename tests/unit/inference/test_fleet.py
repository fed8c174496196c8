"""Servers join and leave while the node runs, and may die as often as they like, as long as they serve between."""

import json
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from structlog.testing import capture_logs

from areal_async.config.settings import InferenceSettings, ModelSettings, Settings
from areal_async.errors import PipelineError, leaves_of
from areal_async.inference.client import InferenceClient
from areal_async.inference.pool import ServerHandle
from areal_async.inference.supervision.fleet import Fleet
from areal_async.inference.supervision.supervisor import MAX_RESTARTS
from areal_async.protocol.types import Turn, WeightsVersion

pytestmark = pytest.mark.anyio

TESTS = Path(__file__).parents[2]
PARAMS = {"max_new_tokens": 12, "stop_token_ids": [2]}
ANSWER = [*range(5, 16), 2]
"""What a fake answers, whole."""


class Yard:
    """A fleet of fake servers, and the states that it published."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self.states: dict[str, list[str]] = {}
        self._changed = anyio.Event()
        self.fleet = Fleet(settings, node_id="n0", log_directory=directory, publish=self._publish)
        self.fleet.target.announce(WeightsVersion(version="1-0", path="/w"))
        self.pool = self.fleet.pool

    async def _publish(self, server: ServerHandle) -> None:
        self.states.setdefault(server.id, []).append(server.fence or server.version)
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a published state."""
        while not condition():
            await self._changed.wait()

    async def until_started(self, num_starts: int) -> None:
        """Wait until the first server was started so often."""
        await self.until(lambda: self.states["n0-0"].count("starting") == num_starts)

    async def serving(self, *server_ids: str) -> list[ServerHandle]:
        """Wait until exactly these serve."""

        def serves() -> bool:
            return [one.id for one in self.pool.servers.values() if one.is_serviceable] == list(server_ids)

        await self.until(lambda: serves() and len(self.pool.servers) == len(server_ids))
        return list(self.pool.servers.values())


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("PYTHONPATH", f"{TESTS / 'fakes'}:{TESTS.parent}")
    inference = InferenceSettings(backend="sglang", python=Path(sys.executable), start_deadline_s=100)
    return Settings(model=ModelSettings(path="/", dtype="float32"), inference=inference)


@asynccontextmanager
async def yard_of(settings: Settings, directory: Path) -> AsyncIterator[tuple[Yard, InferenceClient]]:
    yard = Yard(settings, directory)
    async with InferenceClient(yard.pool, settings.inference, max_streams=16, vocab_size=1 << 20) as client:
        with anyio.fail_after(110):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(yard.fleet.run)
                yield yard, client
                tasks.cancel_scope.cancel()


async def tell(server: ServerHandle, route: str) -> dict[str, Any]:
    """Call a route of a fake; one that ends itself gives no answer."""

    def post() -> dict[str, Any]:
        request = urllib.request.Request(f"{server.url}{route}", data=b"{}")
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    return await anyio.to_thread.run_sync(post)


async def kill(server: ServerHandle) -> None:
    with pytest.raises(OSError, match=r".*"):
        await tell(server, "/exit")


async def test_servers_join_and_leave_with_the_number_that_is_wanted(settings: Settings, tmp_path: Path) -> None:
    async with yard_of(settings, tmp_path) as (yard, _):
        (first,) = await yard.serving("n0-0")
        yard.fleet.resize(range(3))
        _, second, third = await yard.serving("n0-0", "n0-1", "n0-2")
        yard.fleet.resize([0])
        await yard.until(lambda: list(yard.pool.servers) == ["n0-0"])
        yard.fleet.resize(range(2))
        kept, again = await yard.serving("n0-0", "n0-1")

        assert kept is first, "nobody touches the servers that stay"
        assert again.incarnation != second.incarnation
        assert (second.fence, third.fence) == ("left", "left")
        for gone in (second, third):
            with pytest.raises(OSError, match="refused"):
                await tell(gone, "/model_info")

    assert yard.states["n0-2"] == ["starting", "1-0", "left"]
    assert yard.states["n0-1"] == ["starting", "1-0", "left", "starting", "1-0"]


async def test_server_may_leave_while_it_starts(settings: Settings, tmp_path: Path) -> None:
    async with yard_of(settings, tmp_path) as (yard, _):
        yard.fleet.resize(range(2))
        await yard.until(lambda: "n0-1" in yard.states)
        yard.fleet.resize([0])
        await yard.serving("n0-0")

    assert yard.states["n0-1"] == ["starting", "left"]


async def test_requests_of_a_server_that_leaves_go_on_elsewhere_from_what_was_received(
    settings: Settings, tmp_path: Path
) -> None:
    async with yard_of(settings, tmp_path) as (yard, client):
        yard.fleet.resize(range(2))
        await yard.serving("n0-0", "n0-1")
        leaving = yard.pool.servers["n0-1"]
        await tell(leaving, "/hold")
        answers: list[tuple[Turn, ServerHandle]] = []

        async def generate() -> None:
            answers.append(await client.generate([1], PARAMS, preferred=leaving))

        with capture_logs() as entries:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generate)
                while not (await tell(leaving, "/model_info"))["sampling_params"]:
                    pass
                yard.fleet.resize([0])

        assert "stream.broken" not in [entry["event"] for entry in entries], "it was ended, not broken off"
        ((turn, server),) = answers
        assert (turn.output_ids, server.id) == (ANSWER, "n0-0")
        assert not server.doubt
        assert (leaving.num_requests, leaving.doubt) == (0, "")


async def test_server_that_serves_may_be_killed_more_often_than_one_that_does_not(
    settings: Settings, tmp_path: Path
) -> None:
    async with yard_of(settings, tmp_path) as (yard, client):
        for num_kills in range(MAX_RESTARTS + 2):
            (server,) = await yard.serving("n0-0")
            turn, _ = await client.generate([1], PARAMS)
            assert turn.output_ids == ANSWER
            await kill(server)
            await yard.until_started(num_kills + 2)
        await yard.serving("n0-0")


async def test_server_that_hangs_while_it_says_it_is_healthy_is_fenced_killed_and_started_again(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one silent stream, for others would wait as long; it goes on where it was."""
    monkeypatch.setattr("areal_async.inference.servers.STOP_DEADLINE_S", 0.1)
    inference = settings.inference.model_copy(update={"between_tokens_deadline_s": 1.0})
    async with yard_of(settings.model_copy(update={"inference": inference}), tmp_path) as (yard, client):
        (server,) = await yard.serving("n0-0")
        hung = server.url
        await tell(server, "/hang")

        turn, server = await client.generate([1], PARAMS)

        assert turn.output_ids == [*ANSWER[:8], *ANSWER[:3], 2], "the next one begins its count anew"
        assert server.url != hung
        assert not server.is_silent
        with pytest.raises(OSError, match="refused"):
            await anyio.to_thread.run_sync(lambda: urllib.request.urlopen(f"{hung}/health", timeout=60))

    reason = "says that it is healthy, and has given nobody a token: TimeoutError: no event for 1 s"
    assert list(dict.fromkeys(yard.states["n0-0"])) == ["starting", "1-0", reason]
    assert yard.states["n0-0"].count("starting") == 2


async def test_server_that_is_killed_in_the_middle_of_an_update_is_said_to_have_been_killed(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.inference.supervision.supervisor.DYING_S", 100.0)  # on however busy a machine
    async with yard_of(settings, tmp_path) as (yard, _):
        (server,) = await yard.serving("n0-0")
        await tell(server, "/fall")
        yard.fleet.target.announce(WeightsVersion(version="1-1", path="/w"))
        await yard.until_started(2)

        (server,) = await yard.serving("n0-0")

    assert server.failure == "ended by SIGKILL"
    first, *_, last = yard.states["n0-0"][yard.states["n0-0"].index("1-0") + 1 : -2]
    assert first.startswith("update to 1-1 failed: /update_weights_from_disk: "), "as soon as that is known"
    assert last == "ended by SIGKILL"


async def test_server_that_dies_before_it_generates_anything_is_given_up_with_its_cause(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.inference.supervision.supervisor.FIRST_BACKOFF_S", 0.001)

    async def kill_again_and_again() -> None:
        async with yard_of(settings, tmp_path) as (yard, client):
            states.append(yard.states)
            await yard.serving("n0-0")
            await client.generate([1], PARAMS)
            for num_kills in range(10):
                (server,) = await yard.serving("n0-0")
                await kill(server)
                await yard.until_started(num_kills + 2)

    states: list[dict[str, list[str]]] = []
    with pytest.raises(ExceptionGroup) as caught:
        await kill_again_and_again()

    (cause,) = leaves_of(caught.value)
    assert isinstance(cause, PipelineError)
    assert "server n0-0: failed 6 times in a row before it generated a token, last: ended with status 3" in str(cause)
    assert states[0]["n0-0"].count("starting") == 7, "the one that had served is not counted"
