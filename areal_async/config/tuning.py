"""Settings that the two kinds of fine-tuning on a data set have in common (``sft``, ``reward-model``)."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from areal_async.config.launch import LaunchSettings
from areal_async.config.section import OutputPath, Section
from areal_async.config.settings import DatasetSettings, ModelSettings, RunSettings, TemplateSettings, TrainerSettings
from areal_async.config.trainer import EngineSettings
from areal_async.protocol.fields import MAX_STEP


class TuningRunSettings(Section):
    """One fine-tuning."""

    name: str = "tuning"
    """Name of the run, 1 to 48 of ``a-z 0-9 _ -``; names its directory."""
    seed: int = 1
    """Seeds the order of the rows, and which of them are held out."""
    directory: OutputPath = Path("runs")
    """Where run directories are made; relative to the working directory, in a YAML file too."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the rows that are not held out; ignored when ``steps`` is set."""
    steps: int | None = Field(default=None, ge=1, le=MAX_STEP)
    """Optimizer updates in all; ``None`` follows from ``epochs``."""
    log_every_steps: int = Field(default=10, ge=1, le=MAX_STEP)
    """A line is printed every so many steps, and after the last."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        RunSettings(name=self.name)
        return self


class TuningTrainerSettings(EngineSettings):
    """The processes that fine-tune; the names mean what they mean in ``trainer``."""

    lr: float = Field(default=1.0e-5, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """After the warm-up: constant, or down to 0 over all steps."""
    token_budget: int = Field(default=16384, ge=8)
    """Tokens of one packed row; the longest sequence must fit, and of a pair both."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _ = self.engine  # a layout that does not fit says so
        return self

    @property
    def engine(self) -> TrainerSettings:
        """The engine's settings: those of a run's trainer that there are here."""
        shared = [name for name in TrainerSettings.model_fields if name in type(self).model_fields]
        return TrainerSettings(**{name: getattr(self, name) for name in shared})


class TuningEvalSettings(Section):
    """Rows that are never trained on."""

    limit: int = Field(default=256, ge=0)
    """Rows held out for the figures at the end; 0 for none."""


class TuningSettings(Section):
    """A whole fine-tuning."""

    run: TuningRunSettings = TuningRunSettings()
    model: ModelSettings = ModelSettings()
    template: TemplateSettings = TemplateSettings()
    dataset: DatasetSettings
    trainer: TuningTrainerSettings = TuningTrainerSettings()
    eval: TuningEvalSettings = TuningEvalSettings()
    launch: LaunchSettings = LaunchSettings()

    @property
    def run_directory(self) -> Path:
        """``<run.directory>/<run.name>``."""
        return self.run.directory / self.run.name
