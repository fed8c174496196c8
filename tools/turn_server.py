"""A server that costs next to nothing, for measuring agents: the same conversation each time, paced as a model's.

Every reply calls the tool, until the conversation holds as many messages as the last turn's; that one calls nothing. It
is said an event at a time, on `/generate` as SGLang says it and on `/v1/chat/completions` as OpenAI does.

Run by `tools.bench_turns`, which writes a `Script` to its standard input; it prints its port and ends with that input.
"""

import argparse
import asyncio
import os
import random
import sys
from collections.abc import Callable
from typing import Any, cast

import msgspec
import uvloop

VERSION = "1-7"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


class Script(msgspec.Struct):
    """What is said, and when."""

    call_ids: list[int]
    """A text, then a call of the tool, then the end of the turn; of as many tokens as ``last_ids``."""
    last_ids: list[int]
    texts: list[str]
    """What the tokens of an event say, by event, in words of OpenAI's."""
    end_id: int
    num_messages: int
    """Messages in the prompt of the last turn."""
    event_tokens: int
    event_s: float


def chunked(*events: Any) -> bytes:
    """Return server-sent events as one chunk of HTTP."""
    data = b"".join(
        b"data: " + (one if isinstance(one, bytes) else msgspec.json.encode(one)) + b"\n\n" for one in events
    )
    return b"%x\r\n%b\r\n" % (len(data), data)


END = b"0\r\n\r\n"


def sglang_events(script: Script, ids: list[int]) -> list[bytes]:
    """Return what `/generate` sends."""
    events = []
    for start in range(0, len(ids), script.event_tokens):
        said = ids[start : start + script.event_tokens]
        meta: dict[str, Any] = {
            "id": "5f1d0c3a9b7e4d2f8a6b1c0e9d8f7a6b",
            "finish_reason": None,
            "weight_version": VERSION,
            "output_token_logprobs": [[-1.2345678806304932, token, None] for token in said],
            "completion_tokens": start + len(said),
        }
        is_last = start + len(said) == len(ids)
        if is_last:
            meta["finish_reason"] = {"type": "stop", "matched": script.end_id}
            meta["weight_versions"] = [{"version": VERSION, "start": 0, "end": len(ids)}]
        event = {"text": "", "output_ids": said, "meta_info": meta}
        events.append(chunked(event, b"[DONE]") + END if is_last else chunked(event))
    return events


def openai_events(script: Script, *, calls: bool) -> list[bytes]:
    """Return what `/v1/chat/completions` sends: as many events, with the same words."""

    def piece(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}

    events = [chunked(piece({"role": "assistant", "content": text})) for text in script.texts[:-1]]
    function = {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    call = {"index": 0, "id": "call00001", "type": "function", "function": function}
    delta = {"tool_calls": [call]} if calls else {"content": script.texts[-1]}
    return [*events, chunked(piece(delta), piece({}, "tool_calls" if calls else "stop"), b"[DONE]") + END]


class Replies:
    """Every reply there is, ready to be sent."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._sglang = [sglang_events(script, ids) for ids in (script.last_ids, script.call_ids)]
        self._openai = [openai_events(script, calls=calls) for calls in (False, True)]

    @property
    def event_s(self) -> float:
        return self._script.event_s

    def to(self, head: bytes, body: dict[str, Any]) -> list[bytes]:
        """Return the events that answer a request."""
        if head.startswith(b"POST /generate"):
            return self._sglang[body["input_ids"].count(self._script.end_id) < self._script.num_messages]
        return self._openai[len(body["messages"]) < self._script.num_messages]


class Connection(asyncio.Protocol):
    """A connection: requests one after the other."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._transport: asyncio.Transport
        self._received = b""
        self._events: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n")[1:]:
            if line[:15].lower() == b"content-length:":
                length = int(line[15:])
        if not found or len(rest) < length:
            return
        self._received = rest[length:]
        self._events = self._replies.to(head, msgspec.json.decode(rest[:length]))[::-1]
        self._transport.write(HEAD)
        self._wait(self._replies.event_s * random.random())

    def _wait(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._send)

    def _send(self) -> None:
        self._transport.write(self._events.pop())
        if self._events:
            self._wait(self._replies.event_s)


async def serve(replies: Replies, wait_end: Callable[[], object]) -> None:
    """Serve on a free port until standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(replies), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, wait_end)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=int, help="processor to stay on; default: any")
    arguments = parser.parse_args()
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    script = msgspec.json.decode(sys.stdin.readline(), type=Script)
    uvloop.run(serve(Replies(script), sys.stdin.read))


if __name__ == "__main__":
    main()
