"""What the `nats` tool asks of a broker for the commands that the documents show, and the answers as plain lines.

    python tests/e2e/nats_tool.py --server URL --nkey FILE --inbox-prefix PREFIX micro ls

The tool itself is in no package registry that a test could install it from; where one is on PATH, the tests take that.
The requests below are those of natscli 0.4, recorded between it and a broker: the same subjects in the same order, and
answers heard under the same prefix. So a subject that the key may not use, or an inbox it may not hear, fails here too.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

ANSWER_S = 60.0
QUIET_S = 10.0
"""After that long without another answer there is none. The tool itself waits half a second, which a busy machine may
take to answer; each answer is told as it comes, and whoever has read enough need not wait."""
PULLED = {"expires": 30_000_000_000, "batch": 500, "idle_heartbeat": 15_000_000_000}


class Tool:
    """One connection, and one method for each command."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def micro_ls(self) -> None:
        async for info in self._all("$SRV.INFO", b"{}"):
            _tell(info)

    async def micro_info(self, name: str) -> None:
        async for info in self._all(f"$SRV.INFO.{name}", b"{}"):
            _tell(info)
            async for stats in self._all(f"$SRV.STATS.{name}.{json.loads(info.data)['id']}", b"{}"):
                _tell(stats)

    async def micro_stats(self, name: str) -> None:
        async for stats in self._all(f"$SRV.STATS.{name}", b"{}"):
            _tell(stats)

    async def req(self, subject: str, body: str, *, replies: int) -> None:
        is_answered = False
        async for answer in self._all(subject, body.encode(), at_most=replies):
            if (answer.headers or {}).get("Status") == "503":
                sys.exit(f"nats: error: no responders on {subject}")
            is_answered = True
            _tell(answer)
        if not is_answered:
            sys.exit(f"nats: error: no answer on {subject}")

    async def stream_ls(self) -> None:
        answer = await self._api("STREAM.LIST", {"offset": 0})
        for stream in answer["streams"]:
            print(stream["config"]["name"], stream["state"]["messages"], stream["config"].get("description", ""))

    async def stream_info(self, stream: str) -> None:
        print(json.dumps(await self._api(f"STREAM.INFO.{stream}")))

    async def consumer_info(self, stream: str, consumer: str) -> None:
        print(json.dumps(await self._api(f"CONSUMER.INFO.{stream}.{consumer}")))

    async def sub(self, subject: str, *, from_stored: bool) -> None:
        """Go on until somebody ends it."""
        if not from_stored:
            heard = await self._client.subscribe(subject)
            async for message in heard.messages:
                _tell(message)
        (stream,) = (await self._api("STREAM.NAMES", {"offset": 0, "subject": subject}))["streams"]
        await self._api(f"STREAM.INFO.{stream}")
        config = {"deliver_policy": "all", "ack_policy": "none", "filter_subject": subject, "mem_storage": True,
                  "replay_policy": "instant", "inactive_threshold": 300_000_000_000, "num_replicas": 1}  # fmt: skip
        made = await self._api(
            f"CONSUMER.CREATE.{stream}.tool.{subject}", {"stream_name": stream, "config": {**config, "name": "tool"}}
        )
        inbox = self._client.new_inbox()
        pulled = await self._client.subscribe(inbox)
        await self._client.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{made['name']}", json.dumps(PULLED).encode(), reply=inbox
        )
        async for message in pulled.messages:
            if message.subject != inbox:
                _tell(message)

    async def kv_ls(self, bucket: str) -> None:
        for key in await (await self._client.jetstream().key_value(bucket)).keys():
            print(key)

    async def kv_get(self, bucket: str, key: str) -> None:
        entry = await (await self._client.jetstream().key_value(bucket)).get(key)
        print((entry.value or b"").decode())

    async def kv_watch(self, bucket: str, key: str) -> None:
        """Go on until somebody ends it."""
        watcher = await (await self._client.jetstream().key_value(bucket)).watch(key)
        async for entry in watcher:
            if entry is not None:
                print(entry.key, (entry.value or b"").decode(), flush=True)

    async def _all(self, subject: str, body: bytes, *, at_most: int = 0) -> AsyncIterator[Msg]:
        """Yield all answers to one request: until there are enough, or for a while none."""
        inbox, num_found = self._client.new_inbox(), 0
        heard = await self._client.subscribe(inbox)
        await self._client.publish(subject, body, reply=inbox)
        while not at_most or num_found < at_most:
            try:
                answer = await heard.next_msg(timeout=QUIET_S if num_found else ANSWER_S)
            except nats.errors.TimeoutError:
                return
            num_found += 1
            yield answer

    async def _api(self, operation: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = await self._client.request(
            f"$JS.API.{operation}", json.dumps(body).encode() if body else b"", timeout=ANSWER_S
        )
        read: dict[str, Any] = json.loads(answer.data)
        if "error" in read:
            sys.exit(f"nats: error: {operation}: {read['error']['description']}")
        return read


def _tell(message: Msg) -> None:
    for key, value in (message.headers or {}).items():
        print(f"{key}: {value}")
    print(message.data.decode(errors="replace"), flush=True)


async def _denied(error: Exception) -> None:
    """What the key may not do ends the tool, as it ends the real one."""
    sys.stderr.write(f"nats: error: {error}\n")
    signal.raise_signal(signal.SIGKILL)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--server", "--nkey", "--inbox-prefix"):
        parser.add_argument(option, required=True)
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--replies", type=int, default=1)
    parser.add_argument("words", nargs="+")
    given = parser.parse_args()
    client = await nats.connect(
        given.server, nkeys_seed=given.nkey, inbox_prefix=given.inbox_prefix, error_cb=_denied, allow_reconnect=False
    )
    tool = Tool(client)
    match given.words:
        case ["req", subject, body]:
            await tool.req(subject, body, replies=given.replies)
        case ["sub", subject]:
            await tool.sub(subject, from_stored=given.all)
        case [noun, verb, *names]:
            await getattr(tool, f"{noun}_{verb}")(*names)
        case words:
            sys.exit(f"nats: got {' '.join(words)}, need a command that the documents show")
    await client.close()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    asyncio.run(main())
