"""A rank's memory as preflight estimates it and as it is: 1, 2 and 4 ranks on this CPU, which train a random model.

Each loads it, trains a step of two packed rows, copies a checkpoint, keeps its part of a version, trains the next step
beside both, and writes them. Said of the rank that took most: bytes that torch has had at once, anonymous resident
memory above that of a process that has imported all and trained a model of no size, and the ratio of the estimate to
either. ``MALLOC_MMAP_THRESHOLD_`` shows what glibc keeps of freed blocks.

python -m tools.measure_memory
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from areal_async.config.settings import AlgorithmSettings, ModelSettings, Settings, TrainerSettings
from areal_async.doctor.preflight.memory import ModelSize
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


class Meter:
    """Counts from when it is made: what torch has, or what is resident, as the one takes some of the other."""

    def __init__(self, *, is_resident: bool) -> None:
        gc.collect()
        self._is_resident = is_resident
        self._base, self._held = _anonymous_bytes(), 0
        self.most: dict[str, int] = {}
        """Bytes in each phase."""

    def take(self, phase: str, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, and note what was there at most meanwhile."""
        gc.collect()
        result, most = (self._watch if self._is_resident else self._count)(work)
        self.most[phase] = most
        return result

    def _watch(self, work: Callable[[], T]) -> tuple[T, int]:
        seen, is_over = [_anonymous_bytes()], threading.Event()

        def watch() -> None:
            while not is_over.wait(SAMPLE_S):
                seen.append(_anonymous_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        result = work()
        is_over.set()
        watcher.join()
        return result, max(seen) - self._base

    def _count(self, work: Callable[[], T]) -> tuple[T, int]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            result = work()
        events: Any = seen.profiler
        held = most = self._held
        for event in sorted(events.kineto_results.events(), key=lambda one: one.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        self._held = held
        return result, most


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


def measure(ranks: Ranks, settings: Settings, *, is_resident: bool) -> dict[str, int]:
    """Return what this rank takes in each phase."""
    meter, tokens = Meter(is_resident=is_resident), settings.trainer.token_budget
    rows = _rows(tokens)
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
    return meter.most


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


def _be_a_rank(model: Path, tiny: Path, *, tokens: int, dtype: str, is_resident: bool) -> None:
    with joined_ranks(deadline_s=600.0) as ranks:
        for folder, size in ((tiny, 64), (model, tokens)):  # imports, kernels and groups are there after the first
            settings = settings_of(folder, num_ranks=ranks.size, tokens=size, dtype=dtype)
            phases = measure(ranks, settings, is_resident=is_resident)
        every = [json.loads(one) for one in ranks.gather_bytes(json.dumps(phases).encode())]
        if ranks.rank == 0:
            print(json.dumps(every))


def run_ranks(num_ranks: int, *given: str) -> list[dict[str, int]]:
    """Return the phases of each rank."""
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    shared["KINETO_LOG_LEVEL"] = "99"
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
    phases: list[dict[str, int]] = json.loads(out.splitlines()[-1])
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
    parser.add_argument("--resident", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        _be_a_rank(*given.as_rank, tokens=given.tokens, dtype=given.dtype, is_resident=given.resident)
        return
    with tempfile.TemporaryDirectory() as name:
        model, tiny = Path(name, "model"), Path(name, "tiny")
        make_model(model, hidden=given.hidden, layers=given.layers, vocab=given.vocab)
        make_model(tiny, hidden=64, layers=1, vocab=1000)
        size = ModelSize.read(model)
        print(f"{size.num_parameters / MB:.0f} million parameters, rows of {given.tokens} tokens, {given.dtype}; in MB")
        shared = [str(model), str(tiny), "--tokens", str(given.tokens), "--dtype", given.dtype]
        for num_ranks in given.ranks:
            allocated, resident = (most_of(run_ranks(num_ranks, *shared, *extra)) for extra in ([], ["--resident"]))
            settings = settings_of(model, num_ranks=num_ranks, tokens=given.tokens, dtype=given.dtype)
            parts = host_parts(size, settings)
            print(f"\n{num_ranks} ranks: " + ", ".join(f"{name} {part / MB:.0f}" for name, part in parts.items()))
            for phase, num_bytes in resident.items():
                print(f"  {phase:20} {allocated[phase] / MB:8.0f} allocated {num_bytes / MB:8.0f} resident")
            # What a file that is read is mapped to counts as allocated, and is not the process's own.
            most = max(num_bytes for phase, num_bytes in allocated.items() if phase != LOAD), max(resident.values())
            estimate = sum(parts.values())
            told = ", ".join(f"{estimate / one:.2f} of {one / MB:.0f}" for one in most)
            print(f"  estimate {estimate / MB:.0f}: {told}", flush=True)


def host_parts(size: ModelSize, settings: Settings) -> dict[str, float]:
    """Return what preflight says of a rank without a GPU."""
    trainer, dtype = settings.trainer, settings.model.dtype
    beside = {"copies": size.copies_bytes(trainer), "version": size.version_bytes(trainer, dtype=dtype)}
    return size.trainer_parts(trainer, dtype=dtype) | beside


def most_of(every: list[dict[str, int]]) -> dict[str, int]:
    """Return for each phase what the rank takes that takes most."""
    return {phase: max(one[phase] for one in every) for phase in every[0]}


if __name__ == "__main__":
    main()
