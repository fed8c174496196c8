"""Train the same off-policy batch on one rank and in several layouts, and compare every gradient and every change.

    python tools/compare_layouts.py
    python tools/compare_layouts.py --layouts fsdp2,tensor,fsdp2+tensor --model configs/models/tiny --steps 3
    python tools/compare_layouts.py --layouts replicas,tensor --critic
    CUDA_VISIBLE_DEVICES= python tools/compare_layouts.py --batch B --reference R --layouts ''  # on the CPU alone
    python tools/compare_layouts.py --batch B --reference R --dtype bfloat16 --steps 1 --tolerance 0.1

The batch is random sequences whose behaviour logprobs come from weights a step away; ``--batch`` keeps it in a file,
and takes it from there when the file is there; ``--reference`` does so with what one rank makes of it. With
``--critic`` a critic is trained on it too, towards random returns.
Prints for each model and layout the largest relative difference, over all parameters, of the unclipped gradients of
the steps and of the change over all of them, and what it is of; exits with 1 when one is over the tolerance. In
bfloat16 the changes are printed and not judged: Adam's first ones are the signs of gradients, however small these are.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from areal_async.config.settings import AlgorithmSettings, ModelSettings, Settings, TrainerSettings
from areal_async.process.host import LOOPBACK, free_port
from areal_async.trainer.engine.critic import CriticEngine
from areal_async.trainer.engine.parallel.ranks import Ranks, joined_ranks
from areal_async.trainer.engine.parallel.resharder import decode_rows, encode_rows
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.packing.pack import balance
from areal_async.trainer.packing.rows import RETURNS, VALUES, TrainRow, with_columns

Named = dict[str, Tensor]
Launch = Callable[[argparse.Namespace, int, Path], None]
"""(the chosen layouts, number of ranks, folder for what comes of it)"""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "fsdp2": (2, {}),
    "replicas": (2, {"replicas": 2}),
    "tensor": (2, {"tensor_parallel": 2}),
    "pipeline": (2, {"pipeline_parallel": 2}),
    "interleaved": (2, {"pipeline_parallel": 2, "pipeline_schedule": "interleaved"}),
    "fsdp2+replicas": (4, {"replicas": 2}),
    "fsdp2+tensor": (4, {"tensor_parallel": 2}),
    "fsdp2+pipeline": (4, {"pipeline_parallel": 2}),
    "replicas+tensor": (4, {"replicas": 2, "tensor_parallel": 2}),
    "tensor+pipeline": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
}
"""Number of ranks and settings of the trainer, by name."""


def main() -> int:
    """Be the only rank and compare with others, or be one of those."""
    arguments = parser().parse_args()
    with joined_ranks(deadline_s=arguments.deadline_s) as ranks:
        if arguments.output is None:
            return compare(arguments, ranks)
        train_layouts(ranks, arguments, arguments.output)
        return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=_layouts, default=list(LAYOUTS), help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--model", type=Path, default=Path("configs/models/tiny"), help="Hugging Face folder")
    parser.add_argument("--batch", type=Path, help="file that keeps the batch")
    parser.add_argument("--reference", type=Path, help="file that keeps what one rank makes of the batch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the layouts")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=96, help="of the longest sequence")
    parser.add_argument("--minibatches", type=int, default=1, help="optimizer updates per step")
    parser.add_argument("--critic", action="store_true", help="train a critic too")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--deadline-s", type=float, default=300.0, help="for the ranks of one number to finish")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    return parser


def train_layouts(ranks: Ranks, arguments: argparse.Namespace, output: Path) -> None:
    """Train in each of the layouts on these ranks; the first one writes what comes of it into ``output``."""
    for layout in arguments.layouts:
        chosen = {"dtype": arguments.dtype} | LAYOUTS[layout][1]
        results = {role: train(role, arguments, ranks, chosen) for role in roles(arguments)}
        if ranks.rank == 0:
            torch.save(results, output / layout)


def compare(arguments: argparse.Namespace, alone: Ranks, *, launch: Launch | None = None) -> int:
    """Record or read the batch, train it here and in each layout, and return the exit status.

    Args:
        launch: has some ranks call ``train_layouts``; None starts a process for each.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.batch is None:
            arguments.batch = Path(scratch, "batch")
        if not arguments.batch.exists():
            arguments.batch.write_bytes(encode_rows(_recorded(arguments, alone)))
        expected = _expected(arguments, alone)
        worst = 0.0
        print(f"{'model':7} {'layout':16} {'ranks':>5}  {'gradients':>9}  {'changes':>9}  largest of")
        for num_ranks in sorted({LAYOUTS[layout][0] for layout in arguments.layouts}):
            layouts = [layout for layout in arguments.layouts if LAYOUTS[layout][0] == num_ranks]
            chosen = argparse.Namespace(**vars(arguments) | {"layouts": layouts})
            (launch or _launch)(chosen, num_ranks, Path(scratch))
            for layout in layouts:
                found = torch.load(Path(scratch, layout), weights_only=True)
                differences = [
                    _judge(role, layout, expected[role], found[role], arguments.dtype) for role in roles(arguments)
                ]
                worst = max(worst, *differences)
        # A comparison with NaN is never under the tolerance.
        is_close = worst <= arguments.tolerance
        print(f"all layouts {'agree with' if is_close else 'DIFFER from'} one rank: largest difference {worst:.2e}")
        return 0 if is_close else 1


