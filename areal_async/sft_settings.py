"""Every setting of a supervised fine-tuning, frozen, from the same sources as a run's settings."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from areal_async.settings import DatasetSettings, ModelSettings, RunSettings, Section, TrainerSettings


class SftRunSettings(Section):
    """One fine-tuning."""

    name: str = "sft"
    """Name of the run, 1 to 48 of ``a-z 0-9 _ -``; names its directory."""
    seed: int = 1
    """Seeds the order of the rows, and which of them are held out."""
    directory: Path = Path("runs")
    """Where run directories are made."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the rows that are not held out; ignored when ``steps`` is set."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer updates in all; ``None`` follows from ``epochs``."""
    log_every_steps: int = Field(default=10, ge=1)
    """A line is printed every so many steps, and after the last."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        RunSettings(name=self.name)
        return self


class SftDatasetSettings(DatasetSettings):
    """Prompts and the answers to learn."""

    question: str = "question"
    """Column with the user's message, or with a conversation: a list of ``{role, content}``."""
    answer: str = "answer"
    """Column with what the model is to say."""


class SftTrainerSettings(Section):
    """The processes that fine-tune; the names mean what they mean in ``trainer``."""

    num_ranks: int = Field(default=1, ge=1)
    """Trainer processes; one per GPU."""
    lr: float = Field(default=1.0e-5, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises from 0."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """After the warm-up: constant, or down to 0 over all steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averages."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    batch_sequences: int = Field(default=64, ge=1)
    """Rows per step, over all ranks."""
    token_budget: int = Field(default=16384, ge=8)
    """Tokens of one packed row; the longest sequence must fit."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads per rank where there is no GPU."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    @property
    def engine(self) -> TrainerSettings:
        """The engine's settings."""
        return TrainerSettings(**self.model_dump(exclude={"batch_sequences"}))


class SftEvalSettings(Section):
    """Rows that are never trained on."""

    limit: int = Field(default=256, ge=0)
    """Rows held out for the loss at the end; 0 for none."""


class SftSettings(Section):
    """A whole fine-tuning."""

    run: SftRunSettings = SftRunSettings()
    model: ModelSettings = ModelSettings()
    dataset: SftDatasetSettings
    trainer: SftTrainerSettings = SftTrainerSettings()
    eval: SftEvalSettings = SftEvalSettings()

    @property
    def run_directory(self) -> Path:
        """``<run.directory>/<run.name>``."""
        return self.run.directory / self.run.name
