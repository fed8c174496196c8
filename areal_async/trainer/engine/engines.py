"""The engines of one rank: the policy's, and those of the models that the algorithm wants beside it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, TypeVar

import torch
from torch import Tensor

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.trainer.engine import checkpoint
from areal_async.trainer.engine.checkpoint import ACTOR, TrainState
from areal_async.trainer.engine.critic import CriticEngine
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.parallel.resharder import Resharder, RowInference, hold_same_rows
from areal_async.trainer.engine.policy import FsdpEngine, ReferenceEngine
from areal_async.trainer.engine.threads import EngineThread
from areal_async.trainer.packing.rows import TrainRow
from areal_async.vision.spec import VisionSpec

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Engines:
    """A model per role. All are on the same ranks, which each may divide in its own way."""

    actor: FsdpEngine
    critic: CriticEngine | None = None
    reference: FsdpEngine | ReferenceEngine | None = None
    """The actor itself where its adapters leave the reference as it is: it takes no memory, but the policy's time."""
    resharders: Mapping[str, Resharder] = field(default_factory=dict)
    """Role -> the way of the actor's rows to those models that other ranks hold rows for."""

    @classmethod
    def for_run(cls, settings: Settings, ranks: Ranks) -> Self:
        """Load what the settings want. A collective."""
        wanted = settings.algorithm.needs_models

        def own_ranks() -> Ranks:
            # On a GPU all engines share one thread (``EngineThreads``) and so one group.
            return ranks.with_tensor_group() if ranks.device.type == "cpu" else ranks

        actor = FsdpEngine.for_run(settings, ranks)
        critic = CriticEngine(settings, own_ranks()) if "critic" in wanted else None
        reference: FsdpEngine | ReferenceEngine | None = None
        if shares_base(settings):
            reference = actor
        elif "reference" in wanted:
            reference = ReferenceEngine(settings, own_ranks())
        if critic is not None:
            _check_sight(settings, "critic", actor.vision, critic.vision)
        if reference is not None:
            _check_sight(settings, "reference", actor.vision, reference.vision)
        return cls(
            actor=actor,
            critic=critic,
            reference=reference,
            resharders={
                role: Resharder(
                    source=actor.dims,
                    target=engine.dims,
                    flops=engine.flops,
                    num_minibatches=settings.algorithm.num_minibatches,
                )
                for role, engine in (("critic", critic), ("reference", reference))
                if engine is not None and not hold_same_rows(actor.dims, engine.dims)
            },
        )

    @property
    def vocab_size(self) -> int:
        """Tokens that every model of the step has."""
        models = (self.actor, self.critic, self.reference)
        return min(model.vocab_size for model in models if model is not None)

    @property
    def vision(self) -> VisionSpec | None:
        """How the models of the step see, all alike; None where they do not."""
        return self.actor.vision

    def change(self, settings: Settings) -> None:
        """Train by these from the next step on; what may not change in a run is as it was."""
        self.actor.change(settings)
        if self.critic is not None:
            self.critic.change(settings)

    def infer(self, role: str, rows: Sequence[TrainRow], infer: RowInference) -> list[Tensor]:
        """Return what a call of that role's model says of the actor's rows. A collective."""
        resharder = self.resharders.get(role)
        return resharder.infer(rows, infer) if resharder else infer(rows)

    def reference_logprobs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return ``logprobs`` of the actor's rows by the reference. A collective."""
        assert self.reference is not None
        return self.infer("reference", rows, self.reference.base_logprobs)

    def rows_for(self, role: str, rows: Sequence[TrainRow]) -> list[TrainRow]:
        """Return this rank's rows of that role's model for those of the actor's. A collective."""
        resharder = self.resharders.get(role)
        return resharder.take(rows) if resharder else list(rows)

    @property
    def trained(self) -> dict[str, TrainState]:
        """What a checkpoint holds, by role. No collective."""
        return {ACTOR: self.actor.trained} | ({"critic": self.critic.trained} if self.critic is not None else {})

    def release_memory(self) -> None:
        """Give what a step has left with torch's allocator back to the GPU, for the servers that share it."""
        if self.actor.dims.all.device.type == "cuda":
            torch.cuda.empty_cache()

    def save_checkpoint(self, directory: Path, ledger: bytes) -> None:
        """Write everything that is trained, and the ledger of rank 0, as one atomic folder. A collective."""
        checkpoint.save(self.trained, directory, ledger=ledger, ranks=self.actor.dims.all)

    def load_checkpoint(self, directory: Path) -> bytes:
        """Restore what any number of ranks has written and return the ledger on every rank. A collective."""
        ledger = checkpoint.load(self.trained, directory, ranks=self.actor.dims.all)
        self.actor.check_base(directory)
        return ledger


def _check_sight(
    settings: Settings, role: Literal["critic", "reference"], needed: VisionSpec | None, got: VisionSpec | None
) -> None:
    """Make sure that a model can be shown what the policy was.

    Raises:
        UserError: it does not see, or has other tokens for an image.
    """
    if needed is None or (got is not None and got.shows_alike(needed)):
        return
    how = "does not see" if got is None else "has other tokens for an image"
    raise UserError(
        f"model.{role}: got {settings.model.for_role(role).path}, which {how}, need one that takes images as "
        f"model.path={settings.model.path} does; take one of its family"
    )


def shares_base(settings: Settings) -> bool:
    """Say whether the reference is what the policy's adapters are trained over."""
    is_same = settings.model.reference.path in (None, settings.model.path)
    return settings.trainer.lora.is_on and is_same and "reference" in settings.algorithm.needs_models


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineThreads:
    """The threads in which the calls of a step run: one for each role on a CPU, the engine's for all elsewhere.

    On a GPU one stream does the work of all models anyway, and NCCL wants the collectives of different groups in one
    order on every rank too. Where layers are compiled it is torch: what it traces with is the process's.
    """

    engine: EngineThread
    """Thread of the policy, and of everything that is not in a step."""
    has_one: bool = False
    """Whether the calls of all roles run in it."""
    of_actor: frozenset[str] = frozenset({"actor"})
    """Roles whose calls the policy's own engine answers, in its thread."""
    others: dict[str, EngineThread] = field(default_factory=dict)

    def name(self, role: str) -> str:
        """Return the name of a role's thread; what computes without a model has one too."""
        return "actor" if self.has_one or role in self.of_actor else role or "compute"

    @classmethod
    def for_run(cls, settings: Settings, ranks: Ranks) -> Self:
        """Return the threads of a rank."""
        shared = frozenset({"actor", "reference"} if shares_base(settings) else {"actor"})
        return cls(
            engine=EngineThread(ranks.device),
            has_one=ranks.device.type != "cpu" or settings.trainer.compile,
            of_actor=shared,
        )

    async def run(self, role: str, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, done in the thread of this role."""
        name = self.name(role)
        thread = (
            self.engine if name == "actor" else self.others.setdefault(name, EngineThread(self.engine.device, name))
        )
        return await thread.run(work)
