"""The ``health`` section: when a run that trains is to be looked at all the same."""

from pydantic import Field

from areal_async.config.section import Section

MAX_EQUAL_STEPS = 1000


class HealthSettings(Section):
    """Alarms about learning. They end nothing: a warning, an event and a number in the step's line."""

    equal_rewards_steps: int | None = Field(default=5, ge=1, le=MAX_EQUAL_STEPS)
    """Training steps in a row in which no group's rewards differ, so that nothing is learned; ``None`` for no alarm."""
    logprob_gap: float | None = Field(default=0.1, gt=0)
    """Mean |trainer - server| logprob, in nats, over tokens of the step's start version, above which the two no longer
    agree on what was sampled; ``None`` for no alarm. bfloat16 alone makes about a hundredth."""
    untrained_batches: int | None = Field(default=10, ge=1)
    """Groups that end without being trained between two cuts (filtered, rejected, failed, stale), in batches of
    ``rollout.batch_groups``, at which a run makes trajectories and no steps; ``None`` for no alarm."""
