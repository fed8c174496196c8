"""The sections about what is asked: data sets, tasks and their shares, held-out data, the curriculum."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from areal_async.config.policy import MAX_PENALTY, check_top_k
from areal_async.config.section import FunctionPath, HubPath, Options, Section
from areal_async.environments.names import environment_name, spellings
from areal_async.protocol.fields import MAX_STEP, MAX_TEMPERATURE, MAX_TOP_K
from areal_async.protocol.subjects import TOKEN
from areal_async.user_files import parts_of


# Asked for several times per step, and each path made anew interns its parts: in the interpreter's table of such
# strings one that is gone still has its place, until the table is full and is made again, larger by megabytes.
@cache
def workflow_name(workflow: str) -> str:
    """Return the name of ``FILE.py``, of ``FILE.py:name`` or of an environment (``SCHEME:NAME``), a subject token."""
    if (environment := environment_name(workflow)) is not None:
        return environment.token
    return re.sub(r"[^A-Za-z0-9_-]", "_", parts_of(workflow)[1])


class DatasetSettings(Section):
    """Where rows come from: one of ``path``, ``python``, ``seeds`` and ``environment``."""

    path: HubPath | None = None
    """Hub name (``openai/gsm8k``), or a local .jsonl, .json, .csv or .parquet file, or a directory, as
    ``datasets.load_dataset`` takes it."""
    python: FunctionPath | None = None
    """Python file, with ``:name`` when its function is not called ``rows``: it takes nothing and returns rows as dicts,
    the same ones whenever it is called."""
    seeds: tuple[int, int] | None = None
    """First number and the one after the last: a row ``{seed: n}`` for each, for workflows that make up their tasks."""
    environment: FunctionPath | None = None
    """``SCHEME:NAME`` of an environment, which knows its tasks; a task whose workflow it is takes them anyway."""
    env: Options = {}
    """What of its options is otherwise for these rows, as another split of them to evaluate."""
    name: str | None = None
    """Configuration of a hub data set; ``None`` takes its default."""
    split: str = "train"
    """Split to take; a slice (``train[:100]``) works."""

    @property
    def source(self) -> str:
        """Where they come from, as messages call it."""
        return self.path or self.python or self.environment or f"seeds {self.seeds}"

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        sources = ("path", "python", "seeds", "environment")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) != 1:
            got, remedy = " and ".join(given) or "nothing", "; set the others to null" * bool(given)
            raise ValueError(f"got {got}, need one of path, python, seeds and environment{remedy}")
        if self.environment is not None and environment_name(self.environment) is None:
            raise ValueError(f"environment: got {self.environment!r}, need one of {spellings()}")
        if self.env and self.environment is None:
            raise ValueError(f"env: got options with {given[0]}, need environment; leave them out")
        if self.path is None and (self.name is not None or self.split != "train"):
            raise ValueError(f"got name or split with {given[0]}, need none; they are of a data set's path")
        if self.seeds is not None and not 0 < self.seeds[1] - self.seeds[0] <= MAX_STEP:
            raise ValueError(f"seeds: got {list(self.seeds)}, need the first and one after the last, which is larger")
        return self


class TaskSamplingSettings(Section):
    """What of ``rollout.sampling`` is otherwise for one task; ``None`` is the run's."""

    temperature: float | None = Field(default=None, ge=0, le=MAX_TEMPERATURE)
    """Divides the logits; 0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Smallest set of tokens with this probability."""
    top_k: int | None = Field(default=None, ge=-1, le=MAX_TOP_K)
    """Only the k likeliest tokens; -1 keeps all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Only tokens at least this share as likely as the likeliest."""
    frequency_penalty: float | None = Field(default=None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    """Taken off the logit of a token for each time that the answer has it."""
    presence_penalty: float | None = Field(default=None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    """Taken off the logit of a token that the answer has."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=MAX_PENALTY)
    """Divides the logit of a token that the answer has, or multiplies it where it is negative."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest completion of one turn, in tokens."""
    stop: tuple[str, ...] | None = None
    """Strings that end a turn, besides the end-of-turn token."""
    ignore_eos: bool | None = None
    """Go on past the end-of-turn token."""

    _check_top_k = field_validator("top_k")(check_top_k)


class TaskEvalSettings(Section):
    """Held-out rows of one task."""

    dataset: DatasetSettings | None = None
    """Where they come from; ``None`` for no evaluation of this task, unless ``eval.dataset`` names its rows."""
    limit: int | None = Field(default=None, ge=1)
    """Rows to take, from the first; ``None`` takes ``eval.limit``."""


class TaskSettings(Section):
    """A workflow and the rows it is given, with what is otherwise for it than for the run; ``None`` is the run's."""

    workflow: FunctionPath = "workflows/gsm8k.py"
    """Python file, with ``:name`` when the coroutine is not named like the file; or an environment, ``SCHEME:NAME``."""
    dataset: DatasetSettings
    """Its rows; left out, an environment's own."""
    env: Options = {}
    """Options of the task's environment, over those that are the run's."""
    ratio: float = Field(default=1.0, ge=0, le=1e6)
    """How often each of its rows is visited, compared with other tasks' rows: a task's share is ratio times rows. Each
    task has epochs of its own. 0 switches it off; one task at least must be on."""
    group_size: int | None = Field(default=None, ge=1)
    """Siblings per prompt."""
    min_group_size: int | None = Field(default=None, ge=1)
    """Scored siblings below which a group is not trained."""
    episode_deadline_s: float | None = Field(default=None, gt=0)
    """Seconds after which a node stores an unfinished sibling as failed."""
    sampling: TaskSamplingSettings = TaskSamplingSettings()
    eval: TaskEvalSettings = TaskEvalSettings()

    @property
    def name(self) -> str:
        """The workflow's name, a subject token."""
        return workflow_name(self.workflow)

    @property
    def changes(self) -> Mapping[str, Any]:
        """What of ``rollout`` is otherwise, by the same names; what of ``sampling``, under that name."""
        own = {name: getattr(self, name) for name in ("group_size", "min_group_size", "episode_deadline_s")}
        sampling = {name: value for name, value in self.sampling if value is not None}
        return {name: value for name, value in {**own, "sampling": sampling or None}.items() if value is not None}

    def options_over(self, env: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of its environment: its own over others; none where it has no environment."""
        return _over(env, self.env) if environment_name(self.workflow) is not None else {}

    def with_options(self, dataset: DatasetSettings, env: Mapping[str, Any]) -> DatasetSettings:
        """Return where rows of the task come from, with the options over ``env`` where that is its environment."""
        if dataset.environment is None or dataset.environment != self.workflow:
            return dataset
        return dataset.model_copy(update={"env": _over(self.options_over(env), dataset.env)})

    @model_validator(mode="before")
    @classmethod
    def _take_its_rows(cls, given: Any) -> Any:
        if (
            not isinstance(given, dict)
            or not isinstance(given.get("workflow"), str)
            or given.get("dataset") is not None
        ):
            return given
        return given | {"dataset": {"environment": given["workflow"]}} if environment_name(given["workflow"]) else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.env and environment_name(self.workflow) is None:
            raise ValueError(f"env: got options with the workflow {self.workflow}, need an environment: {spellings()}")
        if not TOKEN.fullmatch(self.name):
            raise ValueError(f"workflow: got {self.workflow!r}, need a file that ends in a name")
        return self


def check_env(env: Mapping[str, Any], tasks: Sequence[TaskSettings]) -> None:
    """Refuse options of environments in a run that has none.

    Raises:
        ValueError: it is so.
    """
    if env and tasks and not any(environment_name(task.workflow) for task in tasks):
        raise ValueError(f"env: got options with no environment among the tasks, need one: {spellings()}")


def _over(options: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with others put over them, name by name at any depth."""
    both = {
        name: _over(value, own[name])
        for name, value in options.items()
        if isinstance(value, dict) and isinstance(own.get(name), dict)
    }
    return {**options, **own, **both}


class EvalSettings(Section):
    """Evaluation on held-out rows, beside training and without credits."""

    every_steps: int = Field(default=20, ge=0, le=MAX_STEP)
    """Training steps between evaluations, besides the first and the last; 0 for only these two."""
    dataset: DatasetSettings | None = None
    """Held-out rows of the first task; ``None`` for those that each task names (``tasks.0.eval``), if any."""
    limit: int = Field(default=256, ge=1)
    """Rows to take of each task, from the first."""
    samples: int = Field(default=1, ge=1, le=1024)
    """Answers to each row. One is greedy; several are sampled as in training, for avg@k and pass@k."""
    share: float = Field(default=0.1, ge=0, le=1)
    """Answers that ``compare`` has the nodes of a live run give, for each one that training asks for; 0 for none."""


class CurriculumSettings(Section):
    """Which prompts are passed over for a while because nothing is to be learned from them now."""

    name: Literal["none", "pass_rate"] = "none"
    """``none`` admits every prompt once per epoch, ``pass_rate`` more seldom those that are always or never solved."""
    solved: float = 0.95
    """Running mean reward from which on a prompt counts as always solved."""
    unsolved: float = 0.05
    """Running mean reward up to which a prompt counts as never solved."""
    newest_weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest visit in the running mean; 1 looks at that one alone."""
    keep: float = Field(default=0.25, gt=0, le=1)
    """Share of those prompts that is admitted in an epoch all the same: what they teach may have changed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.unsolved >= self.solved:
            raise ValueError(
                f"unsolved: got {self.unsolved}, need less than solved={self.solved}; else every prompt would be both"
            )
        return self
