"""The ``health`` and ``gate`` sections: when a run is to be looked at; what becomes of a version that does better."""

from typing import Literal

from pydantic import Field, field_validator

from areal_async.config.section import Section
from areal_async.config.tasks import EvalSettings
from areal_async.protocol.fields import MAX_REWARD, is_tag

MAX_EQUAL_STEPS = 1000


class HealthSettings(Section):
    """Alarms about learning: a warning, an event and a number in the step's line. They end nothing."""

    equal_rewards_steps: int | None = Field(default=5, ge=1, le=MAX_EQUAL_STEPS)
    """Training steps in a row in which no group's rewards differ, so that nothing is learned; ``None`` for no alarm."""
    logprob_gap: float | None = Field(default=0.1, gt=0)
    """Mean |trainer - server| logprob, in nats, over tokens of the step's start version, above which the two no longer
    agree on what was sampled; ``None`` for no alarm. bfloat16 alone makes about a hundredth."""
    rollback: bool = False
    """Whether the run goes back by itself when an alarm about a step begins: to the newest checkpoint before the first
    weights that show what is wrong, twice at the most. A third alarm ends nothing, as without it."""
    untrained_batches: int | None = Field(default=10, ge=1)
    """Groups that end without being trained between two cuts (filtered, rejected, failed, stale), in batches of
    ``rollout.batch_groups``, at which a run makes trajectories and no steps; ``None`` for no alarm."""


class GateSettings(Section):
    """Holds each evaluated version against the one that has a tag, row by row."""

    action: Literal["promote", "alarm"] | None = None
    """``promote`` gives the tag to a version that does better, ``alarm`` says so and leaves that to a person; both say
    it of one that does worse beyond doubt. ``None`` for no gate."""
    against: str = "champion"
    """The tag. While no version has ever had it, the first one that is evaluated and has a checkpoint gets it."""
    metric: Literal["accuracy", "pass"] = "accuracy"
    """What is compared of each row: the mean reward of its answers, or, of several (``eval.samples``), whether one of
    them has a reward of 1 or more."""
    at_least: float = Field(default=0.0, ge=-MAX_REWARD, le=MAX_REWARD)
    """What the low end of the interval of the difference must come to for a version to do better."""
    alpha: float = Field(default=0.05, gt=0, lt=1)
    """Chance that the interval does not hold the difference: 0.05 for one of 95 %."""

    @field_validator("against")
    @classmethod
    def _against(cls, against: str) -> str:
        if not is_tag(against):
            raise ValueError(f"got {against!r:.70}, need a tag: a lower-case letter, then letters, digits, - or _")
        return against

    def check_run(self, evaluation: EvalSettings, *, has_held_out: bool) -> None:
        """Check that a run has what its gate asks for.

        Raises:
            ValueError: it has not.
        """
        if self.action is not None and not (has_held_out and evaluation.every_steps):
            raise ValueError(
                f"gate.action: got {self.action} with eval.every_steps={evaluation.every_steps} and "
                f"{'a' if has_held_out else 'no'} held-out data set, need evaluations; set eval, or no gate"
            )
        if self.metric == "pass" and evaluation.samples == 1:
            raise ValueError("gate.metric: got pass with eval.samples=1, need several answers to each row; or accuracy")
