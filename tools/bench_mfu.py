"""Measure how much of a GPU the trainer uses: model FLOPs utilisation (MFU) by model and length of sequences.

    python -m tools.bench_mfu                                # Qwen3 0.6B and Qwen2.5 1.5B, 4k to 32k tokens, bfloat16
    python -m tools.bench_mfu --peak-tflops 312              # of a device that is not in the table: no MFU else

Random weights of the published shapes, so nothing is downloaded. A round is one optimizer update of the engine on
``--rows`` packed rows of one sequence each, half of it prompt. MFU is the operations of forward and backward pass
(``trainer.flops``: causal attention counted once, recomputation not at all) by the seconds of the round and the
device's peak of dense operations. Source: Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, appendix B.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_async.config.settings import AlgorithmSettings, ModelSettings, RolloutSettings, Settings, TrainerSettings
from areal_async.trainer.engine.parallel.ranks import Ranks, joined_ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.packing.rows import TrainRow

SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "1.5B": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
    },
    "tiny": {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    },
}  # fmt: skip
"""Dimensions as published with Qwen3-0.6B and Qwen2.5-1.5B; ``tiny`` shows on a CPU that the tool works."""
PEAK_TFLOPS = {"H200": 989.4, "H100 PCIe": 756.0, "H100": 989.4, "A100": 312.0, "L40S": 362.0, "L4": 121.0}
"""Dense bfloat16 on tensor cores, from NVIDIA's data sheets, which print twice as much for sparse matrices."""


def main(given: Sequence[str] | None = None) -> None:
    """Print a line for each model and length; one that does not fit into memory says so."""
    arguments = _parser().parse_args(given)
    with joined_ranks(deadline_s=600.0) as ranks:
        peak = arguments.peak_tflops or _peak_tflops(ranks.device)
        print(f"{'model':<5} {'tokens':>7} {'tok/s':>10} {'lowest':>10} {'highest':>10} {'MFU':>6} {'peak GB':>8}")
        for name in arguments.models:
            for num_tokens in arguments.tokens:
                with tempfile.TemporaryDirectory() as folder:
                    print(
                        f"{name:<5} {num_tokens:>7,} {_measure(Path(folder), name, num_tokens, peak, arguments, ranks)}"
                    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["0.6B", "1.5B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 16384, 32768], help="of one sequence")
    parser.add_argument("--rows", type=int, default=4, help="micro-batches of an update")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--keep-activations", action="store_true", help="instead of recomputing them")
    parser.add_argument("--peak-tflops", type=float, help="of the device; known ones need none")
    return parser


def _peak_tflops(device: torch.device) -> float:
    """Return the device's peak; infinity for one that is not in the table, which is said."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    found = next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)
    if found is None:
        print(f"{name}: of unknown peak, so without MFU (--peak-tflops); known are {', '.join(PEAK_TFLOPS)}")
    return found or math.inf


def _measure(
    folder: Path, name: str, num_tokens: int, peak_tflops: float, arguments: argparse.Namespace, ranks: Ranks
) -> str:
    settings = Settings(
        model=ModelSettings(path=str(_save(folder, name, num_tokens)), dtype=arguments.dtype),
        algorithm=AlgorithmSettings(decoupled=False),
        rollout=RolloutSettings(max_staleness=0),
        trainer=TrainerSettings(token_budget=num_tokens, activation_checkpointing=not arguments.keep_activations),
    )
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        engine = FsdpEngine.for_run(settings, ranks)
        rows = list(_rows(num_tokens, arguments.rows, engine.vocab_size))
        times_s = [_time_s(engine, rows, ranks) for _ in range(arguments.rounds + 1)][1:]
    except torch.OutOfMemoryError:
        return "out of memory"
    work = sum(engine.flops.train(row.num_tokens, int(row.loss_mask.sum())) for row in rows)
    rates = [num_tokens * len(rows) / took for took in times_s]
    utilisation = f"{work / statistics.median(times_s) / (peak_tflops * 1e12):.1%}" if peak_tflops < math.inf else "?"
    peak_gb = torch.cuda.max_memory_allocated() / 1e9 if ranks.device.type == "cuda" else 0.0
    return (
        f"{statistics.median(rates):>10,.0f} {min(rates):>10,.0f} {max(rates):>10,.0f} {utilisation:>6} {peak_gb:>8.1f}"
    )


def _save(folder: Path, name: str, num_tokens: int) -> Path:
    """Write a random model of the shape, with room for the sequences."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(SHAPES[name])
    config = AutoConfig.for_model(
        shape.pop("model_type"), **shape, tie_word_embeddings=True, max_position_embeddings=num_tokens
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def _rows(num_tokens: int, count: int, vocab_size: int) -> Iterator[TrainRow]:
    chance = np.random.default_rng(0)
    mask = np.arange(num_tokens) >= num_tokens // 2
    for index in range(count):
        yield TrainRow(
            token_ids=chance.integers(0, vocab_size, num_tokens).astype(np.int32),
            loss_mask=mask,
            behave_logprobs=np.full(num_tokens, -np.log(vocab_size), np.float32),
            advantage=float(chance.normal()),
            current_mask=mask,
            index=index,
        )


def _time_s(engine: FsdpEngine, rows: Sequence[TrainRow], ranks: Ranks) -> float:
    """Return the seconds of an update; the statistics it returns wait for the device."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    engine.train_step(rows, step=1, total_steps=1)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
