"""User code in tasks of its own: whatever it does there, its caller goes on, and nothing of it stays behind.

A trajectory's workflow is one task, and what that starts (tasks, of those other tasks) is known by its ``TaskScope``,
which travels with the context. So a workflow that cancels itself cancels nobody else, ``sys.exit`` in a task of its
own ends that task and not the process, and what still runs when it has returned is cancelled, then ended, however it
takes that. What it has ``shared`` with others is in a scope of its own: as confined, and ended by nobody.

Invariant: when ``TaskScope.run`` is left, by return, error or cancellation, no task of the scope runs any more.
"""

import asyncio
import contextvars
import functools
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import anyio
import structlog

from areal_async.errors import WorkflowError
from areal_async.process.pausable_clock import PausableClock
from areal_async.rollout.user_code.boundary import describe, forget_frames

T = TypeVar("T")

GRACE_S = 2.0
"""Seconds in which cancelled tasks may clean up after themselves."""
MAX_NAMED = 5
"""Tasks that were left behind and are told of by name."""

log = structlog.get_logger()


class DeadlineExceeded(Exception):
    """User code did not end before its deadline."""


class AbnormalExit(WorkflowError):
    """User code was cancelled by itself, or raised what is no ``Exception``."""


class TaskScope:
    """The tasks of one trajectory, of one answer to a held-out row, or of something that many share."""

    __slots__ = ("is_over", "name", "tasks", "work")

    def __init__(self, name: str, work: object = None) -> None:
        """Take a name to begin messages with, and what is worked on, as is told of who holds up the event loop."""
        self.name = name
        self.work = work
        self.tasks: set[asyncio.Task[Any]] = set()
        """Those that still run."""
        self.is_over = False
        """What starts in this scope from now on ends at its first step."""

    async def run(
        self,
        work: Coroutine[Any, Any, T],
        *,
        deadline_s: float,
        clock: PausableClock | None = None,
        keeps_frames: bool = False,
    ) -> T:
        """Run user code as the scope's first task and return what it returns; see the module.

        Args:
            clock: that the deadline goes by; None for one that never stops.
            keeps_frames: of a task that ran past it, for who shows where it stood.

        Raises:
            DeadlineExceeded: it did not end within ``deadline_s``.
            AbnormalExit: see there.
            Exception: what it raised.
        """
        loop = _scoping_loop()
        with _entered(self):
            task = loop.create_task(work)
        try:
            await (clock or PausableClock()).wait([task], deadline_s)
            is_done = task.done()
        finally:
            if self.tasks:
                if task.done():
                    self._warn_of_left_tasks()
                await _end(self.tasks, self)
            self.is_over = True
        if not is_done:
            if task.done() and not keeps_frames:
                mark_retrieved(task)
            raise DeadlineExceeded
        return result_of(task, self.name)

    def _warn_of_left_tasks(self) -> None:
        left = [task for task in self.tasks if not task.done() and not task.cancelling()]  # the policy cancels its own
        if left:
            names = sorted({getattr(task.get_coro(), "__qualname__", repr(task)) for task in left})
            log.warning("workflow.left_tasks", owner=self.name, num_tasks=len(left), tasks=names[:MAX_NAMED])


_scope: contextvars.ContextVar[TaskScope | None] = contextvars.ContextVar("areal_async_scope", default=None)


class ScopedCoroutine(Coroutine[Any, Any, T]):
    """The coroutine of a scope's task: it cannot end the process, and can be ended though it swallows cancellation."""

    __slots__ = ("_inner", "is_to_end", "scope")

    def __init__(self, inner: Coroutine[Any, Any, T], scope: TaskScope) -> None:
        self._inner = inner
        self.scope = scope
        self.is_to_end = scope.is_over
        """Its next step is its last, whatever it says."""

    def send(self, value: Any) -> Any:
        if self.is_to_end:
            self._end()
        try:
            return self._inner.send(value)
        except (SystemExit, KeyboardInterrupt) as exc:
            raise self._abnormal(exc) from exc

    def throw(self, *exc_info: Any) -> Any:
        if self.is_to_end:
            self._end()
        try:
            return self._inner.throw(*exc_info)
        except (SystemExit, KeyboardInterrupt) as exc:
            raise self._abnormal(exc) from exc

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, None, T]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        """Show the coroutine inside to anyone who asks where a task stands."""
        return getattr(self._inner, name)

    def _abnormal(self, exc: BaseException) -> AbnormalExit:
        """Return what stands for it: asyncio lets these two out of the loop, and with them goes the process."""
        return AbnormalExit(describe(self.scope.name, exc))

    def _end(self) -> None:
        try:
            self._inner.close()
        except BaseException as exc:  # noqa: BLE001  # its last words, while it is thrown away
            log.warning("task.ended", owner=self.scope.name, cause=describe("while it was ended", exc))
        raise asyncio.CancelledError


