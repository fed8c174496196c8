"""A scripted server with SGLang's routes over real HTTP, for tests of everything that talks to one.

In a test: ``async with FakeSglang(script) as server``; the script sees each request and writes the stream,
byte by byte if it likes. As a process (``python -m sglang.launch_server``, see beside): it answers with
tokens that count upwards; held by ``/hold`` it answers nothing until ``/release``, ``/exit`` ends it, and after
``/fall`` it is killed by its next update. After ``/hang`` and one more event it says that it is healthy, and generates
and updates nothing, nor does it end when it is asked to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

FALL_S = 0.2


class EventStream:
    """What a script writes its answer to."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._is_begun = False

    async def send_bytes(self, data: bytes) -> None:
        """Send one chunk of HTTP."""
        if not self._is_begun:
            self._is_begun = True
            self._writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self._writer.drain()

    async def send(self, output_ids: list[int], version: str, **meta: Any) -> None:
        """Send one event with tokens; logprobs are minus a hundredth of the token."""
        await self.send_bytes(event(output_ids, version, **meta))

    async def finish(self) -> None:
        """End the stream as SGLang does."""
        await self.send_bytes(b"data: [DONE]\n\n")
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    async def refuse(self, status: int, body: dict[str, Any]) -> None:
        """Answer with an error instead of a stream."""
        await respond(self._writer, status, body)

    def break_off(self) -> None:
        """Lose the connection."""
        self._writer.transport.abort()


Script = Callable[[dict[str, Any], EventStream], Awaitable[None]]


def event(output_ids: list[int], version: str, **meta: Any) -> bytes:
    """Return the bytes of one event."""
    logprobs = [[-token / 100, token, None] for token in output_ids]
    meta = {"weight_version": version, "finish_reason": None, "output_token_logprobs": logprobs, **meta}
    return b"data: " + json.dumps({"output_ids": output_ids, "meta_info": meta}).encode() + b"\n\n"


async def respond(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(
        b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data)
    )
    await writer.drain()


class FakeSglang:
    """The server. Remembers every request and every administrative call."""

    def __init__(self, script: Script | None = None, *, version: str = "1-0", name: str = "default") -> None:
        self.script = script or self._count
        self.name = name
        self.version = version
        self.requests: list[dict[str, Any]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        """of each of ``requests``"""
        self.authorizations: list[str] = []
        """of all other requests; in small letters"""
        self.failing: dict[str, tuple[int, dict[str, Any]]] = {}
        """route -> the error it answers with"""
        self.silent: set[str] = set()
        """routes that are never answered"""
        self.checksums: dict[str, str] = {}
        self.is_paused = False
        self.is_to_fall = False
        """at the next update from disk"""
        self.stream_interval = 8
        self._called = asyncio.Event()
        self._runs = asyncio.Event()
        self._runs.set()
        self._aborted = asyncio.Event()
        self._num_events_left = sys.maxsize
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def wait_called(self, route: str) -> None:
        """Wait until this was asked for since ``calls`` was last cleared."""
        while route not in [called for called, _ in self.calls]:
            await self._called.wait()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", port)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                request_line, *header_lines = head.decode().split("\r\n")
                route = request_line.split(" ")[1]
                headers = dict(line.lower().split(": ", 1) for line in header_lines if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if route == "/generate":
                    self.headers.append(headers)
                else:
                    self.authorizations.append(headers.get("authorization", ""))
                await self._answer(route, json.loads(body or b"{}"), writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, route: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if route in self.silent:
            await asyncio.Event().wait()
        elif route in self.failing:
            await respond(writer, *self.failing[route])
        elif route == "/generate":
            self.requests.append(body)
            await self.script(body, EventStream(writer))
        else:
            self.calls.append((route, body))
            self._called.set()
            self._called = asyncio.Event()
            if route == "/update_weights_from_disk" and self.is_to_fall:
                await self._fall(writer)
            elif route in ("/update_weights_from_disk", "/update_weights_from_distributed"):
                self.version = body["weight_version"] or self.version
            elif route in ("/pause_generation", "/continue_generation"):
                self.is_paused = route == "/pause_generation"
            elif route == "/abort_request" and body.get("abort_all"):
                self._aborted.set()
                self._aborted = asyncio.Event()
            elif route == "/hold":
                self._runs.clear()
            elif route == "/release":
                self._runs.set()
            elif route == "/fall":
                self.is_to_fall = True
            elif route == "/hang":
                self._num_events_left = 1
                self.silent.add("/update_weights_from_disk")
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            elif route == "/exit":
                os._exit(3)
            sampled = [request["sampling_params"] for request in self.requests]
            answer = {"success": True, "weight_version": self.version, "sampling_params": sampled}
            answer["served_model_name"] = self.name
            if route == "/weights_checker":
                answer |= {"ranks": [{"checksums": self.checksums}], "per_engine_checksum": str(self.checksums)}
            await respond(writer, 200, answer)

    async def _fall(self, writer: asyncio.StreamWriter) -> None:
        """Be killed, slowly: as of any process, its connections go first."""
        assert self._server is not None
        self._server.close()
        writer.transport.abort()
        await asyncio.sleep(FALL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    async def _count(self, request: dict[str, Any], stream: EventStream) -> None:
        """Answer with 5, 6, 7, ... and the end token last."""
        params = request["sampling_params"]
        ids = [5 + index % 90 for index in range(min(params["max_new_tokens"], 12) - 1)] + params["stop_token_ids"][:1]
        for start in range(0, len(ids), self.stream_interval):
            if await self._is_aborted():
                await stream.send([], self.version, finish_reason={"type": "abort"})
                break
            if not self._num_events_left:
                await asyncio.Event().wait()
            self._num_events_left -= 1
            part = ids[start : start + self.stream_interval]
            is_last = start + len(part) == len(ids)
            spans = [{"version": self.version, "start": 0, "end": len(ids)}] if is_last else None
            reason = {"type": "stop"} if is_last else None
            await stream.send(part, self.version, finish_reason=reason, weight_versions=spans)
        await stream.finish()

    async def _is_aborted(self) -> bool:
        """Wait while held; say whether all requests were aborted meanwhile."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._runs, self._aborted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return not self._runs.is_set()
        finally:
            for wait in waits:
                wait.cancel()


def main() -> None:
    """Serve until killed; a model path that is no folder ends it as the real one does."""
    parser = argparse.ArgumentParser()
    for flag in ("--model-path", "--host", "--port", "--weight-version", "--served-model-name"):
        parser.add_argument(flag)
    args, _ = parser.parse_known_args()
    if not Path(args.model_path).is_dir():
        raise SystemExit(f"error: model path {args.model_path} is no folder")

    async def serve() -> None:
        server = FakeSglang(version=args.weight_version, name=args.served_model_name)
        await server.start(int(args.port))
        await asyncio.Event().wait()

    asyncio.run(serve())
