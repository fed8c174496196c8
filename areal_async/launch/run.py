"""A run from its broker to its end: embedded or external bus, streams, processes, and what the run's state says."""

import functools
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, aclosing, asynccontextmanager, suppress
from typing import Any

import anyio

import areal_async
from areal_async.bus import Bus, EmbeddedBroker, Role, declare, open_run_bus
from areal_async.bus.inspection import after_others
from areal_async.bus.streams import delete_run, forget_nodes, list_runs
from areal_async.config.resumed import EMBEDDED as EMBEDDED
from areal_async.config.settings import Settings
from areal_async.errors import BusError, FencedError, PipelineError, UnreachableError, UserError, leaves_of
from areal_async.inference.card_share import CardShare
from areal_async.launch.backend import Backend
from areal_async.launch.blockages import run_blockages
from areal_async.launch.heartbeat_lock import own_holder, run_beats, wait_released
from areal_async.launch.lost import find_lost
from areal_async.launch.membership import MembershipPublisher
from areal_async.launch.orders import NodesOfHosts, run_rollback_orders, run_stop_orders, take_back_stop
from areal_async.launch.plan import node_on_host, plan_groups
from areal_async.launch.reach import refuse_loopback
from areal_async.launch.rotation import run_rotation
from areal_async.launch.run_directory import FirstStart, LiveError, RunDirectory
from areal_async.launch.stalls import StallWatch
from areal_async.launch.starts import LAST_WORDS_S, Start, begin, has_tickets, is_finished, resume_point
from areal_async.launch.supervisor import Notify, RunEnd, RunSupervisor
from areal_async.process.host import LOOPBACK
from areal_async.protocol.run_state import CrewState, Rollback, RunState, SharedSettings
from areal_async.protocol.subjects import LAUNCHER, NODES, ROLLBACK, RUN_STATE, SETTINGS
from areal_async.rollout.user_code.source_hashes import code_of_tasks, source_hashes

CONNECT_DEADLINE_S = 10.0
TRY_S = 2.0
"""At one address of a live run's broker; then it is looked whether the run lives still, and where."""
POLL_S = 0.1
JOINED_NODES_S = 15.0
"""For joined nodes to end, while the broker still runs."""


class NotLiveError(UserError):
    """Nobody runs the run now."""