def _expected(arguments: argparse.Namespace, alone: Ranks) -> dict[str, Named]:
    """Return what one rank makes of the batch in float32, by role: here, or where it was made before."""
    if arguments.reference is not None and arguments.reference.exists():
        found: dict[str, Named] = torch.load(arguments.reference, weights_only=True)
        return found
    made = {role: train(role, arguments, alone, {}) for role in roles(arguments)}
    if arguments.reference is not None:
        torch.save(made, arguments.reference)
    return made


def roles(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the models that are trained."""
    return ("policy", "critic") if arguments.critic else ("policy",)


def train(role: str, arguments: argparse.Namespace, ranks: Ranks, layout: dict[str, Any]) -> Named:
    """Return each parameter's gradients and its change, by ``<step> <name>`` and ``change <name>``, on rank 0."""
    settings = _settings(arguments, num_ranks=ranks.size, **layout)
    engine = CriticEngine(settings, ranks) if role == "critic" else FsdpEngine.for_run(settings, ranks)
    rows = decode_rows(arguments.batch.read_bytes())
    data = engine.dims.data
    mine = [rows[place] for place in balance([row.num_tokens for row in rows], num_ranks=data.size)[data.rank]]
    results: Named = {}

    def keep(number: int) -> Callable[[Named], None]:
        return lambda gradients: results.update({f"{number} {name}": one for name, one in gradients.items()})

    before = engine.full_parameters()
    for step in range(1, arguments.steps + 1):
        engine.watch_gradients(keep(step))
        _train_step(engine, mine, step=step, steps=arguments.steps)
    after = engine.full_parameters()
    return results | {f"change {name}": after[name] - before[name] for name in after}


def _train_step(engine: CriticEngine | FsdpEngine, rows: list[TrainRow], *, step: int, steps: int) -> None:
    if isinstance(engine, FsdpEngine):
        engine.train_step(rows, step=step, total_steps=steps)
        return
    returns = [np.random.default_rng(row.index).normal(size=row.num_tokens) for row in rows]
    rows = with_columns(rows, {VALUES: engine.values(rows), RETURNS: returns})
    engine.train_step(rows, step=step, total_steps=steps)


def _settings(
    arguments: argparse.Namespace, *, dtype: Literal["float32", "bfloat16"] = "float32", **trainer: Any
) -> Settings:
    return Settings(
        model=ModelSettings(path=str(arguments.model), dtype=dtype),
        algorithm=AlgorithmSettings(decoupled=True, num_minibatches=arguments.minibatches),
        trainer=TrainerSettings.model_validate(
            {"lr": arguments.lr, "token_budget": 4 * arguments.max_tokens} | trainer
        ),
    )


def _judge(role: str, layout: str, expected: Named, found: Named, dtype: str) -> float:
    """Print a layout's line and return the largest difference that counts."""
    differences = {name: _difference(one, found[name]) for name, one in expected.items()}
    judged = [name for name in differences if dtype == "float32" or not name.startswith("change ")]
    worst = max(judged, key=lambda name: (differences[name] != differences[name], differences[name]))
    changes = max(value for name, value in differences.items() if name.startswith("change "))
    gradients = max(value for name, value in differences.items() if not name.startswith("change "))
    print(f"{role:7} {layout:16} {LAYOUTS[layout][0]:5}  {gradients:9.2e}  {changes:9.2e}  {worst}")
    return differences[worst] if differences[worst] == differences[worst] else float("inf")


def _difference(expected: Tensor, found: Tensor) -> float:
    return float(torch.linalg.norm(found.cpu() - expected.cpu()) / torch.linalg.norm(expected.cpu()).clamp(min=1e-30))


def _launch(arguments: argparse.Namespace, num_ranks: int, output: Path) -> None:
    """Run this file once per rank and wait for all of them."""
    given = vars(arguments) | {"output": output, "layouts": ",".join(arguments.layouts)}
    flags = ["--critic"] * given.pop("critic")
    given = {name: value for name, value in given.items() if value is not None}
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))] + flags
    shared = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    shared["PYTHONPATH"] = os.pathsep.join(sys.path)
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, *options],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_ranks)
    ]
    try:
        statuses = [worker.wait(timeout=arguments.deadline_s) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(statuses):
        sys.exit(f"training on {num_ranks} ranks: got exit statuses {statuses}, need 0")


def _recorded(arguments: argparse.Namespace, alone: Ranks) -> list[TrainRow]:
    """Return random sequences with the logprobs of weights that have moved, so that a step is off-policy."""
    engine = FsdpEngine.for_run(_settings(arguments), alone)
    rows = _random_rows(arguments, vocab_size=engine.vocab_size)
    engine.train_step(rows, step=1, total_steps=1)
    behave = [row.numpy() for row in engine.logprobs(rows)]
    return [replace(row, behave_logprobs=one) for row, one in zip(rows, behave, strict=True)]


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
                temperature=random.uniform(0.6, 1.4, length).astype(np.float32),
                index=index,
            )
        )
    return rows


def _layouts(given: str) -> list[str]:
    if not given:
        return []
    unknown = [name for name in given.split(",") if name not in LAYOUTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"got {unknown[0]}, need some of {', '.join(LAYOUTS)}")
    return given.split(",")


if __name__ == "__main__":
    sys.exit(main())
