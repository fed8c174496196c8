"""An inference server that sleeps instead of computing: SGLang's routes, so many tokens a second, next to no processor.

For runs that are bound by generation on a machine of any size, and for the regime of many servers with cards on one
that has none. It holds the weights that it is told to load as far as the protocol can see: it reads them and shows the
checksums of their tensors. Its tokens are random ones. All requests go on together, a step for each, as in a server
that batches continuously; those that came meanwhile are prefilled first, which holds up the rest.

    inference.backend sglang, inference.python interpreter(folder)
    AREAL_TOKEN_S=0.1        seconds of a step, whatever is in it
    AREAL_REQUEST_S=0        more of them for each request in it
    AREAL_PREFILL_S=0        and for each token that is prefilled before it
    AREAL_EVENT_TOKENS=1     steps, and tokens, of an event
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import random
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.fakes.fake_sglang import EventStream, FakeSglang

TOKEN_S, REQUEST_S, PREFILL_S = "AREAL_TOKEN_S", "AREAL_REQUEST_S", "AREAL_PREFILL_S"
EVENT_TOKENS = "AREAL_EVENT_TOKENS"
TOKENS = range(5, 95)


def interpreter(folder: Path) -> Path:
    """Write a program that takes the place of the interpreter of SGLang's environment; return its path."""
    path = folder / "sleeping_python"
    path.write_text(f'#!/bin/sh\nshift 2\nexec {shlex.quote(sys.executable)} -m tools.sleeping_server "$@"\n')
    path.chmod(0o755)
    return path


def checksums(folder: Path) -> dict[str, str]:
    """Return tensor name -> SHA-256 of its bytes, of all safetensors files in a folder."""
    return dict(pair for path in sorted(folder.glob("*.safetensors")) for pair in _checksums(path))


def _checksums(path: Path) -> Iterator[tuple[str, str]]:
    data = path.read_bytes()
    num_header_bytes = int.from_bytes(data[:8], "little")
    start = 8 + num_header_bytes
    for name, tensor in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = tensor["data_offsets"]
            yield name, hashlib.sha256(data[start + first : start + last]).hexdigest()


class Pace(NamedTuple):
    """How long a server takes."""

    step_s: float = 0.1
    request_s: float = 0.0
    prefill_s: float = 0.0
    event_tokens: int = 1

    @classmethod
    def of_environment(cls) -> Self:
        """Read what the environment names."""
        step_s, request_s, prefill_s = (float(os.environ.get(name, default)) for name, default in _SECONDS.items())
        return cls(step_s, request_s, prefill_s, int(os.environ.get(EVENT_TOKENS, "1")))

    def seconds(self, num_requests: int, num_prefilled: int) -> float:
        """Return those until the next event of so many requests, with so many tokens to prefill before it."""
        return self.event_tokens * (self.step_s + self.request_s * num_requests) + self.prefill_s * num_prefilled


_SECONDS = {TOKEN_S: "0.1", REQUEST_S: "0", PREFILL_S: "0"}


class SleepingServer(FakeSglang):
    """Every request gets as many tokens as it may have."""

    def __init__(self, *, version: str, name: str, pace: Pace) -> None:
        super().__init__(self._sleep, version=version, name=name)
        self._pace = pace
        self._goes, self._has_some, self._stepped = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._goes.set()
        self._num_running = self._num_to_prefill = 0

    async def step(self) -> None:
        """Let all that runs have its next event, again and again."""
        while True:
            await self._has_some.wait()
            await self._goes.wait()
            num_prefilled, self._num_to_prefill = self._num_to_prefill, 0
            await asyncio.sleep(self._pace.seconds(self._num_running, num_prefilled))
            await self._goes.wait()
            stepped, self._stepped = self._stepped, asyncio.Event()
            stepped.set()

    async def _answer(self, route: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if route == "/update_weights_from_disk":
            self.checksums = checksums(Path(body["model_path"]))
        elif route == "/pause_generation":
            self._goes.clear()
        elif route == "/continue_generation":
            self._goes.set()
        self.requests.clear()
        await super()._answer(route, body, writer)

    async def _sleep(self, request: dict[str, Any], stream: EventStream) -> None:
        self._num_running += 1
        self._num_to_prefill += len(request.get("input_ids", ()))
        self._has_some.set()
        try:
            await self._generate(request["sampling_params"]["max_new_tokens"], stream)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._has_some.clear()
        await stream.finish()

    async def _generate(self, num_tokens: int, stream: EventStream) -> None:
        made: list[str] = []
        while len(made) < num_tokens:
            await self._stepped.wait()
            said = random.choices(TOKENS, k=min(self._pace.event_tokens, num_tokens - len(made)))
            made += [self.version] * len(said)
            is_last = len(made) == num_tokens
            await stream.send(
                said,
                self.version,
                completion_tokens=len(made),
                finish_reason={"type": "length", "length": num_tokens} if is_last else None,
                weight_versions=spans(made) if is_last else None,
            )


def spans(versions: list[str]) -> list[dict[str, Any]]:
    """Say which version made which tokens."""
    found: list[dict[str, Any]] = []
    for version, group in itertools.groupby(versions):
        start = found[-1]["end"] if found else 0
        found.append({"version": version, "start": start, "end": start + len(list(group))})
    return found


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weight-version", default="0-0")
    parser.add_argument("--served-model-name", default="sleeping")
    arguments, _ = parser.parse_known_args()

    async def serve() -> None:
        version, name = arguments.weight_version, arguments.served_model_name
        server = SleepingServer(version=version, name=name, pace=Pace.of_environment())
        await server.start(arguments.port)
        await server.step()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