async def run_within(work: Coroutine[Any, Any, T], *, name: str, deadline_s: float) -> T:
    """Run a part of user code in a task of its own, in the scope that is current.

    Raises:
        DeadlineExceeded: it did not end within ``deadline_s``.
        AbnormalExit: see there.
        Exception: what it raised.
    """
    if _scope.get() is None:
        work = ScopedCoroutine(work, TaskScope(name))
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait([task], timeout=deadline_s)
        is_done = task.done()
    finally:
        if not task.done():
            await end_task(task)
    if not is_done:
        raise DeadlineExceeded
    return result_of(task, name)


def unscoped() -> AbstractContextManager[None]:
    """Start in this block what is not the workflow's own, and may outlive it: a connection that all use."""
    return _entered(None)


def shared() -> AbstractContextManager[None]:
    """Open in this block what all trajectories of a node share (a browser, a connection with a task of its own).

    What a workflow starts elsewhere ends with its trajectory. A task that is started here and calls ``sys.exit`` ends
    with an error for anyone who awaits it, as any other error of it does.
    """
    opener = _scope.get()
    return _entered(TaskScope(f"shared by {opener.name}" if opener else "shared"))


def start_shared(work: Coroutine[Any, Any, T], *, name: str) -> "asyncio.Task[T]":
    """Start what outlives every trajectory, and can no more end the process than they can."""
    loop = _scoping_loop()
    with _entered(TaskScope(name)):
        return loop.create_task(work)


async def end_task(task: "asyncio.Task[Any]") -> None:
    """Cancel a task, and end it where it does not heed that."""
    await _end({task})


@contextmanager
def _entered(scope: TaskScope | None) -> Iterator[None]:
    """Have the tasks that start in this block belong to a scope, or to none."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


def _scoping_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop, which from now on confines what is started in a scope."""
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is not make_task:
        loop.set_task_factory(make_task)  # type: ignore[arg-type]
        loop.stop = functools.partial(_stop, loop.stop)  # type: ignore[method-assign]
    return loop


async def _end(tasks: Collection["asyncio.Task[Any]"], scope: TaskScope | None = None) -> None:
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
        if scope is not None:
            scope.is_over = True
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
        raise AbnormalExit(f"{name}: let a CancelledError escape that nobody but itself asked for")
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise AbnormalExit(describe(name, error)) from error
    return task.result()


def mark_retrieved(future: "asyncio.Future[Any]") -> None:
    """Take note of an error that nobody may ask for any more; unseen, the loop would complain of it.

    Of a cancellation its frames are dropped, which the future would keep.
    """
    try:
        future.exception()
    except asyncio.CancelledError as exc:
        forget_frames(exc)


def make_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **options: Any) -> "asyncio.Task[T]":
    """Make a loop's tasks: one that is started in a scope is confined, and known to the scope."""
    context = options.get("context")
    scope = _scope.get() if context is None else context.get(_scope)
    if scope is None or not asyncio.iscoroutine(coroutine):
        return asyncio.Task(coroutine, loop=loop, **options)
    task = asyncio.Task(ScopedCoroutine(coroutine, scope), loop=loop, **options)
    scope.tasks.add(task)
    task.add_done_callback(scope.tasks.discard)
    return task


def scope_of(task: "asyncio.Task[Any]") -> TaskScope | None:
    """Return the scope that a task belongs to. Any thread may ask."""
    coroutine = task.get_coro()
    return coroutine.scope if isinstance(coroutine, ScopedCoroutine) else None


def _stop(stop: Callable[[], None]) -> None:
    """Stop the loop, unless a workflow asks for it: all the others are on it."""
    scope = _scope.get()
    if scope is not None:
        raise WorkflowError(f"{scope.name}: called loop.stop(), need the loop for all trajectories of the node")
    stop()
