"""Measure what each part of a weights version takes, beside the plainest way to do the same with the same bytes.

    python -m tools.bench_weights
    python -m tools.bench_weights --hidden 2048 --layers 16 --directory /disk/scratch --rounds 5

One process, a random decoder of about 300 million parameters, in bfloat16 as it is served. In each round every part
goes right before or right after its reference, in turns, so that a busy machine slows them alike; the ratio is the
median of those of the rounds. ``write`` has the hashing in it. ``send`` is a broadcast over gloo to a thread of this
process, beside one TCP connection to another. ``tools/weights_table.py`` makes a
model of the time per version of the ratios.
"""

import argparse
import hashlib
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from areal_async.config.settings import ModelSettings, Settings, TrainerSettings
from areal_async.inference.embedded.engine.weights import stage_weights
from areal_async.inference.supervision.deltas import check_files
from areal_async.inference.weight_group import GLOO, WeightGroup, WeightGroupError, empty_bucket
from areal_async.process.host import LOOPBACK
from areal_async.protocol.types import Version, WeightsVersion
from areal_async.trainer.engine.digests import digests
from areal_async.trainer.engine.parallel.ranks import Ranks, joined_ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.output.served import ServedWeights
from tools.measure_memory import make_model

DEADLINE_S = 600.0
WORDS = 8192
BLOCK_BYTES = 64 << 20
"""Of what ``os.write`` is given at once."""


class Part(NamedTuple):
    """A part of a version, and what it is held against."""

    reference: str
    run: Callable[[], object]
    run_reference: Callable[[], object]


class Bench:
    """One version of an engine's weights, and plain copies of its bytes."""

    def __init__(self, engine: FsdpEngine, ranks: Ranks, folder: Path, *, bucket_bytes: int) -> None:
        self._engine, self._ranks, self._folder = engine, ranks, folder
        self._served = ServedWeights(engine, bucket_bytes=bucket_bytes)
        self._tensors = self._served.gather()
        self._number = 0
        self.num_bytes = self._served.num_bytes
        self._source = torch.randint(0, 255, (self.num_bytes,), dtype=torch.uint8)
        self._target = torch.empty_like(self._source).copy_(self._source)
        self._server = _server_model(engine)
        self._written = self._write()

    def parts(self, group: WeightGroup, connection: socket.socket) -> dict[str, Part]:
        """Return what is measured."""
        copy, hashing = "copy_ of the bytes", "hashlib.sha256 of the bytes"
        return {
            "gather": Part(copy, self._gather, self._copy),
            "hash": Part(hashing, self._hash, self._plain_hash),
            "write": Part("os.write, fsync and sha256", self._write, self._plain_write_and_hash),
            "verify": Part(hashing, lambda: check_files(self._written), self._plain_hash),
            "stage": Part(copy, lambda: stage_weights(self._server, self._written.path), self._copy),
            "send": Part("a TCP connection", lambda: self._send(group), lambda: self._plain_send(connection)),
        }  # fmt: skip

    def _gather(self) -> None:
        self._served.take_back(self._tensors)
        self._tensors = self._served.gather()

    def _copy(self) -> None:
        self._target.copy_(self._source)

    def _hash(self) -> None:
        digests(Path(self._written.path), Path(self._written.path).glob("*.safetensors"))

    def _plain_hash(self) -> None:
        hashlib.sha256(self._source.numpy().data).hexdigest()

    def _write(self) -> WeightsVersion:
        """Write, sync and hash, as a rank does, into a folder of one name: so there is one on disk at a time."""
        return self._served.write(self._tensors, Version(1, 1), self._folder, self._ranks)

    def _plain_write(self) -> None:
        file = os.open(self._folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            for block in self._source.split(BLOCK_BYTES):
                left = memoryview(block.numpy())
                while left:
                    left = left[os.write(file, left) :]
            os.fsync(file)
        finally:
            os.close(file)

    def _plain_write_and_hash(self) -> None:
        self._plain_write()
        self._plain_hash()

    def _send(self, group: WeightGroup) -> None:
        for bucket in self._served.buckets:
            group.broadcast(_bytes_of([self._tensors[spec.name] for spec in bucket]))

    def _plain_send(self, connection: socket.socket) -> None:
        connection.sendall(self._source.numpy().data)
        connection.recv(1)  # the other end has all of it

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """Have a thread read all that is sent over a connection, and answer each version with a byte."""
        with socket.create_server((LOOPBACK, 0)) as listening:
            connection = socket.create_connection(listening.getsockname())
            other, _ = listening.accept()

        def receive() -> None:
            room = memoryview(torch.empty_like(self._source).numpy().data)
            while True:
                left = room
                while left:
                    num_bytes = other.recv_into(left)
                    if not num_bytes:
                        return
                    left = left[num_bytes:]
                other.send(b"!")

        receiver = threading.Thread(target=receive)
        receiver.start()
        with other, connection:
            yield connection
            connection.shutdown(socket.SHUT_WR)
            receiver.join()

    @contextmanager
    def receiving(self) -> Iterator[WeightGroup]:
        """Have a thread receive whatever is sent, until the group is closed."""
        made = {"address": LOOPBACK, "size": 2, "name": "bench", "backend": GLOO, "deadline_s": DEADLINE_S}
        group = WeightGroup.host(**made)  # type: ignore[arg-type]

        def receive() -> None:
            member = WeightGroup.join(rank=1, port=group.port, **made)  # type: ignore[arg-type]
            flats = [empty_bucket(bucket) for bucket in self._served.buckets]
            with suppress(WeightGroupError), closing(member):
                while True:
                    for flat in flats:
                        member.broadcast(flat)

        receiver = threading.Thread(target=receive)
        receiver.start()
        group.meet()
        try:
            yield group
        finally:
            group.close()
            receiver.join()


def _bytes_of(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])


