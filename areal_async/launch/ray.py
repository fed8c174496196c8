"""Processes on hosts of a Ray cluster: a placement group with a bundle for each, and in every bundle an actor.

    ray job submit -- python -m areal_async run FILE.py --launch.backend ray --launch.num_hosts 4

The actor holds an agent, as the far end of ``launch.hosts`` does. Ray restarts none: the run is supervised already. A
bundle whose host is lost gets another one from Ray where there is room, and is the same host to the run: ``bundle-0``.
Actors and placement group end with the launcher, however that ends: Ray ends what a driver made.
"""

import logging
import math
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_async.config.launch import LaunchSettings
from areal_async.errors import UserError
from areal_async.launch.agent import VISIBLE, AgentServer
from areal_async.launch.backend import Process, ProcessSpec
from areal_async.launch.remote import FAREWELL_S, AgentLostError, AgentsBackend
from areal_async.process.host import LOOPBACK, visible_gpus
from areal_async.process.plain_text import escaped

ROOM_S = 5.0
"""For a cluster with room to place the bundles."""
ACTOR_S = 60.0
"""For an actor to come up in its bundle."""
ANSWER_S = 10.0
"""For the head of a cluster to take a connection."""
CALL_S = 30.0
"""For the head of a cluster to answer; Ray's own calls wait for as long as it is away."""
STORE_BYTES = 80 << 20
"""Of a cluster that is started here: nothing but lines goes through Ray, and its least is 75 MB."""
MAX_SENTENCE = 300
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Nothing is reported; and an actor without GPUs is not warned of."""

T = TypeVar("T")


class RayAgent:
    """An actor that is the agent of its host."""

    def __init__(self) -> None:
        self._send, self._orders = anyio.create_memory_object_stream[bytes](math.inf)
        self._told, self._news = anyio.create_memory_object_stream[bytes](math.inf)

    def place(self) -> tuple[str, list[str]]:
        """Return the address of this host, and the GPUs that Ray gives."""
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        os.environ[VISIBLE] = ",".join(gpus)  # without any Ray leaves the host's
        return ray.util.get_node_ip_address(), gpus

    async def run(self) -> None:
        """Obey until the launcher closes, or is silent."""
        with self._told, self._orders:
            await AgentServer(self._orders, self._told.send_nowait).run()

    async def order(self, line: bytes) -> None:
        """Take an order."""
        self._send.send_nowait(line)

    async def news(self) -> list[bytes]:
        """Wait for news, and return all there are."""
        news = [await self._news.receive()]
        with suppress(anyio.WouldBlock):
            while True:
                news.append(self._news.receive_nowait())
        return news

    async def close(self) -> None:
        """Let ``run`` end."""
        self._send.close()


class _Calls:
    """An actor's methods, as a way to its agent."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._run = actor.run.remote()
        self._news: list[bytes] = []

    async def send(self, line: bytes) -> None:
        try:
            await self._actor.order.remote(line)
        except RayError as exc:
            raise AgentLostError(sentence_of(exc)) from exc

    async def receive(self) -> bytes:
        try:
            if not self._news:
                self._news = await self._actor.news.remote()
        except RayError as exc:
            raise AgentLostError(await self._why(exc)) from exc
        return self._news.pop(0)

    async def _why(self, error: RayError) -> str:
        """Return why there are no news: what the agent failed with says more than that it has none."""
        try:
            with anyio.move_on_after(FAREWELL_S):
                await self._run
                return "its agent has ended"
        except RayError as exc:
            error = exc
        return sentence_of(error)

    async def aclose(self) -> None:
        """Have the agent end all that it started, then the actor."""
        with anyio.move_on_after(FAREWELL_S), suppress(RayError):
            await self._actor.close.remote()
            await self._run


