"""Every setting of the training of a reward model, frozen, from the same sources as a run's settings."""

from pydantic import Field

from areal_async.config.settings import DatasetSettings
from areal_async.config.tuning import TuningRunSettings, TuningSettings, TuningTrainerSettings


class RewardModelRunSettings(TuningRunSettings):
    """One training."""

    name: str = "reward_model"
    """Name of the run, 1 to 48 of ``a-z 0-9 _ -``; names its directory."""


class PairDatasetSettings(DatasetSettings):
    """Pairs of answers, of which one is preferred."""

    question: str | None = "question"
    """Column with the user's message, or with a conversation: a list of ``{role, content}``; ``None`` where the two
    below hold whole conversations."""
    chosen: str = "chosen"
    """Column with the better answer."""
    rejected: str = "rejected"
    """Column with the worse one."""


class RewardModelTrainerSettings(TuningTrainerSettings):
    """The processes that train; the names mean what they mean in ``trainer``."""

    batch_pairs: int = Field(default=64, ge=1)
    """Pairs per step, over all ranks."""


class RewardModelSettings(TuningSettings):
    """A whole training of a reward model."""

    run: RewardModelRunSettings = RewardModelRunSettings()
    dataset: PairDatasetSettings
    trainer: RewardModelTrainerSettings = RewardModelTrainerSettings()