async def launch(
    settings: Settings,
    directory: RunDirectory,
    *,
    backend: Backend,
    start: Start,
    notify: Notify,
    watch: Callable[[Bus], Coroutine[Any, Any, None]],
    first: FirstStart | None = None,
    share: CardShare | None = None,
) -> RunEnd:
    """Run to the end, from wherever an earlier start left off. Call with the directory locked.

    Args:
        watch: runs beside the processes, for showing what happens; cancelled at the end.
        first: is told whether the run has begun, where this is its first start.
        share: what a server may take of a GPU that the trainer has too.

    Raises:
        UserError: the settings, the workflow or the data are at fault, or other hosts could not find the broker.
        PipelineError: the run failed.
    """
    said, changes = anyio.create_memory_object_stream[CrewState](math.inf)  # a group changes a few times at most

    def note(change: CrewState) -> None:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the run has ended
            said.send_nowait(change)

    async with AsyncExitStack() as stack:
        stack.enter_context(said)
        stack.enter_context(changes)
        await stack.enter_async_context(backend.running())
        address = await _address(settings, backend)
        host = _broker_host(settings, address, backend, notify)
        nodes = _plan(settings, directory, backend=backend, address=address, share=share)
        bus = await stack.enter_async_context(
            _open_run(settings, directory, host=host, is_fresh=start.is_fresh, on_change=note, notify=notify)
        )
        if first is not None:
            first.has_begun = True  # for whatever ends this before it is asked
            stack.push_async_callback(_note_begun, bus, settings, first)
        if await is_finished(bus, steps=settings.run.steps):
            return RunEnd.ALREADY_FINISHED
        await begin(bus, directory, settings, start, notify=notify)
        await _publish_start(bus, directory, settings)
        order, _ = await bus.get(ROLLBACK, Rollback)
        holder = own_holder()
        await bus.put(LAUNCHER, holder)
        membership = MembershipPublisher(bus)
        read_failure = functools.partial(_failure_of, bus)
        groups = await nodes.begin(bus)
        supervisor = RunSupervisor(groups, backend=backend, notify=notify, read_failure=read_failure, on_change=note)
        stalls = StallWatch(bus, settings.run, groups=supervisor, notify=notify)
        end: RunEnd | None = None
        failure: BaseException | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch, bus)
                tasks.start_soon(stalls.run)
                tasks.start_soon(functools.partial(run_beats, bus, LAUNCHER, holder, what=f"run {settings.run.name}"))
                tasks.start_soon(membership.run_reports)
                tasks.start_soon(run_blockages, directory.path, notify)
                tasks.start_soon(run_rotation, directory.logs)
                tasks.start_soon(nodes.run, bus, supervisor)
                tasks.start_soon(functools.partial(run_stop_orders, bus, stop=supervisor.stop, notify=notify))
                going_back = functools.partial(run_rollback_orders, bus, before=order or Rollback(), notify=notify)
                tasks.start_soon(functools.partial(going_back, renew=supervisor.renew))
                async with anyio.create_task_group() as telling:
                    with said:
                        telling.start_soon(membership.run_changes, changes)
                        end = await supervisor.run()
                    telling.cancel_scope.deadline = anyio.current_time() + LAST_WORDS_S
                tasks.cancel_scope.cancel()
        except (PipelineError, ExceptionGroup) as exc:
            failure = leaves_of(exc)[0]
            raise
        finally:
            if not isinstance(failure, FencedError):
                await note_end(bus, failure=failure)
                if end is not RunEnd.FINISHED and await has_tickets(bus):
                    notify(f"another start goes on from step {await resume_point(bus, directory)}")
                if settings.bus.url == EMBEDDED and bus.connection.is_connected and end is not RunEnd.KILLED:
                    await wait_for_joined_nodes(bus)
        assert end is not None  # else something was raised
        return end


def _plan(
    settings: Settings, directory: RunDirectory, *, backend: Backend, address: str, share: CardShare | None
) -> NodesOfHosts:
    """Return the process groups of a run, as ``plan_groups``, with what makes more of them on other hosts."""
    groups = plan_groups(
        settings, directory, gpus=backend.gpus, hosts=backend.workers, address=address,
        addresses=backend.addresses, absent=backend.absent, share=share,
    )  # fmt: skip
    return NodesOfHosts(groups, backend=backend, make_node=functools.partial(node_on_host, settings, directory))


async def _publish_start(bus: Bus, directory: RunDirectory, settings: Settings) -> None:
    """Say that the run goes on, and with which settings; forget what an earlier start has said of its processes."""
    await bus.put(RUN_STATE, RunState())
    shared = SharedSettings(
        settings=settings.model_dump_json(),
        library=areal_async.__version__,
        files=source_hashes(code_of_tasks(settings)),
    )
    await bus.put(SETTINGS, shared)
    directory.write_code(shared.files)
    await take_back_stop(bus)
    await forget_earlier(bus, with_nodes=settings.bus.url == EMBEDDED)


async def _failure_of(bus: Bus) -> str | None:
    """Return why the run as a whole has failed; None while it has not."""
    now, _ = await bus.get(RUN_STATE, RunState)
    return now.reason if now is not None and now.state == "failed" else None


async def _note_begun(bus: Bus, settings: Settings, first: FirstStart) -> None:
    """Find out whether the run has begun; if not, leave nothing of it at a broker that others use too."""
    first.has_begun = await has_tickets(bus)
    if not first.has_begun and settings.bus.url != EMBEDDED:
        with anyio.move_on_after(LAST_WORDS_S, shield=True), suppress(BusError):
            await delete_run(bus)


async def forget_earlier(bus: Bus, *, with_nodes: bool) -> None:
    """Delete what an earlier start has said of its processes.

    Args:
        with_nodes: and what nodes and servers said: nobody is to wait for the killed, and the living say it again.
    """
    for key in await bus.keys("crew."):
        await bus.delete(key)
    if with_nodes:
        await forget_nodes(bus)


