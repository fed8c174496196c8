"""Train the same off-policy batch on one rank and on several, and compare what comes out.

    python tools/compare_ranks.py
    python tools/compare_ranks.py --model configs/models/tiny --ranks 3 --steps 3 --batch batch.npz

    python tools/compare_ranks.py --critic

The batch is random sequences whose behaviour logprobs come from perturbed weights; ``--batch`` keeps it in a file,
and takes it from there when the file is there. With ``--critic`` a critic is trained on it, towards random returns.
Prints the relative difference of every step's unclipped gradient
norm and of every parameter's change over all steps; exits with 1 when one is over the tolerance.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from areal_async.host import LOOPBACK, free_port
from areal_async.settings import AlgorithmSettings, ModelSettings, Settings, TrainerSettings
from areal_async.trainer.critic import CriticEngine
from areal_async.trainer.distributed import Ranks, joined_ranks
from areal_async.trainer.engine import FsdpEngine
from areal_async.trainer.pack import balance
from areal_async.trainer.rows import RETURNS, VALUES, TrainRow, with_columns

PERTURBATION = 0.05
"""Standard deviation of the noise on the weights that sampled, relative to each tensor's own."""
Arrays = dict[str, NDArray[Any]]
ARRAYS = ("token_ids", "loss_mask", "behave_logprobs", "advantage", "current_mask")


def main() -> int:
    """Be the only rank and compare with others, or be one of those."""
    arguments = parser().parse_args()
    with joined_ranks(deadline_s=arguments.deadline_s) as ranks:
        if arguments.output is None:
            return compare(arguments, ranks)
        changes: Any = _train(arguments, ranks)
        if ranks.rank == 0:
            np.savez(arguments.output, **changes)
        return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("configs/models/tiny"), help="Hugging Face folder")
    parser.add_argument("--batch", type=Path, help="file that keeps the batch")
    parser.add_argument("--ranks", type=int, default=2, help="compared with one")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=96, help="of the longest sequence")
    parser.add_argument("--minibatches", type=int, default=1, help="optimizer updates per step")
    parser.add_argument("--critic", action="store_true", help="train a critic instead of the policy")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--deadline-s", type=float, default=300.0, help="for the ranks to finish")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    return parser


def compare(arguments: argparse.Namespace, alone: Ranks) -> int:
    """Record or read the batch, train it here and on several ranks, and return the exit status."""
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.batch is None:
            arguments.batch = Path(scratch, "batch.npz")
        if not arguments.batch.exists():
            _record(arguments, alone, perturbed=Path(scratch, "perturbed"))
        changes = _train(arguments, alone)
        output = Path(scratch, "together.npz")
        _launch(arguments, output=output)
        with np.load(output) as arrays:
            return _judge(changes, dict(arrays), arguments)


