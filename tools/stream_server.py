"""A server that costs next to nothing per event, for measuring clients: `/generate` streams, `/model_info` answers.

Speaks HTTP/1.1 and SGLang's incremental events, straight on asyncio's transports. Every stream gets one event per
tick, and events are written one by one, so that a client sees them as it would see tokens. A request's
`sampling_params` may hold `event_interval_s`, the seconds between its events; without it they come as fast as
they can, in turn with those of all other streams.

Run: ``python -m tools.stream_server [--core N]``; it prints its port, and ends when its standard input does.
"""

import argparse
import asyncio
import os
import random
import sys
from typing import Any, cast

import msgspec
import uvloop

VERSION = "1-7"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
HIGH_WATER_BYTES = 64 * 1024


def event_bytes(*, is_last: bool, num_tokens: int) -> bytes:
    """Return one event of one token as SGLang writes it, as one chunk of HTTP."""
    meta: dict[str, Any] = {
        "id": "5f1d0c3a9b7e4d2f8a6b1c0e9d8f7a6b",
        "finish_reason": {"type": "length", "length": num_tokens} if is_last else None,
        "prompt_tokens": 3,
        "weight_version": VERSION,
        "output_token_logprobs": [[-1.2345678806304932, 17, None]],
        "completion_tokens": num_tokens,
        "cached_tokens": 0,
        "e2e_latency": 0.25,
    }
    if is_last:
        meta["weight_versions"] = [{"version": VERSION, "start": 0, "end": num_tokens}]
    data = b"data: " + msgspec.json.encode({"text": "", "output_ids": [17], "meta_info": meta}) + b"\n\n"
    if is_last:
        data += b"data: [DONE]\n\n"
    chunk = b"%x\r\n%b\r\n" % (len(data), data)
    return chunk + b"0\r\n\r\n" if is_last else chunk


EVENT = event_bytes(is_last=False, num_tokens=1)


class Streams:
    """All streams that are sent as fast as they can be, one event of each in turn."""

    def __init__(self) -> None:
        self._waiting: set[Connection] = set()
        self._is_scheduled = False

    def add(self, connection: "Connection") -> None:
        """Take one more into the round."""
        self._waiting.add(connection)
        self._schedule()

    def drop(self, connection: "Connection") -> None:
        """Leave one out: it is over, or its client reads too slowly."""
        self._waiting.discard(connection)

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_round)

    def _send_round(self) -> None:
        self._is_scheduled = False
        for connection in list(self._waiting):
            if not connection.send_event():
                self._waiting.discard(connection)
        self._schedule()


class Connection(asyncio.Protocol):
    """A connection: requests one after the other."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._transport: asyncio.Transport
        self._received = b""
        self._num_left = 0
        self._num_tokens = 0
        self._interval_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def pause_writing(self) -> None:
        self._streams.drop(self)

    def resume_writing(self) -> None:
        if self._num_left and not self._interval_s:
            self._streams.add(self)

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
        if head.startswith(b"POST /generate"):
            self._begin(msgspec.json.decode(rest[:length])["sampling_params"])
        else:
            body = b'{"weight_version":"%b","success":true}' % VERSION.encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            self._transport.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))

    def send_event(self) -> bool:
        """Send the next event; say whether there is another one."""
        self._num_left -= 1
        if self._num_left:
            self._transport.write(EVENT)
            return True
        self._transport.write(event_bytes(is_last=True, num_tokens=self._num_tokens))
        self._end()
        return False

    def _begin(self, sampling: dict[str, Any]) -> None:
        self._num_left = self._num_tokens = sampling["max_new_tokens"]
        self._interval_s = sampling.get("event_interval_s", 0.0)
        self._transport.write(HEAD)
        if self._interval_s:
            self._wait(self._interval_s * random.random())
        else:
            self._streams.add(self)

    def _wait(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._send_on_time)

    def _send_on_time(self) -> None:
        if self.send_event():
            self._wait(self._interval_s)

    def _end(self) -> None:
        self._num_left = 0
        self._streams.drop(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def serve() -> None:
    """Serve on a free port until standard input ends."""
    loop = asyncio.get_running_loop()
    streams = Streams()
    server = await loop.create_server(lambda: Connection(streams), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=int, help="processor to stay on; default: any")
    arguments = parser.parse_args()
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    uvloop.run(serve())


if __name__ == "__main__":
    main()
