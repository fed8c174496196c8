"""Every setting of a supervised fine-tuning, frozen, from the same sources as a run's settings."""

from typing import Literal

from pydantic import Field

from areal_async.config.settings import DatasetSettings, LoraSettings
from areal_async.config.tuning import TuningRunSettings, TuningSettings, TuningTrainerSettings


class SftRunSettings(TuningRunSettings):
    """One fine-tuning."""

    name: str = "sft"
    """Name of the run, 1 to 48 of ``a-z 0-9 _ -``; names its directory."""


class SftDatasetSettings(DatasetSettings):
    """Prompts and the answers to learn."""

    question: str = "question"
    """Column with the user's message, or with a conversation: a list of ``{role, content}``."""
    answer: str | None = "answer"
    """Column with what the model is to say; ``None`` where the one above has whole conversations, of which everything
    that the assistant says is learned."""
    images: str = "images"
    """Column with an image, or a list of them in the order of the parts ``{"type": "image"}`` of a conversation; not
    needed where the parts have the images themselves."""


class SftTrainerSettings(TuningTrainerSettings):
    """The processes that fine-tune; the names mean what they mean in ``trainer``."""

    batch_sequences: int = Field(default=64, ge=1)
    """Rows per step, over all ranks."""
    lora: LoraSettings = LoraSettings()
    """Adapters instead of all weights; ``transfer`` means nothing here."""
    vision: Literal["train", "freeze", "lora"] = "train"
    """What becomes of the vision tower of a model that sees."""


class SftSettings(TuningSettings):
    """A whole fine-tuning."""

    run: SftRunSettings = SftRunSettings()
    dataset: SftDatasetSettings
    trainer: SftTrainerSettings = SftTrainerSettings()
