"""Train the same off-policy batch on one rank and on several, or in another layout, and compare what comes out.

    python tools/compare_ranks.py
    python tools/compare_ranks.py --model configs/models/tiny --ranks 3 --steps 3 --batch batch.npz
    python tools/compare_ranks.py --critic

    python tools/compare_ranks.py --ranks 2 --trainer replicas=2        # any setting of trainer

    python tools/compare_ranks.py --resume 3 --ranks 1 --saved-by 2     # and the reverse: --ranks 2 --saved-by 1

The batch is random sequences whose behaviour logprobs come from perturbed weights; ``--batch`` keeps it in a file,
and takes it from there when the file is there. With ``--critic`` a critic is trained beside the policy, towards random
returns. With ``--resume K`` the others save a checkpoint after K steps, as ``--saved-by`` ranks, go on with it as
``--ranks`` ranks, and are compared with one rank that never stopped.

Prints, of every parameter, the relative difference of the unclipped gradient (the step where it is largest), of the
change over all compared steps, and of AdamW's averages after them; exits with 1 when one is over the tolerance.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_async.config.settings import AlgorithmSettings, ModelSettings, Settings, TrainerSettings
from areal_async.process.host import LOOPBACK, free_port
from areal_async.trainer.engine.checkpoint import ACTOR, TrainState, tensors_of
from areal_async.trainer.engine.critic import CriticEngine
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks, joined_ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.packing.pack import balance
from areal_async.trainer.packing.rows import RETURNS, VALUES, TrainRow, with_columns

PERTURBATION = 0.05
"""Standard deviation of the noise on the weights that sampled, relative to each tensor's own."""
UNCLIPPED = 1e9
"""A ``max_grad_norm`` that no gradient has."""
Arrays = dict[str, NDArray[Any]]
ARRAYS = ("token_ids", "loss_mask", "behave_logprobs", "advantage", "current_mask")


class Part(msgspec.Struct, kw_only=True):
    """A stretch of training on some ranks."""

    model: str
    batch: str
    last: int
    """Training step."""
    first: int = 1
    total: int = 0
    """Length of the learning rate's schedule; 0 for ``last``."""
    trainer: dict[str, Any] = {}
    """The trainer's settings: its layout, and what decides about updates."""
    minibatches: int = 1
    has_critic: bool = False
    load: str = ""
    """Checkpoint to begin from."""
    save: str = ""
    """Path of the checkpoint to write at the end."""
    output: str = ""
    """Every rank writes what it has of the result to ``<output>.<rank>.npz``."""


def main() -> int:
    """Be the only rank and compare with others, or be one of those."""
    arguments = parser().parse_args()
    with joined_ranks(deadline_s=arguments.deadline_s) as ranks:
        if arguments.parts is None:
            return compare(arguments, ranks)
        for part in msgspec.json.decode(arguments.parts, type=list[Part]):
            train_part(part, ranks)
        return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("configs/models/tiny"), help="Hugging Face folder")
    parser.add_argument("--batch", type=Path, help="file that keeps the batch")
    parser.add_argument("--ranks", type=int, default=2, help="compared with one")
    parser.add_argument("--trainer", action="append", default=[], metavar="NAME=VALUE", help="setting of those ranks")
    parser.add_argument("--resume", type=int, default=0, metavar="K", help="steps before a checkpoint; 0 for none")
    parser.add_argument("--saved-by", type=int, default=1, help="ranks that make the checkpoint")
    parser.add_argument(
        "--saver", action="append", default=[], metavar="NAME=VALUE", help="setting of the ranks that make it"
    )
    parser.add_argument("--steps", type=int, default=3, help="that are compared")
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=96, help="of the longest sequence")
    parser.add_argument("--minibatches", type=int, default=1, help="optimizer updates per step")
    parser.add_argument("--critic", action="store_true", help="train a critic too")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--deadline-s", type=float, default=300.0, help="for the ranks to finish")
    parser.add_argument("--parts", help=argparse.SUPPRESS)
    return parser


