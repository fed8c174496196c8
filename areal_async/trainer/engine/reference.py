"""The engine of the reference: a policy that stays as it is, and says how likely it finds what another one does."""

from collections.abc import Sequence
from typing import Any, Protocol, Self, cast

from torch import Tensor

from areal_async.config.settings import ModelSettings, Settings, TrainerSettings
from areal_async.process.hub import local_model
from areal_async.trainer.engine.model import DTYPES, Sharding, load_policy
from areal_async.trainer.engine.parallel.dims import ParallelDims
from areal_async.trainer.engine.parallel.execution import Execution
from areal_async.trainer.engine.parallel.pipeline import execution_of
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.engine.sharded import PackedPasses
from areal_async.trainer.packing.flops import DecoderFlops, decoder_flops
from areal_async.trainer.packing.rows import TrainRow


class Reference(Protocol):
    """What says how likely a model that stays as it is finds some rows."""

    @property
    def vocab_size(self) -> int:
        """Of the model's embedding."""
        ...

    def logprobs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return for each row the logprob of every token in its loss, at its temperature; 0 elsewhere [L].

        A collective.
        """
        ...


class BareActor:
    """The reference of a policy with adapters: the policy without them. It takes no memory, but the policy's time."""

    def __init__(self, actor: FsdpEngine) -> None:
        self._actor = actor

    @property
    def vocab_size(self) -> int:
        """Of the model's embedding."""
        return self._actor.vocab_size

    def logprobs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """As ``Reference`` says. In the policy's thread: it is another model meanwhile."""
        with self._actor.without_adapters():
            return self._actor.logprobs(rows)


class ReferenceEngine:
    """A frozen policy sharded over the ranks. It has no optimizer, and its parameters take no more than served ones."""

    def __init__(self, *, model: ModelSettings, trainer: TrainerSettings, ranks: Ranks) -> None:
        self.dims = ParallelDims.of(ranks, trainer)
        self._policy = load_policy(
            local_model(model.path),
            self.dims,
            dtype=DTYPES[model.dtype],
            activation_checkpointing=False,
            is_frozen=True,
            stages_per_rank=trainer.stages_per_rank,
            sharding=Sharding.of(trainer),
        )
        self._execution: Execution[tuple[Tensor, Tensor]] = execution_of(self._policy, self.dims, num_outputs=2)
        self.flops: DecoderFlops = decoder_flops(self._policy.causal_lm)
        self._passes = PackedPasses(
            self.dims.data, token_budget=trainer.token_budget, flops=self.flops, fit=self._execution.fit_rows
        )

    @classmethod
    def for_run(cls, settings: Settings, ranks: Ranks) -> Self:
        """Load the reference that ``model`` names."""
        return cls(
            model=settings.model.for_role("reference"),
            trainer=settings.trainer.for_reference,
            ranks=ranks,
        )

    @property
    def vocab_size(self) -> int:
        """Of the model's embedding."""
        return int(cast(Any, self._policy.causal_lm).config.vocab_size)

    def logprobs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return for each row the logprob of every token in its loss; 0 elsewhere [L]. A collective."""
        return self._passes.infer(rows, lambda packed: [logprobs_S for logprobs_S, _ in self._execution.infer(packed)])