def _server_model(engine: FsdpEngine) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_config(engine.folder.config).to(torch.bfloat16)
    return model


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(parts: dict[str, Part], *, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return for each part the seconds of each round: its own, and its reference's. The first round warms up."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in parts}
    for number in range(rounds + 1):
        for name, part in parts.items():
            if number % 2:
                own_s, reference_s = _seconds(part.run), _seconds(part.run_reference)
            else:
                reference_s, own_s = _seconds(part.run_reference), _seconds(part.run)
            if number:
                taken[name].append((own_s, reference_s))
    return taken


def main() -> None:
    """Print the table."""
    given = _parser().parse_args()
    with (
        tempfile.TemporaryDirectory(dir=given.directory) as scratch,
        joined_ranks(deadline_s=DEADLINE_S, num_threads=given.threads) as ranks,
    ):
        model, folder = Path(scratch, "model"), Path(scratch, "weights")
        make_model(model, hidden=given.hidden, layers=given.layers, vocab=WORDS)
        settings = Settings(
            model=ModelSettings(path=str(model), dtype="bfloat16"), trainer=TrainerSettings(num_threads=given.threads)
        )
        engine = FsdpEngine.for_run(settings, ranks)
        bench = Bench(engine, ranks, folder, bucket_bytes=settings.inference.bucket_bytes)
        with bench.receiving() as group, bench.connected() as connection:
            parts = bench.parts(group, connection)
            taken = measure(parts, rounds=given.rounds)
    print(f"{bench.num_bytes / 2e6:,.0f} million parameters, {bench.num_bytes / 1e6:,.0f} MB, {given.rounds} rounds")
    print(f"{'':8} {'GB/s':>6} {'ratio':>6}  of")
    for name, rounds in taken.items():
        rate = bench.num_bytes / statistics.median(own_s for own_s, _ in rounds) / 1e9
        ratios = sorted(own_s / reference_s for own_s, reference_s in rounds)
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        reference = bench.num_bytes / statistics.median(reference_s for _, reference_s in rounds) / 1e9
        said = f"{parts[name].reference} at {reference:.2f} GB/s ({spread})"
        print(f"{name:8} {rate:6.2f} {statistics.median(ratios):6.2f}  {said}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--directory", help="on the disk that is measured; else a temporary one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    main()
