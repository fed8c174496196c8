"""The ``/generate`` route, written against ASGI itself: a stream costs one ``send`` per chunk and nothing else.

Invariant: whatever way a response ends (written whole, client gone, server stopping), its request is closed.
"""

from contextlib import ExitStack
from typing import Any

import anyio
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from areal_async.inference.embedded.engine.answers import OpenRequest
from areal_async.inference.embedded.engine.errors import RequestError, SchemaError
from areal_async.inference.embedded.engine.protocol import GenerateBody, parse_body, parse_sampling
from areal_async.inference.embedded.engine.service import EngineService
from areal_async.inference.embedded.http.bodies import JsonResponse, error_response

_encode = msgspec.json.Encoder().encode
_EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
_STREAM_HEADERS = [(name.encode(), value.encode()) for name, value in _EVENT_STREAM.items()]
_DONE = b"data: [DONE]\n\n"


class GenerateEndpoint:
    """An ASGI application for one path."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            RequestError: it cannot be served, and no stream is to say so.
        """
        try:
            body = parse_body(await Request(scope, receive).body())
        except ClientDisconnect:
            return
        with ExitStack() as opened:
            try:
                requests = await self._open(body, opened)
            except RequestError as exc:
                if not body.stream or isinstance(exc, SchemaError):
                    raise
                await _stream_error(str(exc))(scope, receive, send)
                return
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_on_disconnect, receive, tasks.cancel_scope)
                if body.stream:
                    await _stream(requests[0], send)
                else:
                    await (await _answer(requests, is_batch=body.is_batch))(scope, receive, send)
                tasks.cancel_scope.cancel()

    async def _open(self, body: GenerateBody, opened: ExitStack) -> list[OpenRequest]:
        """Open every request of the body, to be closed with ``opened``, and start them, or none."""
        prompts = body.encode(self._service.tokenizer)
        if body.stream and body.is_batch:
            raise RequestError("stream: a batch of prompts cannot be streamed here; send one request per prompt")
        count = len(prompts)
        params = [parse_sampling(_pick(body.sampling_params, index, count) or {}) for index in range(count)]
        grammars = [one.grammar and await self._service.grammars.begin(*one.grammar) for one in params]
        images = [await self._service.images.read(sources) for sources in body.images_of(count)]
        requests: list[OpenRequest] = []
        for index, prompt_ids in enumerate(prompts):
            rid = _pick(body.rid, index, count)
            request = self._service.open(
                prompt_ids,
                params[index],
                images=images[index],
                grammar=grammars[index],
                num_top_logprobs=_pick(body.top_logprobs_num, index, count) or 0,
                rid=f"{rid}_{index}" if body.is_batch and isinstance(body.rid, str) else rid,
                is_stream=body.stream,
                return_logprob=bool(_pick(body.return_logprob, index, count)),
                return_prompt_token_ids=body.return_prompt_token_ids,
            )
            opened.callback(self._service.close, request)
            requests.append(request)
        for request in requests:
            self._service.enter(request)
        return requests


def _pick(value: Any, index: int, count: int) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise RequestError(f"batch: got {len(value)} values for {count} prompts, need one each")
    return value[index]


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
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
    is_last = False
    while not is_last:
        pieces = await request.receive()
        is_last = pieces[-1].finish_reason is not None
        event = b"data: " + _encode(request.write(pieces)) + b"\n\n"
        await send(
            {"type": "http.response.body", "body": event + _DONE if is_last else event, "more_body": not is_last}
        )


async def _answer(requests: list[OpenRequest], *, is_batch: bool) -> Response:
    answers = []
    for request in requests:
        pieces = await request.receive()
        reason = pieces[-1].finish_reason or {}
        if reason.get("status_code") is not None:
            return error_response(reason["message"], reason["status_code"])
        answers.append(request.write(pieces))
    return JsonResponse(answers if is_batch else answers[0])


def _stream_error(message: str) -> Response:
    """Refuse a streamed request as SGLang does: inside the stream, with status 200."""
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    return Response(b"data: " + _encode({"error": error}) + b"\n\n" + _DONE, headers=_EVENT_STREAM)