async def note_end(bus: Bus, *, failure: BaseException | None = None) -> None:
    """Say that the run goes on no more, where nobody has said why: nodes that joined it are to end with it."""
    end = RunState(state="stopped") if failure is None else RunState(state="failed", reason=str(failure))
    with anyio.move_on_after(LAST_WORDS_S, shield=True), suppress(BusError):
        state, revision = await bus.get(RUN_STATE, RunState)
        if state is not None and state.state == "running":
            await bus.compare_and_set(RUN_STATE, end, revision)


async def wait_for_joined_nodes(bus: Bus) -> None:
    """Let nodes that have joined give back what they hold, before the broker ends with the run."""
    with anyio.move_on_after(JOINED_NODES_S, shield=True), suppress(BusError):
        await wait_released(bus, NODES)


@asynccontextmanager
async def visit(
    directory: RunDirectory,
    *,
    connect_deadline_s: float = CONNECT_DEADLINE_S,
    operation_deadline_s: float | None = None,
    needs_whole: bool = True,
) -> AsyncIterator[tuple[Settings, Bus]]:
    """Have the settings of a run that was started once, and the operator's connection to it.

    A live run is visited at its own broker. A stopped one's is started for the while, with the directory locked: one
    visitor after the other.

    Args:
        operation_deadline_s: how long one question is asked again while the broker is away; None takes the run's.
        needs_whole: the store of a stopped run is to have all that the run needs.

    Raises:
        UserError: the run was never started, or its store has lost a part.
        VisitedError: others look into it for long.
        UnreachableError: its broker does not answer.
    """
    name = read_settings_of(directory).run.name
    async with AsyncExitStack() as stack:
        while True:
            try:
                await hold(stack, directory, name, is_visit=True)
            except LiveError:
                with suppress(NotLiveError):  # it has ended meanwhile: now it can be held
                    found = await _reach(stack, directory, connect_deadline_s, operation_deadline_s)
                    break
            else:
                settings = read_settings_of(directory)
                directory.read_bus_url()  # raises where there never was a broker
                url = await stack.enter_async_context(_broker(settings))
                asking = operator_bus(settings, directory, url, connect_deadline_s, operation_deadline_s)
                found = settings, await stack.enter_async_context(asking)
                if needs_whole:
                    await find_lost(found[1], directory, settings, notify=lambda _: None)  # its next start tells
                break
        yield found


async def hold(stack: ExitStack | AsyncExitStack, directory: RunDirectory, name: str, *, is_visit: bool) -> None:
    """Lock a run's directory, after any other process that looks into it.

    Raises:
        LiveError: a launcher has it.
        VisitedError: others look into it for long.
    """

    async def enter() -> None:
        stack.enter_context(directory.locked(name, is_visit=is_visit))

    await after_others(enter)


def read_settings_of(directory: RunDirectory) -> Settings:
    """Return the settings of a run, with its directory as it is seen from here.

    Raises:
        UserError: the run was never started.
    """
    settings = directory.read_settings()
    here = settings.run.model_copy(update={"directory": directory.path.parent})  # wherever the command was given
    return settings.model_copy(update={"run": here})


@asynccontextmanager
async def visit_at(settings: Settings, connect_deadline_s: float) -> AsyncIterator[tuple[Settings, Bus]]:
    """Have the operator's connection to a run whose directory is elsewhere, at ``bus.url``.

    Raises:
        UserError: no broker there lets these credentials in, or it has no such run.
    """
    async with operator_bus(
        settings, RunDirectory(settings.run_directory), settings.bus.url, connect_deadline_s
    ) as bus:
        runs = await list_runs(bus)
        if settings.run.name not in runs:
            raise UserError(
                f"run {settings.run.name}: nothing is known of it at {settings.bus.url}, which has "
                f"{', '.join(runs) or 'no run'}; check --run and --bus.url"
            )
        yield settings, bus


@asynccontextmanager
async def visit_live(directory: RunDirectory) -> AsyncIterator[tuple[Settings, Bus]]:
    """Have the settings of a run that runs now, and the operator's connection to it.

    Raises:
        UserError: the run was never started.
        NotLiveError: it does not run, or ends before its broker was reached.
        UnreachableError: its broker does not answer.
    """
    name = read_settings_of(directory).run.name
    if not directory.is_live:
        raise NotLiveError(f"run {name}: it does not run now; start it first")
    async with AsyncExitStack() as stack:
        yield await _reach(stack, directory, CONNECT_DEADLINE_S)


