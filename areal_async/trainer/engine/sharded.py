"""What the engines of all roles are: a model over all ranks, packed passes through it, and optimizer updates of it.

Invariant: whatever the number of ranks and whichever of them holds a row, an update has the gradient that one rank
with all rows would compute. Loss denominators are counts over all ranks; ranks that run out of rows go on with empty
ones, so that the collectives inside the model meet. Nothing here draws random numbers.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from areal_async.algorithms.aggregation import TOKEN_MEAN, Aggregation
from areal_async.config.settings import ModelSettings, TrainerSettings
from areal_async.process.freed_memory import give_back_blocks
from areal_async.process.hub import local_model
from areal_async.trainer.engine import weights
from areal_async.trainer.engine.checkpoint import TrainState
from areal_async.trainer.engine.gradients import Gradients
from areal_async.trainer.engine.model import DTYPES
from areal_async.trainer.engine.model_folder import ModelFolder
from areal_async.trainer.engine.optimizer import learning_rate, make_optimizer
from areal_async.trainer.engine.parallel.dims import ParallelDims
from areal_async.trainer.engine.parallel.division import RowPacker
from areal_async.trainer.engine.parallel.execution import Execution, Loss, execution_of
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.parallel.tensor import sum_over_tp
from areal_async.trainer.engine.stats import Tally
from areal_async.trainer.engine.vision import vision_tower
from areal_async.trainer.packing.flops import DecoderFlops, decoder_flops
from areal_async.trainer.packing.rows import PackedRow, TrainRow
from areal_async.vision.spec import VisionSpec

T = TypeVar("T")
Load = Callable[..., Any]
"""``model.load_policy`` or ``model.load_critic``."""
LARGE = 50_000_000
"""Parameters from which on what freed blocks keep of the host's memory weighs more than the time to have them anew."""

log = structlog.get_logger()


