"""A call -> what the model is told came of it. Whatever the function does, the model gets an answer in time.

A coroutine runs on the loop and a plain function in a thread, each under its deadline. A thread cannot be ended:
one whose call ran past its deadline is left behind, and only so many may be.
"""

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import anyio
import msgspec

from areal_async.api import RunnableTool, ToolCall, ToolResult
from areal_async.errors import ArealError, Reject, RolloutError, ToolError, WorkflowError
from areal_async.process.per_loop import PerLoop
from areal_async.rollout.tools.schema import Tool, describe_tool
from areal_async.rollout.user_code.boundary import attributed_to, describe, encodable
from areal_async.rollout.user_code.task_scope import AbnormalExit, DeadlineExceeded, run_within
from areal_async.telemetry import spans, wait_graph
from areal_async.vision.parts import IMAGE_PARTS, is_image, is_picture

NUM_THREADS = 64
"""Plain functions that run at once on a node."""
MAX_LEFT_BEHIND = 256
"""Threads that never came back."""
MAX_OUTPUT_CHARACTERS = 20_000
"""Length of one answer; a model's context is not for more."""
MAX_CALLS_PER_REPLY = 16


class TakeImage(Protocol):
    """Takes in an image that a tool shows (``ImageIntake.take_part``)."""

    async def __call__(self, part: Mapping[str, Any], *, what: str, error: type[RolloutError]) -> dict[str, Any]: ...


class Toolbox:
    """The tools of one ``act``."""

    def __init__(self, tools: Sequence[RunnableTool], *, timeout_s: float, take_image: TakeImage | None = None) -> None:
        """Take what may be called; ``timeout_s`` holds for those that have no deadline of their own.

        Args:
            take_image: takes in what a tool shows; ``None`` for a model that does not see.

        Raises:
            WorkflowError: one cannot be a tool, or two have one name.
        """
        described = [describe_tool(tool) for tool in tools]
        self._tools = {tool.name: tool for tool in described}
        self._timeout_s = timeout_s
        self._take_image = take_image
        if len(self._tools) < len(described):
            raise WorkflowError(f"tools: got {[tool.name for tool in described]}, need different names")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the model is told."""
        return [tool.schema for tool in self._tools.values()]

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls of one reply, one after the other: what they share needs no lock.

        Raises:
            RolloutError: of ours, or ``Reject``, raised by a tool on purpose: it is not for the model.
        """
        results = []
        for number, call in enumerate(calls):
            try:
                if number >= MAX_CALLS_PER_REPLY:
                    raise ToolError(f"got call {number + 1} of one reply, need at most {MAX_CALLS_PER_REPLY}")
                with spans.tool_call(call, is_known=call.name in self._tools):
                    results.append(await self._answer(call))
            except ToolError as exc:
                results.append(ToolResult(call=call, text=_shortened(f"error: {exc}"), is_error=True))
        return results

    async def _answer(self, call: ToolCall) -> ToolResult:
        if call.error:
            raise ToolError(call.error)
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r:.100}, only {', '.join(self._tools)}")
        try:
            arguments = tool.check(call.arguments)
        except msgspec.ValidationError as exc:
            raise ToolError(f"{tool.name}: {exc}") from exc
        timeout_s = self._timeout_s if tool.timeout_s is None else tool.timeout_s
        with attributed_to(ToolError, tool.name):
            with wait_graph.on(f"tool {tool.name}"):
                value = await _call(tool, arguments, timeout_s)
            # At once: the next call may draw on the same canvas.
            parts = [await self._told_part(part, tool.name) for part in shown_parts(value)]
            text = "\n".join(map(_word_for, parts)) if parts else encodable(_shortened(as_text(value)))
        return ToolResult(call=call, text=text, is_error=False, parts=parts if any(map(is_image, parts)) else [])

    async def _told_part(self, part: Mapping[str, Any], name: str) -> dict[str, Any]:
        if is_image(part):
            if self._take_image is not None:
                return await self._take_image(part, what=name, error=ToolError)
            if not _has_text(part):
                raise WorkflowError(f"tool {name}: returned an image, which the model cannot see, need text")
        return {"type": "text", "text": encodable(_shortened(part["text"]))}


