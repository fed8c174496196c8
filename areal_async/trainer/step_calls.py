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
from areal_async.trainer.engine.engines import Engines
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
        self._settings = settings
        self._engines = engines
        # Each rank of the model's layout makes the calls on the rows it holds, even where other ranks hold the same.
        self._gather = engines.actor.dims.data.gather_bytes
        self._rule = advantage_rule(settings)
        self._functions: dict[str, Callable[[RunningStep, Values], Values]] = {
            "start_logprobs": self._start_logprobs,
            "reference_logprobs": self._reference_logprobs,
            "values": self._values,
            "kl_penalty": self._kl_penalty,
            "gae": self._gae,
            "penalised_advantages": self._penalised_advantages,
            "train_actor": self._train_actor,
            "train_critic": self._train_critic,
        }
        self._own: dict[str, Callable[..., Any]] = {}
        for spec in settings.algorithm.calls:
            module, name = import_named(spec, what="algorithm.calls")
            self._own[read_call(spec).name] = getattr(module, name)

    def make(self, call: FunctionCall, step: RunningStep, inputs: Values) -> Values:
        """Make one call; return its outputs by name. The calls of a model are collectives."""
        own = self._own.get(call.name)
        if own is None:
            made = self._functions[call.name](step, inputs)
            return {name: made[plain_name(name)] for name in call.outputs}
        # By place: what it takes may have been renamed, where it comes between a value's maker and takers.
        return {call.outputs[0]: own(*(inputs[name] for name in call.inputs))}

    def _start_logprobs(self, step: RunningStep, inputs: Values) -> Values:
        return {"start_logprobs": self._engines.actor.logprobs(inputs["rows"])}

    def _reference_logprobs(self, step: RunningStep, inputs: Values) -> Values:
        return {"reference_logprobs": self._engines.reference_logprobs(inputs["rows"])}

    def _values(self, step: RunningStep, inputs: Values) -> Values:
        assert self._engines.critic is not None
        return {"values": self._engines.infer("critic", inputs["rows"], self._engines.critic.values)}

    def _kl_penalty(self, step: RunningStep, inputs: Values) -> Values:
        algorithm = step.settings.algorithm
        penalties, mean = kl_penalties(
            inputs["rows"],
            inputs["start_logprobs"],
            inputs["reference_logprobs"],
            estimator=algorithm.kl_estimator,
            kl_coef=algorithm.kl_coef,
            gather=self._gather,
        )
        return {"penalties": penalties, "kl_mean": mean}

    def _gae(self, step: RunningStep, inputs: Values) -> Values:
        algorithm = self._settings.algorithm
        advantages, returns, quality = critic_advantages(
            inputs["rows"],
            inputs["outcomes"],
            inputs["values"],
            inputs.get("penalties"),
            gamma=algorithm.gamma,
            gae_lambda=algorithm.gae_lambda,
            is_whitened=algorithm.advantage_std == "batch",
            gather=self._gather,
        )
        return {"advantages": advantages, "returns": returns, "value_quality": quality}

    def _penalised_advantages(self, step: RunningStep, inputs: Values) -> Values:
        advantages = penalised_advantages(
            inputs["rows"], step.batch.slots, inputs["penalties"], rule=self._rule, gather=self._gather
        )
        return {"advantages": advantages}

    def _train_actor(self, step: RunningStep, inputs: Values) -> Values:
        columns = [name for name in (START, REFERENCE) if name in inputs]
        rows = with_columns(inputs["rows"], {name: inputs[name] for name in columns}, advantages=inputs["advantages"])
        stats = self._engines.actor.train_step(
            rows, step=step.number, total_steps=self._settings.run.steps, columns=columns
        )
        step.trained.extend(rows)
        return {"actor_stats": stats}

    def _train_critic(self, step: RunningStep, inputs: Values) -> Values:
        assert self._engines.critic is not None
        rows = with_columns(inputs["rows"], {VALUES: inputs["values"], RETURNS: inputs["returns"]})
        stats = self._engines.critic.train_step(
            self._engines.rows_for("critic", rows), step=step.number, total_steps=self._settings.run.steps
        )
        return {"critic_stats": stats}
