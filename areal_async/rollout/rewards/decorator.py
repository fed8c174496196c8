"""``@reward``: a plain function becomes awaitable and runs in a worker process that can be killed.

    @reward(timeout_s=5.0)
    def latex_equivalent(text: str, answer: str) -> float: ...

    score = await latex_equivalent(reply.text, prompt["answer"])

Model output is hostile by accident: a comparison may think for hours or take the process down. In a worker
that costs one reward and no more. A reward that fails is a ``RewardError``, never a zero. Works in any
event loop, inside a node or not; workers start on first use, stay warm and die with this process.
"""

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, overload

import msgspec

from areal_async.errors import RewardError, UserError
from areal_async.rollout.rewards.process import RewardProcess
from areal_async.rollout.rewards.worker import RewardCall
from areal_async.telemetry import spans, wait_graph

P = ParamSpec("P")

DEFAULT_TIMEOUT_S = 10.0
NUM_WORKERS = max(2, (os.cpu_count() or 1) // 4)
"""Rewards that need a process are the exception; a few workers keep up with thousands of model streams."""


@overload
def reward(function: Callable[P, Any], /) -> Callable[P, Awaitable[float]]: ...
@overload
def reward(
    *, timeout_s: float = DEFAULT_TIMEOUT_S, prepare: Callable[[], object] | None = None
) -> Callable[[Callable[P, Any]], Callable[P, Awaitable[float]]]: ...
def reward(
    function: Callable[..., Any] | None = None,
    /,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    prepare: Callable[[], object] | None = None,
) -> Any:
    """Run a plain function in a worker process, killed after ``timeout_s`` seconds.

    Arguments travel as text, numbers, bytes, lists, tuples (as lists) and dicts of these. The function must
    return a finite number (bool and int count) and stand at the top level of a file.

    Args:
        timeout_s: for one call; importing the file, and ``prepare``, are not counted.
        prepare: called once in every worker before its first call: for imports that take long and that only a worker
            needs.

    Raises:
        UserError: at decoration, for a function that a worker could not find.
        RewardError: from the call: it raised, ran past ``timeout_s``, took its worker down, or returned no
            finite number.
    """
    decorate = functools.partial(_decorate, timeout_s=timeout_s, prepare=prepare)
    return decorate if function is None else decorate(function)


def _decorate(
    function: Callable[..., Any], *, timeout_s: float, prepare: Callable[[], object] | None
) -> Callable[..., Awaitable[float]]:
    name = getattr(function, "__name__", repr(function))
    if inspect.iscoroutinefunction(function):
        raise UserError(f"reward {name}: got an async function, need a plain one; await an async one without @reward")
    file = inspect.getsourcefile(function)
    if file is None or not Path(file).is_file() or "<" in function.__qualname__:
        raise UserError(
            f"reward {name}: defined inside a function or in no file, need the top level of a file; a worker imports it"
        )

    location = {"file": str(Path(file).resolve()), "module": function.__module__, "qualname": function.__qualname__}

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> float:
        try:
            request = msgspec.msgpack.encode(RewardCall(**location, args=args, kwargs=kwargs))
        except (TypeError, OverflowError, ValueError, msgspec.MsgspecError) as exc:
            raise RewardError(f"reward {name}: cannot send its arguments to a worker: {exc}") from exc
        future = _executor().submit(_call_in_worker, name, request, timeout_s)
        with wait_graph.on(f"reward {name}"), spans.reward(name):
            return await asyncio.wrap_future(future)

    # Where the worker finds the function itself under the decorated name.
    call.__dict__["__areal_reward__"] = function
    call.__dict__["__areal_prepare__"] = None if prepare is None else functools.cache(prepare)
    return call


@functools.cache
def _executor() -> ThreadPoolExecutor:
    """Return the threads that wait for workers, one worker each; a call queues while all are busy."""
    return ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="reward")


_own = threading.local()


def _call_in_worker(name: str, request: bytes, timeout_s: float) -> float:
    process: RewardProcess | None = getattr(_own, "process", None)
    if process is None or not process.is_alive:
        if process is not None:
            process.close()  # dead, and its pipes are still open
        process = _own.process = RewardProcess()
    return process.call(name, request, timeout_s=timeout_s)
