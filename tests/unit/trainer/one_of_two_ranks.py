"""What each of two ranks does in ``test_ranks.py``."""

import os
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from areal_async.errors import PipelineError
from areal_async.trainer.engine.checkpoint import ACTOR, CheckpointWriter
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.division import divide
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.packing.flops import DecoderFlops
from areal_async.trainer.packing.rows import TrainRow
from tests.unit.trainer.models import engine_of, random_rows
from tests.unit.trainer.one_of_two_senders import send_together


def speak_and_train(ranks: Ranks, model: Path, directory: Path) -> dict[str, Any]:
    """Speak to the other rank, then train beside it: each with rows, then all rows on one; last, broadcast."""
    is_first = ranks.rank == 0
    words: dict[str, Any] = {
        "broadcast": ranks.broadcast_bytes(b"\x00from the first\xff" if is_first else None).hex(),
        "empty": ranks.broadcast_bytes(b"" if is_first else None).hex(),
        "gather": [part.hex() for part in ranks.gather_bytes(b"" if is_first else b"abc")],
        "all_true": ranks.all_agree(True),
        "one_false": ranks.all_agree(is_first),
    }
    words["uneven"] = _lengths_of_rows([5, 5, 1, 1] if is_first else [10, 2], ranks)
    words["even"] = _lengths_of_rows([5, 5, 1, 1] if is_first else [6, 6], ranks)
    engine = engine_of(model, ranks)
    rows = random_rows(7)
    stats = [
        engine.train_step(rows[:5] if is_first else rows[5:], step=1, total_steps=2),
        engine.train_step([] if is_first else rows, step=2, total_steps=2),
    ]
    Engines(actor=engine).save_checkpoint(directory / "checkpoint", b"ledger")
    hashes = engine.save_weights(directory / "weights")
    logprobs = engine.logprobs(rows[:1] if is_first else [])
    words |= {"stats": [asdict(one) for one in stats], "hashes": hashes, "num_logprobs": len(logprobs)}
    words["ledger"] = Engines(actor=engine).load_checkpoint(directory / "checkpoint").decode()
    words["refused"] = _refusal_in(model / "config.json" / "1-1", engine)
    words["beside"] = _write_beside_steps(directory / "beside", engine, rows if is_first else [], ranks)
    send_together(model, directory, ranks)
    return words


def _refusal_in(directory: Path, engine: FsdpEngine) -> str:
    """Say why no checkpoint can be written where only the first rank tries to make its folder."""
    try:
        Engines(actor=engine).save_checkpoint(directory, b"")
    except PipelineError as exc:
        return str(exc)
    return ""


def _write_beside_steps(directory: Path, engine: FsdpEngine, rows: list[TrainRow], ranks: Ranks) -> list[str]:
    """Write checkpoints while steps train, and other words are exchanged; load each, and return their ledgers.

    Nothing but the order within each thread is the same on both ranks.
    """
    writer, ledgers = CheckpointWriter(ranks), []
    for step in (3, 4):
        writer.stage({ACTOR: engine.trained})
        staged = {name: float(tensor.norm()) for name, tensor in engine.full_parameters().items()}
        writing = threading.Thread(target=writer.write, args=(directory / str(step), f"step {step}".encode()))
        writing.start()
        for _ in range(3):
            engine.train_step(rows, step=step, total_steps=4)
            ranks.all_agree(True)
        writing.join()
        ledgers.append(Engines(actor=engine).load_checkpoint(directory / str(step)).decode())
        loaded = {name: float(tensor.norm()) for name, tensor in engine.full_parameters().items()}
        assert loaded == staged, "a step was written into what it goes on from"
    return ledgers


def interface_of_gloo(ranks: Ranks) -> str | None:
    """Return where this rank's groups listen."""
    ranks.all_agree(True)
    return os.environ.get("GLOO_SOCKET_IFNAME")


def _lengths_of_rows(lengths: Sequence[int], ranks: Ranks) -> list[list[int]]:
    """Divide sequences whose cost is their length into rows of 10 tokens."""
    rows = [
        TrainRow(
            token_ids=np.zeros(length, np.int32),
            loss_mask=np.arange(length) > 0,
            behave_logprobs=np.zeros(length, np.float32),
            advantage=1.0,
            current_mask=np.zeros(length, np.bool_),
        )
        for length in lengths
    ]
    linear = DecoderFlops(per_token=1, per_scored_token=0, per_pair=0)
    return [[lengths[i] for i in row] for row in divide(rows, flops=linear, token_budget=10, ranks=ranks)]
