"""User code in tasks of its own: whatever it does there, its caller goes on, and nothing of it stays behind.

A trajectory's workflow is one task, and what that starts (tasks, of those other tasks) is known by its ``TaskScope``,
which travels with the context. So a workflow that cancels itself cancels nobody else, ``sys.exit`` in a task of its
own ends that task and not the process, and what still runs when it has returned is cancelled, then ended, however it
takes that. What it has ``shared`` with others is in a name of its own: as confined, and ended by nobody.

Invariant: when ``run_owned`` is left, by return, error or cancellation, no task of its owner runs any more.
"""

import asyncio
import contextvars
import functools
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
import structlog

from areal_async.errors import WorkflowError
from areal_async.rollout.user_code.boundary import describe

T = TypeVar("T")

GRACE_S = 2.0
"""For what is cancelled to clean up after itself."""
MAX_NAMED = 5
"""Tasks that were left behind and are told of by name."""

log = structlog.get_logger()


class TaskScope:
    """In whose name tasks run: one trajectory, or one answer to a held-out row."""

    __slots__ = ("is_over", "name", "tasks", "work")

    def __init__(self, name: str, work: object = None) -> None:
        """Take a name to begin messages with, and what ``working_on`` says is worked on."""
        self.name = name
        self.work = work
        self.tasks: set[asyncio.Task[Any]] = set()
        """Those that still run."""
        self.is_over = False
        """What starts in its name from now on ends at its first step."""


class RanPast(Exception):
    """It did not end before its deadline."""


class OwnError(WorkflowError):
    """User code was cancelled by itself, or raised what is no ``Exception``."""


_owner: contextvars.ContextVar[TaskScope | None] = contextvars.ContextVar("areal_async_owner", default=None)
working_on: contextvars.ContextVar[object] = contextvars.ContextVar("areal_async_work", default=None)
"""What the next ``run_owned`` in this context is for, as whoever asks a task's owner wants it (``culprit``)."""


class ScopedCoroutine(Coroutine[Any, Any, T]):
    """A coroutine that cannot end the process, and that can be ended though it swallows its cancellation."""

    __slots__ = ("_inner", "is_to_end", "owner")

    def __init__(self, inner: Coroutine[Any, Any, T], owner: TaskScope) -> None:
        self._inner = inner
        self.owner = owner
        self.is_to_end = False
        """Its next step is its last, whatever it says."""

    def send(self, value: Any) -> Any:
        if self.is_to_end:
            self._end()
        try:
            return self._inner.send(value)
        except (SystemExit, KeyboardInterrupt) as exc:
            raise self._instead_of(exc) from exc

    def throw(self, *exc_info: Any) -> Any:
        if self.is_to_end:
            self._end()
        try:
            return self._inner.throw(*exc_info)
        except (SystemExit, KeyboardInterrupt) as exc:
            raise self._instead_of(exc) from exc

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, None, T]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        """Show the coroutine inside to whoever asks where a task stands."""
        return getattr(self._inner, name)

    def _end(self) -> None:
        try:
            self._inner.close()
        except BaseException as exc:  # noqa: BLE001  # its last words, while it is thrown away
            log.warning("task.ended", owner=self.owner.name, cause=describe("while it was ended", exc))
        raise asyncio.CancelledError

    def _instead_of(self, exc: BaseException) -> OwnError:
        """Asyncio lets these two out of the loop, and with them goes the process."""
        if isinstance(exc, SystemExit):
            return OwnError(f"{self.owner.name}: called sys.exit({exc.code!r})")
        return OwnError(describe(self.owner.name, exc))


async def run_owned(work: Callable[[], Awaitable[T]], *, name: str, deadline_s: float) -> T:
    """Run user code and return what it returns; see the module.

    Args:
        name: begins what is said of it.

    Raises:
        RanPast: it did not end within ``deadline_s``.
        OwnError: see there.
        Exception: what it raised.
    """
    owner = TaskScope(name, working_on.get())
    context = contextvars.copy_context()
    context.run(_owner.set, owner)
    loop = _confining_loop()

    async def run() -> T:
        return await work()

    task = loop.create_task(run(), context=context)
    try:
        await asyncio.wait([task], timeout=deadline_s)
        is_done = task.done()
    finally:
        if owner.tasks:
            if task.done():
                _tell(owner)
            await _end(owner.tasks, owner)
        owner.is_over = True
    if not is_done:
        raise RanPast
    return result_of(task, name)


async def run_within(work: Coroutine[Any, Any, T], *, name: str, deadline_s: float) -> T:
    """Run a part of user code in a task of its own, in the name of the same owner.

    Raises:
        RanPast: it did not end within ``deadline_s``.
        OwnError: see there.
        Exception: what it raised.
    """
    if _owner.get() is None:
        work = ScopedCoroutine(work, TaskScope(name))
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait([task], timeout=deadline_s)
        is_done = task.done()
    finally:
        if not task.done():
            await _end({task})
    if not is_done:
        raise RanPast
    return result_of(task, name)


