"""What a workflow's file has made once per node (``@per_node``), and given to its workflows by name.

Each is entered and left in a task of its own, confined as workflows are: nothing that it does ends the process.
Invariant: whatever was entered is left again, in the opposite order, before the block ends, unless the process is
killed.
"""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio

from areal_async.api import GroupWorkflow, Workflow, is_per_node
from areal_async.errors import PipelineError, leaves_of
from areal_async.rollout.user_code.boundary import describe
from areal_async.rollout.user_code.task_scope import AbnormalExit, end_task, result_of, start_shared
from areal_async.telemetry import wait_graph

LEAVE_DEADLINE_S = 8.0
"""Time that one has to leave; then it is cancelled."""

AnyWorkflow = Workflow | GroupWorkflow
Making = Callable[[], AsyncIterator[Any]]


def made_for(workflow: Callable[..., Any]) -> dict[str, Making]:
    """Return what a workflow's file or environment has made once per node, by the names that stand for it there."""
    function = inspect.unwrap(workflow)
    own: dict[str, Making] | None = getattr(function, "made_per_node", None)
    if own is not None:
        return own
    found = getattr(function, "__globals__", {})
    return {name: value for name, value in found.items() if is_per_node(value)}


@asynccontextmanager
async def given_per_node(
    workflows: Mapping[str, AnyWorkflow], *, deadline_s: float, waiter: str, tell: Callable[[str], None]
) -> AsyncIterator[dict[str, AnyWorkflow]]:
    """Yield the workflows, with what their files have made for this node in the place of the parameters so named.

    Args:
        deadline_s: for each to be made.
        waiter: who waits for that.
        tell: takes what went wrong when one was left, which is no reason for anything to fail any more.

    Raises:
        PipelineError: one cannot be made, or ends by itself meanwhile; possibly inside an ExceptionGroup.
    """
    made: dict[Making, _Made] = {}
    async with anyio.create_task_group() as watching:
        try:
            for workflow in workflows.values():
                for name, making in made_for(workflow).items():
                    if making not in made:
                        one = made[making] = _Made(name, making)
                        with wait_graph.on(one.what, "the making of", waiter=waiter):
                            await one.enter(deadline_s)
                        watching.start_soon(one.watch)
            yield {name: _bound(workflow, made) for name, workflow in workflows.items()}
        finally:
            watching.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                for one in reversed(made.values()):
                    await one.leave(tell)


def _bound(workflow: AnyWorkflow, made: Mapping[Making, "_Made"]) -> AnyWorkflow:
    """Return a workflow that needs no value of its node any more; in all else it is the same."""
    parameters = inspect.signature(workflow).parameters
    values = {name: made[making].value for name, making in made_for(workflow).items() if name in parameters}
    if not values:
        return workflow
    bound: Any = functools.partial(workflow, **values)
    bound.__dict__.update(vars(workflow), __name__=getattr(workflow, "__name__", "workflow"))
    return bound  # type: ignore[no-any-return]


class _Made:
    """One value, from before the first workflow to after the last."""

    def __init__(self, name: str, making: Making) -> None:
        self.what = f"per_node {name}"
        self.value: Any = None
        self._making = making
        self._made = asyncio.get_running_loop().create_future()
        self._is_over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def enter(self, deadline_s: float) -> None:
        """Make the value.

        Raises:
            PipelineError: it raised, or was not made in time.
        """
        self._task = start_shared(self._hold(), name=self.what)
        await asyncio.wait([self._task, self._made], timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._made.done():
            if not self._task.done():
                await end_task(self._task)
                raise PipelineError(
                    f"{self.what}: was not made within rollout.setup_deadline_s = {deadline_s:g} s; raise that if it "
                    "is only slow"
                )
            self._check_ended()
            raise PipelineError(f"{self.what}: ended without a value, need one `yield`")

    async def watch(self) -> None:
        """Return never but with an error: it has ended by itself."""
        assert self._task is not None
        await asyncio.wait([self._task])
        if not self._is_over.is_set():
            self._check_ended()
            raise PipelineError(f"{self.what}: ended by itself, need it for as long as the node runs")

    async def leave(self, tell: Callable[[str], None]) -> None:
        """Have it clean up after itself, for as long as there is time."""
        if self._task is None or self._task.done():
            return
        self._is_over.set()
        await asyncio.wait([self._task], timeout=LEAVE_DEADLINE_S)
        if not self._task.done():
            await end_task(self._task)
            tell(f"{self.what}: did not end within {LEAVE_DEADLINE_S:g} s, and was cancelled")
            return
        try:
            self._check_ended()
        except PipelineError as exc:
            tell(str(exc))

    async def _hold(self) -> None:
        async with asynccontextmanager(self._making)() as self.value:
            self._made.set_result(None)
            await self._is_over.wait()

    def _check_ended(self) -> None:
        """Raise what ended it, as an error of ours; nothing where it ended well."""
        assert self._task is not None
        try:
            result_of(self._task, self.what)
        except Exception as exc:
            cause = leaves_of(exc)[0]
            # An abnormal exit says itself whose it is.
            told = str(cause) if isinstance(cause, AbnormalExit) else describe(self.what, exc)
            raise PipelineError(told) from exc
