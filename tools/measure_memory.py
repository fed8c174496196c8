"""A rank's memory as preflight estimates it and as it is: 1, 2 and 4 ranks on this CPU, which train a random model.

Each loads it, trains a step of two packed rows, copies a checkpoint, keeps its part of a version, trains the next step
beside both, and writes them. Said of the rank that took most: bytes that the C library has given out at once, anonymous
resident memory, both above that of a process that has imported all and trained a model of no size, and the ratio of
the estimate to either.

python -m tools.measure_memory
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from areal_async.config.settings import AlgorithmSettings, ModelSettings, Settings, TrainerSettings
from areal_async.doctor.preflight.memory import ModelSize
from areal_async.process.freed_memory import ARENAS
from areal_async.process.host import LOOPBACK, free_port
from areal_async.protocol.types import Version
from areal_async.trainer.engine.checkpoint import CheckpointWriter
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks, joined_ranks
from areal_async.trainer.output.served import ServedWeights
from areal_async.trainer.packing.rows import TrainRow

SAMPLE_S = 0.002
MB = 1e6
LOAD = "load"
T = TypeVar("T")


class Meter(Protocol):
    """Says what is there at most while something is done."""

    def take(self, phase: str, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, and note what was there at most meanwhile."""


class TorchMeter:
    """Counts what torch allocates, from when it is made: exactly, and of the calling thread alone."""

    def __init__(self) -> None:
        self._held = 0
        self.most: dict[str, int] = {}
        """Bytes in each phase."""

    def take(self, phase: str, work: Callable[[], T]) -> T:
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            result = work()
        events: Any = seen.profiler
        most = self._held
        for event in sorted(events.kineto_results.events(), key=lambda one: one.start_ns()):
            if event.name() == "[memory]":
                self._held += event.nbytes()
                most = max(most, self._held)
        self.most[phase] = most
        return result


class ProcessMeter:
    """Samples what the C library has given out, whoever asked, and what is resident, from when it is made."""

    def __init__(self) -> None:
        gc.collect()
        LIBC.malloc_trim(0)  # what is kept of before is not to hide what is kept from now on
        self._base = self._now()
        self.most: dict[str, tuple[int, int]] = {}
        """Bytes given out, and resident ones, in each phase."""

    def take(self, phase: str, work: Callable[[], T]) -> T:
        gc.collect()
        seen, is_over = [self._now()], threading.Event()

        def watch() -> None:
            while not is_over.wait(SAMPLE_S):
                seen.append(self._now())

        watcher = threading.Thread(target=watch)
        watcher.start()
        result = work()
        is_over.set()
        watcher.join()
        given, resident = (max(column) - base for column, base in zip(zip(*seen, strict=True), self._base, strict=True))
        self.most[phase] = given, resident
        return result

    def _now(self) -> tuple[int, int]:
        now = LIBC.mallinfo2()
        return now.uordblks + now.hblkhd, _anonymous_bytes()


class _Mallinfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns: ``uordblks`` of its heaps are given out, and ``hblkhd`` as mappings."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


LIBC = ctypes.CDLL(None)