@contextmanager
def in_nobodys_name() -> Iterator[None]:
    """Start in this block what is not the workflow's own, and may outlive it: a connection that all use."""
    token = _owner.set(None)
    try:
        yield
    finally:
        _owner.reset(token)


@contextmanager
def shared() -> Iterator[None]:
    """Open in this block what all trajectories of a node share (a browser, a connection with a task of its own).

    What a workflow starts elsewhere ends with its trajectory. A task that is started here and calls ``sys.exit`` ends
    with an error for whoever awaits it, as any other error of it does.
    """
    opener = _owner.get()
    with _in_name_of(TaskScope(f"shared by {opener.name}" if opener else "shared")):
        yield


def start_shared(work: Coroutine[Any, Any, T], *, name: str) -> "asyncio.Task[T]":
    """Start what outlives every trajectory, and can no more end the process than they can."""
    loop = _confining_loop()
    with _in_name_of(TaskScope(name)):
        return loop.create_task(work)


async def end_task(task: "asyncio.Task[Any]") -> None:
    """Cancel a task, and end it where it does not heed that."""
    await _end({task})


@contextmanager
def _in_name_of(owner: TaskScope) -> Iterator[None]:
    token = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(token)


def _confining_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop, which from now on confines what is started in an owner's name."""
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is not make_task:
        loop.set_task_factory(make_task)  # type: ignore[arg-type]
        loop.stop = functools.partial(_stop, loop.stop)  # type: ignore[method-assign]
    return loop


async def _end(tasks: Collection["asyncio.Task[Any]"], owner: TaskScope | None = None) -> None:
    """Cancel tasks, and those that join ``tasks`` meanwhile; end what does not heed that."""
    loop = asyncio.get_running_loop()
    asked: set[asyncio.Task[Any]] = set()
    ends_at_s = loop.time() + GRACE_S
    with anyio.CancelScope(shield=True):
        while (left := _left(tasks)) and (left_s := ends_at_s - loop.time()) > 0:
            for task in left:
                if task not in asked:
                    asked.add(task)
                    task.cancel()
            await asyncio.wait(left, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if owner is not None:
            owner.is_over = True
        ends_at_s = loop.time() + GRACE_S
        while (left := _left(tasks)) and (left_s := ends_at_s - loop.time()) > 0:
            for task in left:
                if isinstance(coroutine := task.get_coro(), ScopedCoroutine):
                    coroutine.is_to_end = True
                task.cancel()
            await asyncio.wait(left, timeout=left_s)


def _left(tasks: Collection["asyncio.Task[Any]"]) -> list["asyncio.Task[Any]"]:
    return [task for task in tasks if not task.done()]


def result_of(task: "asyncio.Task[T]", name: str) -> T:
    """Return what a task that has ended returned, or raise what it raised, as an ``Exception`` whatever it was."""
    if task.cancelled():
        raise OwnError(f"{name}: let a CancelledError escape that nobody but itself asked for")
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise OwnError(describe(name, error)) from error
    return task.result()


def make_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **options: Any) -> "asyncio.Task[T]":
    """Make a loop's tasks: one that is started in an owner's name is confined, and known to the owner."""
    context = options.get("context")
    owner = _owner.get() if context is None else context.get(_owner)
    if owner is None or not asyncio.iscoroutine(coroutine):
        return asyncio.Task(coroutine, loop=loop, **options)
    confined = ScopedCoroutine(coroutine, owner)
    confined.is_to_end = owner.is_over
    task = asyncio.Task(confined, loop=loop, **options)
    owner.tasks.add(task)
    task.add_done_callback(owner.tasks.discard)
    return task


def owner_of(task: "asyncio.Task[Any]") -> TaskScope | None:
    """Say in whose name a task runs. From any thread."""
    coroutine = task.get_coro()
    return coroutine.owner if isinstance(coroutine, ScopedCoroutine) else None


def _stop(stop: Callable[[], None]) -> None:
    """Stop the loop, unless a workflow asks for it: all the others are on it."""
    owner = _owner.get()
    if owner is not None:
        raise WorkflowError(f"{owner.name}: called loop.stop(), need the loop for all trajectories of the node")
    stop()


def _tell(owner: TaskScope) -> None:
    left = [task for task in owner.tasks if not task.done() and not task.cancelling()]  # the policy cancels its own
    if left:
        names = sorted({getattr(task.get_coro(), "__qualname__", repr(task)) for task in left})
        log.warning("workflow.left_tasks", owner=owner.name, num_tasks=len(left), tasks=names[:MAX_NAMED])