async def _reach(
    stack: AsyncExitStack, directory: RunDirectory, deadline_s: float, operation_deadline_s: float | None = None
) -> tuple[Settings, Bus]:
    """Connect to a live run's broker, which comes up after its launcher, perhaps elsewhere, and goes before it.

    Raises:
        NotLiveError: the run has ended.
        UnreachableError: it goes on, and its broker does not answer within ``deadline_s``.
    """
    ends_at_s = anyio.current_time() + deadline_s
    while directory.is_live:
        settings, url = read_settings_of(directory), directory.find_bus_url()
        if url is None:
            await anyio.sleep(POLL_S)
        else:
            with suppress(UnreachableError):
                connecting = operator_bus(settings, directory, url, min(TRY_S, deadline_s), operation_deadline_s)
                return settings, await stack.enter_async_context(connecting)
        if anyio.current_time() > ends_at_s and directory.is_live and directory.find_bus_url() == url:
            where = f"its broker at {url} does not answer" if url else "it has no broker yet"
            raise UnreachableError(
                f"run {settings.run.name}: {where} after {deadline_s:g} s; it starts or ends now, or its broker is "
                f"down: try again, or see {directory.logs}"
            )
    raise NotLiveError(f"run {read_settings_of(directory).run.name}: has ended")


async def _address(settings: Settings, backend: Backend) -> str:
    """Return the address of this host for all of the backend's; of a broker of our own, what the settings say of it.

    Raises:
        UserError: it cannot be found out.
    """
    if settings.bus.url == EMBEDDED and settings.bus.host:
        return settings.bus.host
    return await backend.address()


def _broker_host(settings: Settings, address: str, backend: Backend, notify: Notify) -> str:
    """Return where the embedded broker is to listen, and say what comes with it.

    Raises:
        UserError: the backend's other hosts would not find it there.
    """
    if settings.bus.url != EMBEDDED:
        return LOOPBACK
    refuse_loopback(address, backend.hosts[1:], is_ours=True)
    if address != LOOPBACK:
        notify(f"the broker listens at {address}: it asks for keys, and encrypts nothing; bus.url takes one with TLS")
    return address


@asynccontextmanager
async def _open_run(
    settings: Settings,
    directory: RunDirectory,
    *,
    host: str,
    is_fresh: bool,
    on_change: Callable[[CrewState], None],
    notify: Notify,
) -> AsyncIterator[Bus]:
    """Have a broker with the run's streams, its address in the run directory, and the operator's connection to it."""
    async with _broker(settings, host, on_change) as url, operator_bus(settings, directory, url) as bus:
        if is_fresh and settings.bus.url != EMBEDDED:  # the embedded one's store went with the directory
            await delete_run(bus)
        await find_lost(bus, directory, settings, notify=notify)
        await declare(bus, settings)
        directory.write_bus_url(url)
        yield bus


@asynccontextmanager
async def _broker(
    settings: Settings, host: str = LOOPBACK, on_change: Callable[[CrewState], None] = lambda _: None
) -> AsyncIterator[str]:
    if settings.bus.url != EMBEDDED:
        yield settings.bus.url
        return
    broker = EmbeddedBroker(settings, host=host, on_change=on_change)
    await broker.start()
    async with aclosing(broker), anyio.create_task_group() as tasks:
        tasks.start_soon(broker.run)
        yield broker.url
        tasks.cancel_scope.cancel()


def operator_bus(
    settings: Settings,
    directory: RunDirectory,
    url: str,
    connect_deadline_s: float = CONNECT_DEADLINE_S,
    operation_deadline_s: float | None = None,
) -> AbstractAsyncContextManager[Bus]:
    """Have the operator's connection to a run's broker."""
    return open_run_bus(
        settings,
        directory.path,
        url,
        Role.OPERATOR,
        connect_deadline_s=connect_deadline_s,
        operation_deadline_s=operation_deadline_s,
    )