def _launch(arguments: argparse.Namespace, *, output: Path) -> None:
    """Run this file once per rank and wait for all of them."""
    given = vars(arguments) | {"output": output}
    flags = ["--critic"] * given.pop("critic")
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))] + flags
    address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, *options],
            env=os.environ
            | address
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.ranks)}
            | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(arguments.ranks)
    ]
    try:
        statuses = [worker.wait(timeout=arguments.deadline_s) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(statuses):
        sys.exit(f"training on {arguments.ranks} ranks: got exit statuses {statuses}, need 0")


def _record(arguments: argparse.Namespace, alone: Ranks, *, perturbed: Path) -> None:
    """Write the batch, its behaviour logprobs those of weights beside the model's."""
    _perturb(arguments.model, perturbed, seed=arguments.seed)
    engine = FsdpEngine.for_run(_settings(arguments, perturbed), alone)
    rows = _random_rows(arguments, vocab_size=engine.vocab_size)
    behave = [row.numpy() for row in engine.logprobs(rows)]
    _write(arguments.batch, [replace(row, behave_logprobs=one) for row, one in zip(rows, behave, strict=True)])


def _settings(arguments: argparse.Namespace, model: Path) -> Settings:
    return Settings(
        model=ModelSettings(path=str(model), dtype="float32"),
        algorithm=AlgorithmSettings(decoupled=True, num_minibatches=arguments.minibatches),
        trainer=TrainerSettings(lr=arguments.lr, token_budget=4 * arguments.max_tokens),
    )


def _train(arguments: argparse.Namespace, ranks: Ranks) -> Arrays:
    """Return the gradient norm of each step, and on rank 0 the change of each parameter over all of them."""
    rows = _read(arguments.batch)
    mine = [rows[place] for place in balance([row.num_tokens for row in rows], num_ranks=ranks.size)[ranks.rank]]
    settings = _settings(arguments, arguments.model)
    engine = CriticEngine.for_run(settings, ranks) if arguments.critic else FsdpEngine.for_run(settings, ranks)
    before = engine.full_parameters()
    norms = [_train_step(engine, mine, step=step, steps=arguments.steps) for step in range(1, arguments.steps + 1)]
    after = engine.full_parameters()
    return {"grad_norm": np.array(norms), **{name: (after[name] - before[name]).numpy() for name in after}}


def _train_step(engine: CriticEngine | FsdpEngine, rows: list[TrainRow], *, step: int, steps: int) -> float:
    """Train once and return the gradient's norm."""
    if isinstance(engine, FsdpEngine):
        return engine.train_step(rows, step=step, total_steps=steps).grad_norm
    returns = [np.random.default_rng(row.index).normal(size=row.num_tokens) for row in rows]
    rows = with_columns(rows, {VALUES: engine.values(rows), RETURNS: returns})
    return engine.train_step(rows, step=step, total_steps=steps).value_grad_norm


def _judge(alone: Arrays, together: Arrays, arguments: argparse.Namespace) -> int:
    norms = np.abs(alone.pop("grad_norm") / together.pop("grad_norm") - 1.0)
    differences = {f"gradient norm, step {step}": float(value) for step, value in enumerate(norms, start=1)}
    for name, change in alone.items():
        differences[name] = float(np.linalg.norm(change - together[name]) / np.linalg.norm(change))
    for name, value in differences.items():
        print(f"{value:9.2e}  {name}")
    worst = max(differences, key=lambda name: differences[name])
    # A comparison with NaN is never under the tolerance.
    is_close = all(value <= arguments.tolerance for value in differences.values())
    print(
        f"1 and {arguments.ranks} ranks {'agree' if is_close else 'DIFFER'}: largest {differences[worst]:.2e}, {worst}"
    )
    return 0 if is_close else 1


def _perturb(model: Path, directory: Path, *, seed: int) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    perturbed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in perturbed.parameters():
            scale = parameter.std() if parameter.numel() > 1 else parameter.abs()
            parameter.add_(torch.randn_like(parameter) * scale * PERTURBATION)
    perturbed.save_pretrained(directory)


def _random_rows(arguments: argparse.Namespace, *, vocab_size: int) -> list[TrainRow]:
    random = np.random.default_rng(arguments.seed)
    rows = []
    for index in range(arguments.sequences):
        length = int(random.integers(4, arguments.max_tokens + 1))
        mask = np.arange(length) >= random.integers(1, length)
        rows.append(
            TrainRow(
                token_ids=random.integers(0, vocab_size, length).astype(np.int32),
                loss_mask=mask,
                behave_logprobs=np.zeros(length, dtype=np.float32),
                advantage=float(random.normal()),
                current_mask=mask & (random.random(length) < 0.5),
                index=index,
            )
        )
    return rows


def _write(path: Path, rows: list[TrainRow]) -> None:
    arrays: Any = {f"{row.index:06}.{name}": np.asarray(getattr(row, name)) for row in rows for name in ARRAYS}
    np.savez(path, **arrays)


def _read(path: Path) -> list[TrainRow]:
    with np.load(path) as arrays:
        indices = sorted({int(key.partition(".")[0]) for key in arrays})
        return [_row(index, {name: arrays[f"{index:06}.{name}"] for name in ARRAYS}) for index in indices]


def _row(index: int, arrays: Arrays) -> TrainRow:
    columns: Any = arrays | {"advantage": float(arrays["advantage"])}
    return TrainRow(**columns, index=index)


if __name__ == "__main__":
    sys.exit(main())