class ModelEngine(Generic[T]):
    """A model over the ranks, and forward passes through it. ``T``: what the model says of a row (``execution``)."""

    def __init__(
        self, load: Load, *, model: ModelSettings, trainer: TrainerSettings, ranks: Ranks, num_together: int = 1
    ) -> None:
        """Load what ``model`` names, to run it on rows of at most ``trainer.token_budget`` tokens.

        Args:
            num_together: rows, one after the other, that always share a packed one.
        """
        self.dims = ParallelDims.of(ranks, trainer)
        self._source, self._dtype = local_model(model.path), DTYPES[model.dtype]
        self._model = load(self._source, self.dims, trainer, dtype=self._dtype)
        if ranks.device.type == "cpu" and sum(one.numel() for one in self._model.decoder.parameters()) >= LARGE:
            give_back_blocks()
        self._trainer = trainer
        self.flops: DecoderFlops = decoder_flops(self._model.decoder)
        """Operations of the whole model, by which rows are made to cost alike."""
        self.vision = VisionSpec.read(self._source) if vision_tower(self._model.decoder) is not None else None
        """How the model sees; None where it does not."""
        self._execution: Execution[T] = execution_of(self._model, self.dims)
        self._packer = RowPacker(
            dims=self.dims,
            flops=self.flops,
            token_budget=trainer.token_budget,
            fit=self._execution.fit_rows,
            num_together=num_together,
            vision=self.vision,
        )

    @property
    def vocab_size(self) -> int:
        """Words of the model's embedding."""
        return int(self._model.decoder.config.get_text_config().vocab_size)

    def full_parameters(self) -> dict[str, Tensor]:
        """Return copies of all parameters, whole, in float32, on the CPU of rank 0; nothing elsewhere. A collective."""
        buckets = weights.plan(self._model.decoder, torch.float32, max_bytes=0)
        return weights.gather(self._model.decoder, buckets, self.dims.all)

    def save_weights(self, directory: Path) -> dict[str, str]:
        """Write a Hugging Face folder atomically; return {safetensors file: sha256} on every rank. A collective."""
        return self.folder.write_together(self.gather_files(), directory, self.dims.all)

    @property
    def folder(self) -> ModelFolder:
        """The weights as they are served, as a Hugging Face folder."""
        return ModelFolder.of(self._model.decoder, self._source, self._dtype)

    def gather_files(
        self,
        buckets: Sequence[weights.Bucket] | None = None,
        *,
        send: Callable[[Tensor], None] | None = None,
        into: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return copies, on the CPU, of the tensors of those of the ``folder``'s files that this rank writes.

        A collective.

        Args:
            buckets: in which they are gathered; by files, else.
            send: as of ``weights.gather``. It may block, shorter than a collective may take.
            into: as of ``weights.gather``.
        """
        folder, ranks = self.folder, self.dims.all
        holders = folder.holders(ranks.size)
        plan = buckets or folder.files
        return weights.gather(self._model.decoder, plan, ranks, holders=holders, send=send, into=into)

    def _infer(self, rows: Sequence[TrainRow], forward: Callable[[list[PackedRow]], list[Tensor]]) -> list[Tensor]:
        """Return for each row what ``forward`` says of every token in its loss; 0 elsewhere [L]. A collective."""
        results = [torch.zeros(row.num_tokens) for row in rows]
        scored = [place for place, row in enumerate(rows) if row.loss_mask.any()]
        trained = [rows[place] for place in scored]
        parts = self._packer.divide(trained)
        for members, outputs_S in zip(parts, forward(self._packer.pack(trained, parts)), strict=True):
            values_S = outputs_S.cpu()
            for member in members:
                place = scored[member]
                count = int(rows[place].loss_mask.sum())
                results[place][torch.from_numpy(rows[place].loss_mask)] = values_S[:count]
                values_S = values_S[count:]
        return results


class TrainedEngine(ModelEngine[T]):
    """A model that is trained, and its optimizer."""

    def __init__(
        self,
        load: Load,
        *,
        model: ModelSettings,
        trainer: TrainerSettings,
        ranks: Ranks,
        num_minibatches: int = 1,
        aggregation: Aggregation = TOKEN_MEAN,
        num_together: int = 1,
    ) -> None:
        super().__init__(load, model=model, trainer=trainer, ranks=ranks, num_together=num_together)
        self._num_minibatches = num_minibatches
        self._aggregation = aggregation
        self._gradients = Gradients(self._model, self.dims)
        self._optimizer = make_optimizer((one for one in self._model.parameters() if one.requires_grad), trainer)
        self._see_gradients: Callable[[dict[str, Tensor]], None] | None = None

    @property
    def trained(self) -> TrainState:
        """What a checkpoint holds of this engine. No collective."""
        return TrainState(self._model.decoder, self._optimizer)

    def export(self, directory: Path) -> None:
        """Write what was trained: ``model``, a Hugging Face folder. A collective."""
        self.save_weights(directory / "model")

    def watch_gradients(self, see: Callable[[dict[str, Tensor]], None]) -> None:
        """Have ``see`` called in every update with each parameter's gradient, whole, before clipping, on rank 0's CPU.

        On the other ranks it is called with nothing. The update takes as much longer as gathering the model does.
        """
        self._see_gradients = see

    def _set_peak(self, lr: float) -> None:
        """Take another peak of the learning rate's schedule, from the next step on."""
        self._trainer = self._trainer.model_copy(update={"lr": lr})

    def _begin(self, step: int, *, total_steps: int) -> float:
        """Take over and return the learning rate of training step ``step``, which counts from 1."""
        lr = learning_rate(step, total_steps=total_steps, trainer=self._trainer)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _minibatches(self, rows: Sequence[TrainRow], columns: Sequence[str] = ()) -> list[list[PackedRow]]:
        """Return the packed rows of each update (``RowPacker.minibatches``). A collective."""
        return self._packer.minibatches(
            rows, num_minibatches=self._num_minibatches, aggregation=self._aggregation, columns=columns
        )

    def _update_with(
        self, minibatches: Sequence[Sequence[PackedRow]], loss_of: Callable[[int], Loss[T]], *, step: int, event: str
    ) -> Tally:
        """Make an optimizer update from each mini-batch that trains a token on any rank. A collective.

        Args:
            loss_of: makes the loss of a mini-batch of this number, when those before it are done.
            event: logged where updates of ``step`` are left out because they were not finite.
        """
        tally = Tally()
        for number, minibatch in enumerate(minibatches):
            units = torch.stack([row.units_S.sum() for row in minibatch]).sum() if minibatch else torch.zeros(())
            units = units.double().to(self.dims.all.device)
            denominator = self.dims.data.reduce(units, dist.ReduceOp.SUM).item()
            if denominator:
                self._update(minibatch, loss_of(number), tally, denominator=denominator)
        if tally.num_skipped:
            log.warning(event, step=step, num_skipped=tally.num_skipped, reason="not finite")
        return tally

    def _update(self, minibatch: Sequence[PackedRow], loss: Loss[T], tally: Tally, *, denominator: float) -> None:
        """Make one optimizer update from the gradients of all these rows on all ranks. A collective."""
        # Gradients are the mean over ranks, and the loss is a mean over the units of all ranks: undo the former.
        scale = self.dims.data.size / denominator
        terms = list(self._execution.train(minibatch, loss, scale=scale))
        if self.dims.tp_mesh is not None:
            sum_over_tp(self._model, self.dims.tp_mesh.get_group())
        if self._see_gradients is not None:
            with self._gradients.as_parameters():
                gradients = self.full_parameters()
            self._see_gradients(gradients)
        loss_sum = torch.stack([one.loss.double() for one in terms]).sum()
        update = self._gradients.clip(loss_sum, max_norm=self._trainer.max_grad_norm)
        tally.add_update(update, terms, minibatch)
        if update.is_made:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