def compare(arguments: argparse.Namespace, alone: Ranks) -> int:
    """Record or read the batch, train it here and on other ranks, and return the exit status."""
    with tempfile.TemporaryDirectory() as scratch:
        batch = arguments.batch or Path(scratch, "batch.npz")
        common = {"lr": arguments.lr, "token_budget": 4 * arguments.max_tokens}
        if not batch.exists():
            record(
                batch,
                arguments.model,
                random_rows(
                    arguments.sequences,
                    max_tokens=arguments.max_tokens,
                    vocab_size=vocab_size(arguments.model),
                    seed=arguments.seed,
                ),
                alone,
                perturbed=Path(scratch, "perturbed"),
                seed=arguments.seed,
                trainer=common,
            )
        before = arguments.resume
        part = Part(
            model=str(arguments.model),
            batch=str(batch),
            last=before + arguments.steps,
            trainer=common,
            minibatches=arguments.minibatches,
            has_critic=arguments.critic,
        )
        compared = msgspec.structs.replace(
            part, first=before + 1, output=str(Path(scratch, "together")), trainer=common | _given(arguments.trainer)
        )
        if before:
            checkpoint = str(Path(scratch, "checkpoint"))
            saver = msgspec.structs.replace(
                part, last=before, total=part.last, save=checkpoint, trainer=common | _given(arguments.saver)
            )
            launch([saver], num_ranks=arguments.saved_by, deadline_s=arguments.deadline_s)
            compared.load = checkpoint
        launch([compared], num_ranks=arguments.ranks, deadline_s=arguments.deadline_s)
        expected = train_part(part, alone, compared_from=before + 1)
        return _judge(expected, read_output(compared, num_ranks=arguments.ranks), arguments)


