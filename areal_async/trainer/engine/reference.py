"""The engine of the reference: a policy that stays as it is, and says how likely it finds what another one does."""

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from areal_async.config.settings import ModelSettings, Settings, TrainerSettings
from areal_async.process.hub import local_model
from areal_async.trainer.engine.model import DTYPES, load_policy
from areal_async.trainer.engine.parallel.dims import ParallelDims
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.sharded import ModelEngine
from areal_async.trainer.packing.rows import TrainRow


class ReferenceEngine(ModelEngine[tuple[Tensor, Tensor]]):
    """A frozen policy sharded over the ranks. It has no optimizer, and its parameters take no more than served ones."""

    def __init__(self, *, model: ModelSettings, trainer: TrainerSettings, ranks: Ranks) -> None:
        dims = ParallelDims.of(ranks, trainer)
        policy = load_policy(local_model(model.path), dims, trainer, dtype=DTYPES[model.dtype], is_frozen=True)
        super().__init__(policy, dims, trainer=trainer, num_outputs=2)

    @classmethod
    def for_run(cls, settings: Settings, ranks: Ranks) -> Self:
        """Load the reference that ``model`` names."""
        return cls(
            model=settings.model.for_role("reference"),
            trainer=settings.trainer.for_reference,
            ranks=ranks,
        )

    def logprobs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return for each row the logprob of every token in its loss; 0 elsewhere [L]. A collective."""
        return self._infer(rows, lambda packed: [logprobs_S for logprobs_S, _ in self._execution.infer(packed)])
