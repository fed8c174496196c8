"""What each call of a step's graph does on one rank (``algorithms.graphs`` declares them)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from areal_async.algorithms.advantages import advantage_rule
from areal_async.algorithms.dataflow import FunctionCall, plain_name
from areal_async.algorithms.user_calls import read_call
from areal_async.config.settings import Settings
from areal_async.trainer.batch.advantages import critic_advantages, kl_penalties, penalised_advantages
from areal_async.trainer.batch.step import AgreedBatch
from areal_async.trainer.engine.critic import CriticEngine
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.stats import StepStats
from areal_async.trainer.packing.rows import REFERENCE, RETURNS, START, VALUES, TrainRow, with_columns
from areal_async.user_files import import_named

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningStep:
    """A step while its calls are made."""

    number: int
    batch: AgreedBatch
    settings: Settings
    trained: list[TrainRow] = field(default_factory=list)
    """Filled when the policy is trained."""


class StepCalls:
    """The calls of the trainer's part of the graph, on one rank."""

    def __init__(self, settings: Settings, engines: Engines) -> None:
        self._total_steps = settings.run.steps
        self._engines = engines
        # Each rank of the model's layout makes the calls on the rows it holds, even where other ranks hold the same.
        self._gather = engines.actor.dims.data.gather_bytes
        self._rule = advantage_rule(settings)
        self._own: dict[str, Callable[..., Any]] = {}
        for spec in settings.algorithm.calls:
            module, name = import_named(spec, what="algorithm.calls")
            self._own[read_call(spec).name] = getattr(module, name)

    def make(self, call: FunctionCall, step: RunningStep, inputs: Values) -> Values:
        """Make one call; return its outputs by name. The calls of a model are collectives."""
        own = self._own.get(call.name)
        if own is None:
            made = self._make(call.name, step, inputs)
            return {name: made[plain_name(name)] for name in call.outputs}
        # By place: what it takes may have been renamed, where it comes between a value's maker and takers.
        return {call.outputs[0]: own(*(inputs[name] for name in call.inputs))}

    def _make(self, name: str, step: RunningStep, inputs: Values) -> Values:
        """Make a call that is none of the user's own; return its outputs by their plain names."""
        engines, rows, algorithm = self._engines, inputs["rows"], step.settings.algorithm
        match name:
            case "start_logprobs":
                return {"start_logprobs": engines.actor.logprobs(rows)}
            case "reference_logprobs":
                return {"reference_logprobs": engines.reference_logprobs(rows)}
            case "values":
                return {"values": engines.infer("critic", rows, self._critic.values)}
            case "kl_penalty":
                logprobs, reference = inputs["start_logprobs"], inputs["reference_logprobs"]
                penalties, mean = kl_penalties(rows, logprobs, reference, algorithm, gather=self._gather)
                return {"penalties": penalties, "kl_mean": mean}
            case "gae":
                advantages, returns, quality = critic_advantages(
                    rows, inputs["outcomes"], inputs["values"], inputs.get("penalties"), algorithm, gather=self._gather
                )
                return {"advantages": advantages, "returns": returns, "value_quality": quality}
            case "penalised_advantages":
                advantages = penalised_advantages(
                    rows, step.batch.slots, inputs["penalties"], rule=self._rule, gather=self._gather
                )
                return {"advantages": advantages}
            case "train_actor":
                return {"actor_stats": self._train_actor(step, inputs)}
            case "train_critic":
                rows = with_columns(rows, {VALUES: inputs["values"], RETURNS: inputs["returns"]})
                own = engines.rows_for("critic", rows)
                return {"critic_stats": self._critic.train_step(own, step=step.number, total_steps=self._total_steps)}
        raise ValueError(f"call: got {name}, need one of the graph's")

    @property
    def _critic(self) -> CriticEngine:
        assert self._engines.critic is not None
        return self._engines.critic

    def _train_actor(self, step: RunningStep, inputs: Values) -> StepStats:
        columns = [name for name in (START, REFERENCE) if name in inputs]
        rows = with_columns(inputs["rows"], {name: inputs[name] for name in columns}, advantages=inputs["advantages"])
        stats = self._engines.actor.train_step(rows, step=step.number, total_steps=self._total_steps, columns=columns)
        step.trained.extend(rows)
        return stats
