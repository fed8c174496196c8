"""What fine-tunings on a data set have in common (``sft``, ``reward-model``)."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from areal_async.config.section import OutputPath, Section
from areal_async.config.settings import DatasetSettings, ModelSettings, RunSettings, TemplateSettings, TrainerSettings
from areal_async.config.trainer import Beta
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


class TuningTrainerSettings(Section):
    """The processes that fine-tune; the names mean what they mean in ``trainer``."""

    num_ranks: int = Field(default=1, ge=1)
    """Trainer processes; one per GPU."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Ranks that the layers are cut over; a row passes from rank to rank."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share the arithmetic of each layer."""
    replicas: int = Field(default=1, ge=1)
    """Copies of the model, each sharded over its own ranks."""
    lr: float = Field(default=1.0e-5, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEP)
    """Steps over which the rate rises from 0."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """After the warm-up: constant, or down to 0 over all steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay, on matrices only."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's averages."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    token_budget: int = Field(default=16384, ge=8)
    """Tokens of one packed row; the longest sequence must fit, and of a pair both."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads per rank where there is no GPU."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    cpu_offload: bool = False
    """Keep parameters, gradients and AdamW's averages in the host's memory, and update them there."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """In which gradients are added up over a step's rows and over ranks."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _ = self.engine  # a layout that does not fit says so
        return self

    @property
    def engine(self) -> TrainerSettings:
        """The engine's settings."""
        return TrainerSettings(**{name: getattr(self, name) for name in TuningTrainerSettings.model_fields})


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

    @property
    def run_directory(self) -> Path:
        """``<run.directory>/<run.name>``."""
        return self.run.directory / self.run.name