class RayBackend(AgentsBackend):
    """Starts processes on hosts of a Ray cluster: that of ``RAY_ADDRESS``, one that runs here, or else one of its own.

    The launcher's host need not have one of the bundles: the controller and the broker are there.
    """

    def __init__(self, launch: LaunchSettings) -> None:
        """Connect.

        Raises:
            UserError: there is no cluster where one is said to be, or this host is none of it.
        """
        super().__init__([f"bundle-{index}" for index in range(launch.num_hosts)])
        self.workers = self.hosts[1:]
        self.addresses: dict[str, str] = {}
        is_own = _connect(launch.cpus_per_host)
        nodes = _nodes()
        most = max((int(node["Resources"].get("GPU", 0)) for node in nodes), default=0)
        num_gpus = launch.gpus_per_host if launch.gpus_per_host is not None else most
        self.gpus = tuple(map(str, range(num_gpus)))
        self._bundle = {"CPU": float(launch.cpus_per_host), **({"GPU": float(num_gpus)} if num_gpus else {})}
        self._given: dict[str, Sequence[str]] = {}
        """GPUs of each worker, as that host counts them."""
        self._group: PlacementGroup | None = None
        self._threads = anyio.CapacityLimiter(2 * len(self.workers))
        """Those that may wait for Ray: one that is left behind keeps its place until it is answered."""
        self._address: str = LOOPBACK if is_own else ray.util.get_node_ip_address()
        if is_own:  # all workers are here
            self.hosts = (LOOPBACK,)

    async def address(self) -> str:
        """Return that of this host in the cluster."""
        return self._address

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have a placement group, and an agent in each of its bundles; begins once each has been tried."""
        bundles = [self._bundle] * len(self.workers)
        self._group = group = await anyio.to_thread.run_sync(ray.util.placement_group, bundles, "STRICT_SPREAD")
        try:
            await anyio.to_thread.run_sync(group.wait, ROOM_S)
            async with super().running():
                yield
        finally:
            with anyio.move_on_after(FAREWELL_S, shield=True):
                remove = ray.util.remove_placement_group
                await anyio.to_thread.run_sync(remove, group, abandon_on_cancel=True)

    async def start(self, spec: ProcessSpec) -> Process:
        """Start a process; the GPUs that it is to see are counted among those that Ray gave to its host.

        Raises:
            PipelineError: on this host, as ``LocalBackend.start``.
        """
        given = self._given.get(spec.host or "", ())
        return await super().start(replace(spec, environment=among(given, spec.environment)))

    @asynccontextmanager
    async def way_to(self, host: str) -> AsyncIterator[_Calls]:
        """Have an actor in a bundle.

        Raises:
            AgentLostError: the bundle has no place, or no actor comes up there.
        """
        index = self.workers.index(host)
        if (why := await ask("where its bundle is", lambda: self._why_no_place(index), self._threads)) is not None:
            raise AgentLostError(why)
        actor = await ask("for an actor in its bundle", lambda: self._make_actor(index), self._threads)
        try:
            try:
                with anyio.fail_after(ACTOR_S):
                    self.addresses[host], self._given[host] = await actor.place.remote()
            except TimeoutError:
                raise AgentLostError(f"its actor has not come up within {ACTOR_S:g} s") from None
            except RayError as exc:
                raise AgentLostError(sentence_of(exc)) from exc
            calls = _Calls(actor)
            try:
                yield calls
            finally:
                with anyio.CancelScope(shield=True):
                    await calls.aclose()
        finally:
            with anyio.move_on_after(FAREWELL_S, shield=True):
                await anyio.to_thread.run_sync(ray.kill, actor, abandon_on_cancel=True)

    def _make_actor(self, index: int) -> Any:
        place = PlacementGroupSchedulingStrategy(self._group, index)
        kind = ray.remote(RayAgent).options(
            num_cpus=self._bundle["CPU"], num_gpus=self._bundle.get("GPU", 0), scheduling_strategy=place,
            max_restarts=0, max_task_retries=0,
        )  # fmt: skip
        return kind.remote()

    def _why_no_place(self, index: int) -> str | None:
        """Return why a bundle is on no host that lives; None where it is on one."""
        nodes = _nodes()
        assert self._group is not None
        place = placement_group_table(self._group)["bundles_to_node_id"].get(index)
        if any(node["NodeID"] == place for node in nodes):
            return None
        able = sum(all(node["Resources"].get(name, 0) >= need for name, need in self._bundle.items()) for node in nodes)
        need = " and ".join(f"{need:g} {name}" for name, need in self._bundle.items())
        return (
            f"the Ray cluster has no room for it: got {len(nodes)} hosts, {able} of them with {need}; need "
            f"{len(self.workers)} (launch.num_hosts) where as much is free"
        )


async def ask(what: str, call: Callable[[], T], threads: anyio.CapacityLimiter) -> T:
    """Ask Ray, in one of ``threads``.

    Raises:
        AgentLostError: there is no answer within ``CALL_S``, or another than a good one.
    """
    try:
        with anyio.fail_after(CALL_S):
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=threads)
    except TimeoutError:
        raise AgentLostError(f"Ray was asked {what}, and has not answered within {CALL_S:g} s") from None
    except RayError as exc:
        raise AgentLostError(f"Ray was asked {what}: {sentence_of(exc)}") from exc


def among(given: Sequence[str], environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return an environment whose GPUs, counted from 0, are those that a host has given. Pure."""
    if not given or not (wanted := environment.get(VISIBLE)):
        return environment
    return {**environment, VISIBLE: ",".join(given[int(number)] for number in wanted.split(","))}


def sentence_of(error: RayError) -> str:
    """Return what has become of an actor: of what Ray says the last line, which has the cause. Pure."""
    if isinstance(error, ActorUnavailableError):
        return "its actor does not answer"
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    last = escaped(lines[-1]).strip()[:MAX_SENTENCE]
    return last.partition(". ")[0] if isinstance(error, RayActorError) else last  # what follows are guesses


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _connect(num_cpus: int) -> bool:
    """Join the cluster that is there, or start one; return whether it was started.

    Raises:
        UserError: there is none at ``RAY_ADDRESS``.
    """
    said = os.environ.get("RAY_ADDRESS", "")
    if "://" in said:
        raise UserError(
            f"launch.backend: got ray with RAY_ADDRESS={said}, need HOST:PORT, on a host of the cluster; start it "
            "there, as ray job submit does"
        )
    if ":" in said:
        host, _, port = said.rpartition(":")
        try:  # Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
        except (OSError, ValueError) as exc:
            raise UserError(
                f"launch.backend: got ray with RAY_ADDRESS={said}, where no cluster answers: {exc}; correct it"
            ) from exc
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "ignore_reinit_error": True}
    try:
        ray.init(address="auto", **quiet)
    except (ConnectionError, RuntimeError, ValueError) as exc:
        if said:
            raise UserError(
                f"launch.backend: got ray with RAY_ADDRESS={said}, where no cluster lets this one in: {exc}"
            ) from exc
        ray.init(
            address="local", num_cpus=num_cpus, num_gpus=len(visible_gpus()), include_dashboard=False,
            object_store_memory=STORE_BYTES, **quiet,
        )  # fmt: skip
        return True
    return False
