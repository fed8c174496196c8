"""Checkpoints: all that a trainer needs to go on as if it had never stopped, in one atomic folder.

Model and optimizer go through torch's distributed checkpoint (DCP), each rank writing its own shards, so another
number of ranks can load them. The ledger (opaque bytes: the ids of what these weights were trained on) lies in the
same folder, so the two can never disagree. There is no random state: the engine draws no random numbers.

Only tensors are given to DCP, and it reads those with ``weights_only``. Its own ``.metadata`` file is torch's
format and is a pickle: load no checkpoint from a source you would not run a program from.
"""

from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from areal_async.errors import PipelineError, UserError
from areal_async.fault_points import reach
from areal_async.trainer.distributed import Ranks
from areal_async.trainer.folders import finish, partial_name

LEDGER = "ledger"
STATE = "state"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Trained(NamedTuple):
    """A model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def save(policy: Trained, directory: Path, *, others: Mapping[str, Trained], ledger: bytes, ranks: Ranks) -> None:
    """Write the checkpoint; when this returns, on any rank, it is whole and synced. A collective.

    Args:
        others: models trained beside the policy, by role.
    """
    # Imported here, as in ``load``: a trainer that has nothing to write yet should be up quickly.
    import torch.distributed.checkpoint as dcp

    partial = partial_name(directory)
    if ranks.rank == 0:
        rmtree(partial, ignore_errors=True)
        (partial / STATE).mkdir(parents=True)
    ranks.barrier()
    writer = dcp.FileSystemWriter(partial / STATE)  # syncs what it writes
    dcp.save(_states(policy, others), storage_writer=writer, process_group=ranks.control)
    if ranks.rank == 0:
        (partial / LEDGER).write_bytes(ledger)
        reach("trainer.during_checkpoint")
        finish(partial, directory)
    ranks.barrier()


def load(policy: Trained, directory: Path, *, others: Mapping[str, Trained], ranks: Ranks) -> bytes:
    """Restore models and optimizers in place and return the ledger on every rank. A collective.

    Raises:
        UserError: it was made without one of these models.
        PipelineError: no checkpoint there, or one of other models.
    """
    import torch.distributed.checkpoint as dcp

    ledger = directory / LEDGER
    if not ledger.is_file():
        raise PipelineError(f"checkpoint: {directory} is not one, {LEDGER} is missing")
    state = _states(policy, others)
    reader = dcp.FileSystemReader(directory / STATE)
    saved = {str(key).partition(".")[0] for key in reader.read_metadata().state_dict_metadata}
    missing = sorted(set(others) - saved)
    if missing:
        raise UserError(
            f"checkpoint: {directory} has no {missing[0]}; go on with the algorithm it was made with, or "
            "start anew with --fresh"
        )
    try:
        dcp.load(state, storage_reader=reader, process_group=ranks.control)
    except dcp.CheckpointException as exc:
        reasons = {f"{type(error[0]).__name__}: {error[0]}" for error in exc.failures.values()}
        raise PipelineError(f"checkpoint: {directory} does not fit this model: {'; '.join(sorted(reasons))}") from exc
    return ledger.read_bytes()


def _states(policy: Trained, others: Mapping[str, Trained]) -> dict[str, Any]:
    """Return the policy's state and, under their roles, that of the others."""
    return _state(policy) | {role: _state(trained) for role, trained in others.items()}


def _state(trained: Trained) -> dict[str, Any]:
    """Return every tensor that matters, by kind and parameter name; loading writes into these very tensors."""
    model, optimizer = trained
    _fill(optimizer)
    state: dict[str, dict[str, Tensor]] = {"parameters": {}, **{moment: {} for moment in MOMENTS}}
    for name, parameter in model.named_parameters():
        state["parameters"][name] = parameter.detach()
        for moment, tensor in optimizer.state[parameter].items():
            state[moment][name] = tensor
    return state


def _fill(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state of no update yet, where it has none, so that there are tensors to save or to load into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