def shown_parts(value: Any) -> list[Mapping[str, Any]]:
    """Return what a tool returned as parts of a content where an image is among them, else none.

    An image may have a ``text``, which a model is told that does not see.
    """
    items = value if isinstance(value, list | tuple) else [value]
    parts = [{"type": "image", "image": item} if is_picture(item) else item for item in items]
    are_parts = all(is_image(part) or (isinstance(part, Mapping) and _has_text(part)) for part in parts)
    return parts if are_parts and any(map(is_image, parts)) else []


def _has_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("text", *IMAGE_PARTS) and isinstance(part.get("text"), str)


def _word_for(part: Mapping[str, Any]) -> str:
    """Return what stands for a part in a text."""
    text: str = f"[image of {part['image'].width} x {part['image'].height}]" if is_image(part) else part["text"]
    return text


def as_text(value: Any) -> str:
    """Write what a tool returned for a model: text as it is, anything else as JSON, or as Python would print it."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return str(value)


async def _call(tool: Tool, arguments: Mapping[str, Any], timeout_s: float) -> Any:
    function = functools.partial(tool.function, **arguments)
    if inspect.iscoroutinefunction(tool.function):
        return await _run(tool.name, function(), timeout_s)
    async with _threads.get():
        return await _run(tool.name, _call_in_thread(tool.name, function), timeout_s)


async def _run(name: str, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    try:
        return await run_within(work, name=name, deadline_s=timeout_s)
    except DeadlineExceeded:
        raise ToolError(f"{name}: no answer within {timeout_s:g} s") from None
    except AbnormalExit as exc:  # it is the tool's, and told to the model like any other
        raise ToolError(str(exc)) from exc.__cause__


_threads = PerLoop("tool_threads", lambda: anyio.Semaphore(NUM_THREADS, fast_acquire=True))
"""An event loop's bound on calls in threads. To wait for a place costs nothing of a call's deadline."""
_left_behind: set[Future[Any]] = set()


async def _call_in_thread(name: str, function: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own, which nobody waits for: not the caller, once cancelled, nor the process.

    Raises:
        WorkflowError: too many threads were left behind.
    """
    if len(_left_behind) >= MAX_LEFT_BEHIND:
        raise WorkflowError(
            f"tool {name}: {len(_left_behind)} threads of earlier calls never came back; give what hangs a deadline "
            "of its own, or make it async"
        )
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from here on a cancelled caller leaves it alone
    work = functools.partial(contextvars.copy_context().run, _work, name, function, future)
    threading.Thread(target=work, name=f"tool {name}", daemon=True).start()
    try:
        value = await asyncio.wrap_future(future)
        return await value if inspect.isawaitable(value) else value
    finally:
        if not future.done():
            _left_behind.add(future)
            future.add_done_callback(_left_behind.discard)


def _work(name: str, function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        with attributed_to(ToolError, name):
            value = function()
            # Written here: a large value would hold up the event loop for as long as that takes.
            result = value if inspect.isawaitable(value) or shown_parts(value) else as_text(value)
        future.set_result(result)
    except (ArealError, Reject) as exc:
        future.set_exception(exc)
    except BaseException as exc:  # noqa: BLE001  # nobody else would hear of it, and the caller would wait
        future.set_exception(ToolError(describe(name, exc)))


def _shortened(text: str) -> str:
    if len(text) <= MAX_OUTPUT_CHARACTERS:
        return text
    return f"{text[:MAX_OUTPUT_CHARACTERS]}\n[{len(text) - MAX_OUTPUT_CHARACTERS} characters more]"
