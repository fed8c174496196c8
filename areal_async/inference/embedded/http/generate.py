"""The ``/generate`` route, written against ASGI itself: a stream costs one ``send`` per chunk and nothing else.

Invariant: whatever way a response ends (written whole, client gone, server stopping), its request is closed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio
import msgspec

from areal_async.inference.embedded.engine.errors import RequestError, SchemaError
from areal_async.inference.embedded.engine.protocol import GenerateBody, parse_body, parse_sampling
from areal_async.inference.embedded.engine.service import EngineService, OpenRequest

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_encode = msgspec.json.Encoder().encode
_JSON = [(b"content-type", b"application/json")]
_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_DONE = b"data: [DONE]\n\n"


class GenerateEndpoint:
    """An ASGI application for one path."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        raw = await _read_body(receive)
        if raw is None:
            return
        is_stream = False
        requests: list[OpenRequest] = []
        try:
            body = parse_body(raw)
            is_stream = body.stream
            requests = await self._open(body)
        except SchemaError as exc:
            await _send_json(send, 400, schema_error(str(exc)))
            return
        except RequestError as exc:
            await (_send_stream_error(send, str(exc)) if is_stream else _send_json(send, 400, request_error(str(exc))))
            return
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_on_disconnect, receive, tasks.cancel_scope)
                if is_stream:
                    await _stream(requests[0], send)
                else:
                    await _answer(requests, is_batch=body.is_batch, send=send)
                tasks.cancel_scope.cancel()
        finally:
            for request in requests:
                self._service.close(request)

    async def _open(self, body: GenerateBody) -> list[OpenRequest]:
        """Open every request of the body, or none."""
        prompts = body.prompts(self._service.tokenizer)
        if body.stream and body.is_batch:
            raise RequestError("stream: a batch of prompts cannot be streamed here; send one request per prompt")
        params = [
            parse_sampling(_pick(body.sampling_params, index, len(prompts)) or {}) for index in range(len(prompts))
        ]
        grammars = [one.grammar and await self._service.grammars.begin(*one.grammar) for one in params]
        opened: list[OpenRequest] = []
        try:
            for index, prompt_ids in enumerate(prompts):
                opened.append(
                    self._service.open(
                        prompt_ids,
                        params[index],
                        grammar=grammars[index],
                        num_top_logprobs=_pick(body.top_logprobs_num, index, len(prompts)) or 0,
                        rid=_rid(body, index),
                        is_stream=body.stream,
                        return_logprob=bool(_pick(body.return_logprob, index, len(prompts))),
                        return_prompt_token_ids=body.return_prompt_token_ids,
                    )
                )
        except RequestError:
            for request in opened:
                self._service.close(request)
            raise
        for request in opened:
            self._service.enter(request)
        return opened


def schema_error(message: str) -> dict[str, Any]:
    """Build the JSON of a body that failed validation."""
    return {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}


def request_error(message: str) -> dict[str, Any]:
    """Build the JSON of a request that was understood and cannot be served."""
    return {"error": {"message": message}}


def _pick(value: Any, index: int, count: int) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise RequestError(f"batch: got {len(value)} values for {count} prompts, need one each")
    return value[index]


def _rid(body: GenerateBody, index: int) -> str | None:
    if body.rid is None or not body.is_batch:
        return body.rid if isinstance(body.rid, str) else None
    return f"{body.rid}_{index}" if isinstance(body.rid, str) else body.rid[index]


async def _read_body(receive: Receive) -> bytes | None:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    """Wait for the client to go away, then cancel its response.

    consumes:     ASGI messages of one connection
    waits for:    the client
    produces:     a cancelled scope
    unblocked by: the response's end, which cancels this task too
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _stream(request: OpenRequest, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
    is_last = False
    while not is_last:
        pieces = await request.receive()
        is_last = pieces[-1].finish_reason is not None
        event = b"data: " + _encode(request.writer.write(pieces)) + b"\n\n"
        await send(
            {"type": "http.response.body", "body": event + _DONE if is_last else event, "more_body": not is_last}
        )


async def _answer(requests: list[OpenRequest], *, is_batch: bool, send: Send) -> None:
    answers = []
    for request in requests:
        pieces = await request.receive()
        reason = pieces[-1].finish_reason or {}
        if reason.get("status_code") is not None:
            status = reason["status_code"]
            error = {
                "object": "error",
                "message": reason["message"],
                "type": str(status),
                "param": None,
                "code": status,
            }
            await _send_json(send, status, error)
            return
        answers.append(request.writer.write(pieces))
    await _send_json(send, 200, answers if is_batch else answers[0])


async def _send_json(send: Send, status: int, content: Any) -> None:
    body = _encode(content)
    headers = [*_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_stream_error(send: Send, message: str) -> None:
    """Refuse a streamed request as SGLang does: inside the stream, with status 200."""
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
    await send({"type": "http.response.body", "body": b"data: " + _encode({"error": error}) + b"\n\n" + _DONE})
