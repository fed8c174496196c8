"""Checkpoints: all that a trainer needs to go on as if it had never stopped, in one atomic folder.

Model and optimizer go through torch's distributed checkpoint (DCP), each rank writing its own shards, under the names
of the whole model; so another number of ranks, and another layout, can load them. The ledger (opaque bytes: the ids of
what these weights were trained on) lies in the same folder, so the two can never disagree, and so do the digests of all
these files (``digests``).

What is not inside follows from what is: the learning rate is a pure function of the training step, and there is no
random state, because the engine draws no random numbers.

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
from areal_async.process.atomic_folders import LEDGER, finish, partial_name
from areal_async.process.failpoints import failpoint
from areal_async.trainer.engine.digests import digests, write_sums
from areal_async.trainer.engine.host_copies import make_copies
from areal_async.trainer.engine.parallel.dims import local_shard
from areal_async.trainer.engine.parallel.ranks import Ranks

STATE = "state"
PARAMETERS = "parameters"
COPIED_AHEAD_BYTES = 10_000_000
"""From a GPU, of what is to be written next: DCP's own default."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class TrainState(NamedTuple):
    """A model and its optimizer."""

    model: nn.Module
    """This rank's part of the model, with the whole one's names."""
    optimizer: torch.optim.Optimizer


States = Mapping[str, TrainState]
"""Role -> what is trained of its model; the policy's is ``ACTOR``."""
ACTOR = "actor"


class CheckpointWriter:
    """Writes checkpoints beside the training: from copies, and with a group of its own for what ranks say.

    A rank's copies take as much host memory as its shards of the parameters and of both moments; they are made with
    the first checkpoint and filled again with every further one. So there is one checkpoint at a time: ``stage`` may
    be called again when ``write`` has returned.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Make the group. A collective, of all ranks in the same order."""
        self._ranks = ranks.with_control_group()
        self._tensors: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}

    def stage(self, states: States) -> None:
        """Copy what is trained to host memory; it may change when this returns. No collective."""
        self._tensors = tensors_of(states)
        shards = {name: local_shard(tensor) for name, tensor in self._tensors.items()}
        if not self._copies:
            # Shards may lie in host memory, with ``trainer.cpu_offload``: pages are pinned for a GPU to write into.
            self._copies = make_copies(shards, is_pinned=any(shard.is_cuda for shard in shards.values()))
        torch._foreach_copy_([self._copies[name] for name in shards], list(shards.values()), non_blocking=True)
        if self._ranks.device.type == "cuda":
            torch.cuda.current_stream(self._ranks.device).synchronize()  # of no broadcast, which may wait

    def write(self, directory: Path, ledger: bytes) -> None:
        """Write the checkpoint of what was staged, as ``save``. From one thread with the device, all ranks alike."""
        # Imported here, as in ``save``: a trainer that has nothing to write yet should be up quickly.
        from areal_async.trainer.engine.staged_planner import StagedPlanner

        _write(self._tensors, directory, ledger=ledger, ranks=self._ranks, planner=StagedPlanner(self._copies))


def save(states: States, directory: Path, *, ledger: bytes, ranks: Ranks) -> None:
    """Write the checkpoint; when this returns, on any rank, it is whole and synced. A collective.

    Raises:
        PipelineError: some rank could not write; raised on every rank.
    """
    _write(tensors_of(states), directory, ledger=ledger, ranks=ranks, planner=None)


def load(states: States, directory: Path, *, ranks: Ranks) -> bytes:
    """Restore models and optimizers in place and return the ledger on every rank. A collective.

    Raises:
        UserError: it was made without one of these models.
        PipelineError: no checkpoint there, or one of other models.
    """
    import torch.distributed.checkpoint as dcp

    ledger = directory / LEDGER
    if not ledger.is_file():
        raise PipelineError(f"checkpoint: {directory} is not one, {LEDGER} is missing")
    tensors = tensors_of(states)
    reader = dcp.FileSystemReader(directory / STATE)
    saved = {str(key).partition(".")[0] for key in reader.read_metadata().state_dict_metadata}
    missing = sorted(states.keys() - saved - {ACTOR})
    if missing:
        raise UserError(
            f"checkpoint: {directory} has no {missing[0]}; go on with the algorithm it was made with, or "
            "start anew with --fresh"
        )
    try:
        dcp.load(tensors, storage_reader=reader, process_group=ranks.control)
    except dcp.CheckpointException as exc:
        raise PipelineError(f"checkpoint: {directory} does not fit this model: {_reasons(exc)}") from exc
    return ledger.read_bytes()


def tensors_of(states: States) -> dict[str, Tensor]:
    """Return every tensor that matters by its name in a checkpoint; loading writes into these very tensors.

    The policy's are ``<kind>.<parameter>``, those of the others ``<role>.<kind>.<parameter>``; kinds are
    ``parameters`` and AdamW's ``MOMENTS``, parameters are named as in the whole model.
    """
    tensors: dict[str, Tensor] = {}
    for role, trained in states.items():
        tensors |= _named(trained, "" if role == ACTOR else f"{role}.")
    return tensors


def _write(tensors: dict[str, Tensor], directory: Path, *, ledger: bytes, ranks: Ranks, planner: Any) -> None:
    import torch.distributed.checkpoint as dcp

    partial, what = partial_name(directory), f"checkpoint: {directory} could not be written"
    with ranks.together(what):
        if ranks.rank == 0:
            rmtree(partial, ignore_errors=True)
            (partial / STATE).mkdir(parents=True)
    # What is copied needs no copies ahead, for which DCP would wait on the stream of training, tensor by tensor.
    ahead = COPIED_AHEAD_BYTES if planner is None else 0
    writer = dcp.FileSystemWriter(partial / STATE, per_thread_copy_ahead=ahead)  # syncs what it writes
    try:
        dcp.save(tensors, storage_writer=writer, planner=planner, process_group=ranks.control)
    except dcp.CheckpointException as exc:
        raise PipelineError(f"{what}: {_reasons(exc)}") from exc
    shards = (partial / STATE).glob(f"__{ranks.rank}_*")  # DCP's names for what this rank wrote
    written = ranks.gather_entries(digests(partial, shards))
    with ranks.together(what):
        if ranks.rank == 0:
            (partial / LEDGER).write_bytes(ledger)
            write_sums(partial, written)
            failpoint("trainer.during_checkpoint")
            finish(partial, directory)


def _reasons(failed: Any) -> str:
    """Say what each rank's error was, equal ones once."""
    return "; ".join(sorted({f"{type(error).__name__}: {error}" for error, _ in failed.failures.values()}))


def _named(trained: TrainState, prefix: str) -> dict[str, Tensor]:
    model, optimizer = trained
    _fill(optimizer)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in optimizer.state:
            raise PipelineError(f"checkpoint: {name} is gathered, and its shard is not to be seen; reshard the model")
        tensors[f"{prefix}{PARAMETERS}.{name}"] = parameter.detach()
        for moment, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"{prefix}{moment}.{name}"] = tensor
    return tensors


def _fill(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state of no update yet, where it has none, so that there are tensors to save or to load into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