def launch(parts: Sequence[Part], *, num_ranks: int, deadline_s: float) -> None:
    """Run this file once per rank, which trains these parts one after another, and wait for all of them."""
    address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    options = ["--deadline-s", str(deadline_s), "--parts", msgspec.json.encode(list(parts)).decode()]
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, *options],
            env=os.environ
            | address
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(num_ranks)
    ]
    try:
        statuses = [worker.wait(timeout=deadline_s) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(statuses):
        sys.exit(f"training on {num_ranks} ranks: got exit statuses {statuses}, need 0")


def train_part(part: Part, ranks: Ranks, *, compared_from: int | None = None) -> Arrays:
    """Train on these ranks; return what this one has of the result.

    ``gradient/<step>/<parameter>`` of the last update of each step, ``change/<parameter>`` from the first compared
    step to the last, and ``<moment>/<parameter>`` after it; a critic's parameters begin with ``critic.``.

    Args:
        compared_from: the first step that counts; ``part.first`` when left out.
    """
    settings = _settings(part, num_ranks=ranks.size)
    engines = Engines(
        actor=FsdpEngine.for_run(settings, ranks),
        critic=CriticEngine(settings, ranks) if part.has_critic else None,
    )
    trained = {"": engines.actor.trained}
    if engines.critic is not None:
        trained["critic"] = engines.critic.trained
    if part.load:
        engines.load_checkpoint(Path(part.load))
    data = engines.actor.dims.data
    rows = _read(Path(part.batch))
    mine = [rows[place] for place in balance([row.num_tokens for row in rows], num_ranks=data.size)[data.rank]]
    results: Arrays = {}
    before: Arrays = {}
    for step in range(part.first, part.last + 1):
        if step == (compared_from or part.first):
            before = _state(trained)
        hooks = [
            one.optimizer.register_step_pre_hook(_recorder(one, _prefix(role), step, results))
            for role, one in trained.items()
            if before
        ]
        _train_step(engines, mine, step=step, steps=part.total or part.last)
        for hook in hooks:
            hook.remove()
    for name, value in _state(trained).items():
        kind, _, parameter = name.partition("/")
        results[name if kind != "parameters" else f"change/{parameter}"] = (
            value if kind != "parameters" else value - before[name]
        )
    if part.save:
        engines.save_checkpoint(Path(part.save), b"ledger")
    if part.output:
        arrays: Any = results
        np.savez(f"{part.output}.{ranks.rank}.npz", **arrays)
    return results


def read_output(part: Part, *, num_ranks: int) -> Arrays:
    """Return what all ranks together have of the result of a part."""
    results: Arrays = {}
    for rank in range(num_ranks):
        with np.load(f"{part.output}.{rank}.npz") as arrays:
            results |= dict(arrays)
    return results


def differences(expected: Mapping[str, NDArray[Any]], seen: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Return the relative difference (2-norm) of each array; infinity where only one has it."""
    found: dict[str, float] = {}
    for name in expected.keys() | seen.keys():
        if name not in expected or name not in seen:
            found[name] = float("inf")
            continue
        size = np.linalg.norm(expected[name])
        apart = np.linalg.norm(expected[name] - seen[name])
        found[name] = float(apart / size) if size else float(np.inf if apart else 0.0)
    return found


def record(
    batch: Path,
    model: Path,
    rows: Sequence[TrainRow],
    alone: Ranks,
    *,
    perturbed: Path,
    seed: int,
    trainer: dict[str, Any],
) -> None:
    """Write the batch, its behaviour logprobs those of weights beside the model's."""
    _perturb(model, perturbed, seed=seed)
    part = Part(model=str(perturbed), batch="", last=1, trainer=trainer)
    engine = FsdpEngine.for_run(_settings(part, num_ranks=1), alone)
    behave = [row.numpy() for row in engine.logprobs(rows)]
    write_batch(batch, [replace(row, behave_logprobs=one) for row, one in zip(rows, behave, strict=True)])


def _settings(part: Part, *, num_ranks: int) -> Settings:
    trainer = {"num_ranks": num_ranks, "max_grad_norm": UNCLIPPED} | part.trainer
    return Settings(
        model=ModelSettings(path=part.model, dtype="float32"),
        algorithm=AlgorithmSettings(decoupled=True, num_minibatches=part.minibatches),
        trainer=TrainerSettings.model_validate(trainer),
    )


def _given(words: Sequence[str]) -> dict[str, str]:
    return dict(cast(tuple[str, str], tuple(word.split("=", 1))) for word in words)


def _prefix(role: str) -> str:
    return f"{role}." if role else ""


def _state(trained: Mapping[str, TrainState]) -> Arrays:
    """Return ``<kind>/<parameter>`` of everything that a checkpoint would hold, as far as this rank has it."""
    state: Arrays = {}
    for role, one in trained.items():
        for name, tensor in tensors_of({ACTOR: one}).items():
            kind, _, parameter = name.partition(".")
            state[f"{kind}/{_prefix(role)}{parameter}"] = _whole(tensor)
    return state


def _recorder(trained: TrainState, prefix: str, step: int, results: Arrays) -> Any:
    def keep(*_: Any) -> None:
        for name, parameter in trained.model.named_parameters():
            if parameter.grad is not None:
                results[f"gradient/{step}/{prefix}{name}"] = _whole(parameter.grad)

    return keep


def _whole(tensor: Tensor) -> NDArray[Any]:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return np.array(whole.detach().cpu().numpy())


def _train_step(engines: Engines, rows: list[TrainRow], *, step: int, steps: int) -> None:
    engines.actor.train_step(rows, step=step, total_steps=steps)
    if engines.critic is not None:
        returns = [np.random.default_rng(row.index).normal(size=row.num_tokens) for row in rows]
        told = with_columns(rows, {VALUES: engines.critic.values(rows), RETURNS: returns})
        engines.critic.train_step(told, step=step, total_steps=steps)


def _judge(alone: Arrays, together: Arrays, arguments: argparse.Namespace) -> int:
    found = differences(alone, together)
    by_parameter: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in found.items():
        kind, _, parameter = name.partition("/")
        if kind == "gradient":
            parameter = parameter.partition("/")[2]
        kinds = by_parameter[parameter]
        kinds[kind] = max(kinds.get(kind, 0.0), value)
    print(f"{'gradient':>9} {'change':>9} {'exp_avg':>9} {'exp_avg_sq':>10}")
    for parameter, kinds in sorted(by_parameter.items()):
        values = [kinds.get(kind, 0.0) for kind in ("gradient", "change", "exp_avg", "exp_avg_sq")]
        print("{:9.2e} {:9.2e} {:9.2e} {:10.2e}".format(*values) + f"  {parameter}")
    worst = max(found, key=lambda name: found[name])
    # A comparison with NaN is never under the tolerance.
    is_close = all(value <= arguments.tolerance for value in found.values())
    how = f", resumed from {arguments.saved_by} at step {arguments.resume}," if arguments.resume else ""
    print(
        f"1 and {arguments.ranks} ranks{how} {'agree' if is_close else 'DIFFER'}: "
        f"largest {found[worst]:.2e}, {worst.replace('/', ' ')}"
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


def vocab_size(model: Path) -> int:
    """Return that of a Hugging Face folder."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model, local_files_only=True).vocab_size)


def random_rows(count: int, *, max_tokens: int, vocab_size: int, seed: int) -> list[TrainRow]:
    """Return sequences of 4 to ``max_tokens`` tokens, each trained from some token on."""
    random = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(random.integers(4, max_tokens + 1))
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


def write_batch(path: Path, rows: list[TrainRow]) -> None:
    """Keep sequences in a file, where ``train_part`` reads them."""
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
