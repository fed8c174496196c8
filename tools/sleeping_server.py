"""An inference server that sleeps instead of computing: SGLang's routes, so many tokens a second, next to no processor.

For runs that are bound by generation on a machine of any size. It holds the weights that it is told to load as far as
the protocol can see: it reads them and shows the checksums of their tensors. Its tokens are random ones.

    inference.backend sglang, inference.python interpreter(folder)
    AREAL_TOKEN_S=0.1    seconds per token of each request
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
from typing import Any

from tests.fakes.fake_sglang import EventStream, FakeSglang

TOKEN_S = "AREAL_TOKEN_S"
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


class SleepingServer(FakeSglang):
    """Every request gets its tokens one by one, at its own pace, however many there are."""

    def __init__(self, *, version: str, name: str, token_s: float) -> None:
        super().__init__(self._sleep, version=version, name=name)
        self._token_s = token_s
        self._goes = asyncio.Event()
        self._goes.set()

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
        made: list[str] = []
        num_tokens = request["sampling_params"]["max_new_tokens"]
        while len(made) < num_tokens:
            await asyncio.sleep(self._token_s)
            await self._goes.wait()
            made.append(self.version)
            is_last = len(made) == num_tokens
            await stream.send(
                [random.choice(TOKENS)],
                self.version,
                completion_tokens=len(made),
                finish_reason={"type": "length", "length": num_tokens} if is_last else None,
                weight_versions=spans(made) if is_last else None,
            )
        await stream.finish()


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
        name, token_s = arguments.served_model_name, float(os.environ.get(TOKEN_S, "0.1"))
        server = SleepingServer(version=arguments.weight_version, name=name, token_s=token_s)
        await server.start(arguments.port)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
