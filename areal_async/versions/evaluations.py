"""What each held-out row got when a version was evaluated: ``evaluations/<version>.jsonl``, a line for each answer.

So two evaluated versions can be compared row by row without any new answer.
"""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.process.atomic_folders import write_whole
from areal_async.process.json_lines import json_lines
from areal_async.protocol.fields import Count, RewardNumber, TokenText, is_version
from areal_async.protocol.types import Record, Version

FOLDER = "evaluations"
MAX_ERROR = 300
"""Characters of why there is no reward."""
MAX_LINE_BYTES = 8 << 10


class Answer(Record, frozen=True, kw_only=True):
    """What one answer to one row got."""

    task: TokenText
    """Name of the workflow."""
    row: Count
    """Position among the task's held-out rows."""
    sample: Count = 0
    """Which of the answers to that row."""
    reward: RewardNumber | None = None
    """None where there is none, for the reason in ``error``."""
    error: str = ""
    num_tokens: Count = 0
    """Tokens that the model has said for it, in all its turns."""


def question_of(settings: Settings) -> dict[str, Any]:
    """Return what answers to held-out rows depend on, beside the weights, the rows, their workflows and sampling."""
    return {
        "model": settings.model.model_dump(mode="json", exclude={"path"}),
        "template": settings.rollout.template.model_dump(mode="json"),
        "policies": {name: policy.model_dump(mode="json") for name, policy in settings.policies.items()},
        "flags": settings.inference.flags,
        "environments": {task.name: settings.env_of(task) for task in settings.tasks},
    }


def asked_of(settings: Settings, task: str, *, rows: str, code: Mapping[str, str]) -> str:
    """Return the hash of what a task's answers depend on, beside the weights.

    Args:
        rows: hash of its held-out rows.
        code: those of the workflows' files, by their paths.
    """
    sampling = settings.eval_sampling_of(task).model_dump()
    told = [task, rows, sorted(code.values()), settings.eval.samples, sampling, question_of(settings)]
    return hashlib.sha256(msgspec.json.encode(told, order="sorted", enc_hook=str)).hexdigest()


def read_asked(run_directory: Path, version: Version, task: str, asked: str) -> list[Answer]:
    """Return what an evaluation got that has asked the same of one version; nothing where there was none.

    One during which servers went on to newer weights speaks of several.

    Raises:
        UserError: as for ``read``.
    """
    name = str(version)
    wanted = {"eval_id": name, "oldest": name, "newest": name, "workflow": task, "asked": asked}
    lines = json_lines(run_directory / "eval.jsonl")
    if not any(all(line.get(key) == value for key, value in wanted.items()) for line in lines):
        return []
    return [one for one in read(run_directory, version) if one.task == task]


def write(run_directory: Path, version: Version, answers: Collection[Answer]) -> None:
    """Leave what an evaluation's answers got, whole or not at all; another one of that version is replaced."""
    ordered = sorted(answers, key=lambda one: (one.task, one.row, one.sample))
    write_whole(_file(run_directory, version), msgspec.json.Encoder().encode_lines(ordered))


def evaluated(run_directory: Path) -> list[Version]:
    """Return the versions whose answers are kept, oldest first."""
    names = [path.stem for path in (run_directory / FOLDER).glob("*.jsonl")]
    return sorted(Version.parse(name) for name in names if is_version(name))


def read(run_directory: Path, version: Version) -> list[Answer]:
    """Return what the answers of an evaluation got.

    Raises:
        UserError: there is no such file, or it was damaged.
    """
    path, answers = _file(run_directory, version), list[Answer]()
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                answers.append(msgspec.json.decode(line, type=Answer))
    except OSError as exc:
        raise UserError(f"{path}: cannot be read: {exc.strerror}; the version was not evaluated, or long ago") from exc
    except msgspec.MsgspecError as exc:
        raise UserError(f"{path}: line {len(answers) + 1} is no answer: {exc}; remove the file") from exc
    return answers


def _file(run_directory: Path, version: Version) -> Path:
    return run_directory / FOLDER / f"{version}.jsonl"