def _anonymous_bytes() -> int:
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def make_model(folder: Path, *, hidden: int, layers: int, vocab: int) -> None:
    """Write a random decoder of Qwen2's shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=vocab, hidden_size=hidden, intermediate_size=hidden * 11 // 4 // 8 * 8,
        num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=max(hidden // 256, 1),
        tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def settings_of(model: Path, *, num_ranks: int, tokens: int, dtype: str) -> Settings:
    """Return the settings that are estimated and measured."""
    return Settings(
        model=ModelSettings.model_validate({"path": str(model), "dtype": dtype}),
        algorithm=AlgorithmSettings(),
        trainer=TrainerSettings.model_validate({"num_ranks": num_ranks, "token_budget": tokens}),
    )


def measure(ranks: Ranks, settings: Settings, meter: Meter, rows: Sequence[TrainRow] = ()) -> None:
    """Be a rank, phase by phase.

    Args:
        rows: of two full packed rows; none for answers of 256 tokens.
    """
    rows = rows or _rows(settings.trainer.token_budget)
    engines: Engines = meter.take(LOAD, lambda: Engines.for_run(settings, ranks))
    actor, writer = engines.actor, CheckpointWriter(ranks)
    weights = ServedWeights(actor, bucket_bytes=settings.inference.bucket_bytes)
    meter.take("step", lambda: actor.train_step(rows, step=1, total_steps=2))
    meter.take("checkpoint", lambda: writer.stage(engines.trained))
    version = meter.take("version", weights.gather)
    meter.take("next step", lambda: actor.train_step(rows, step=2, total_steps=2))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(json.loads(ranks.broadcast_bytes(json.dumps(name).encode() if ranks.rank == 0 else None)))
        meter.take("version written", lambda: weights.write(version, Version(1, 1), folder, ranks))
        meter.take("checkpoint written", lambda: writer.write(folder / "1-1", b""))
        ranks.all_agree(True)


def _rows(tokens: int) -> list[TrainRow]:
    """Return two full packed rows of answers of 256 tokens."""
    random, length = np.random.default_rng(0), min(256, tokens)
    return [
        TrainRow(
            token_ids=random.integers(0, 500, length).astype(np.int32),
            loss_mask=np.arange(length) >= 1,
            behave_logprobs=random.normal(-7, 0.1, length).astype(np.float32),
            advantage=float(random.normal()),
            current_mask=np.arange(length) >= 1,
            index=index,
        )
        for index in range(2 * (tokens // length))
    ]


def _be_a_rank(model: Path, tiny: Path, *, tokens: int, dtype: str) -> None:
    LIBC.mallinfo2.restype = _Mallinfo
    with joined_ranks(deadline_s=600.0) as ranks:
        for folder, size in ((tiny, 64), (model, tokens)):  # imports, kernels and groups are there after the first
            settings = settings_of(folder, num_ranks=ranks.size, tokens=size, dtype=dtype)
            meter = ProcessMeter()
            measure(ranks, settings, meter)
        every = [json.loads(one) for one in ranks.gather_bytes(json.dumps(meter.most).encode())]
        if ranks.rank == 0:
            print(json.dumps(every))


def run_ranks(num_ranks: int, *given: str) -> list[dict[str, list[int]]]:
    """Return the phases of each rank."""
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    shared[ARENAS] = "1"  # as a trainer's have it
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tools.measure_memory", "--as-rank", *given],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(num_ranks)
    ]
    out, _ = processes[0].communicate()
    if any(one.wait() for one in processes):
        raise SystemExit(1)
    phases: list[dict[str, list[int]]] = json.loads(out.splitlines()[-1])
    return phases


def main() -> None:
    """Print a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--as-rank", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        _be_a_rank(*given.as_rank, tokens=given.tokens, dtype=given.dtype)
        return
    with tempfile.TemporaryDirectory() as name:
        model, tiny = Path(name, "model"), Path(name, "tiny")
        make_model(model, hidden=given.hidden, layers=given.layers, vocab=given.vocab)
        make_model(tiny, hidden=64, layers=1, vocab=1000)
        size = ModelSize.read(model)
        print(f"{size.num_parameters / MB:.0f} million parameters, rows of {given.tokens} tokens, {given.dtype}; in MB")
        shared = [str(model), str(tiny), "--tokens", str(given.tokens), "--dtype", given.dtype]
        for num_ranks in given.ranks:
            phases = most_of(run_ranks(num_ranks, *shared))
            settings = settings_of(model, num_ranks=num_ranks, tokens=given.tokens, dtype=given.dtype)
            parts = host_parts(size, settings)
            print(f"\n{num_ranks} ranks: " + ", ".join(f"{name} {part / MB:.0f}" for name, part in parts.items()))
            for phase, (taken, resident) in phases.items():
                print(f"  {phase:20} {taken / MB:8.0f} given out {resident / MB:8.0f} resident")
            most, estimate = [max(column) for column in zip(*phases.values(), strict=True)], sum(parts.values())
            told = ", ".join(f"{estimate / one:.2f} of {one / MB:.0f}" for one in most)
            print(f"  estimate {estimate / MB:.0f}: {told}", flush=True)


def host_parts(size: ModelSize, settings: Settings) -> dict[str, float]:
    """Return what preflight says of a rank without a GPU."""
    trainer, dtype = settings.trainer, settings.model.dtype
    beside = {"copies": size.copies_bytes(trainer, dtype=dtype), "version": size.version_bytes(trainer, dtype=dtype)}
    return size.trainer_parts(trainer, dtype=dtype) | beside


def most_of(every: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    """Return for each phase what the rank takes that takes most."""
    return {phase: [max(column) for column in zip(*(one[phase] for one in every), strict=True)] for phase in every[0]}


if __name__ == "__main__":
    main()
