"""A comparison of two versions in its folder: what each has answered to the same rows, as it comes, and the result.

answers.jsonl     a line for each answer, when it is given
comparison.json   what is asked, from the start; with the result when all has been answered
comparison.md     the result for people, and comparison.html with both answers to the rows that differ

Invariant: an answer that stands in the file is not asked for again; one folder has the answers to one question.
"""

import hashlib
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple, Self

import msgspec

from areal_async.errors import UserError, WireError
from areal_async.process.atomic_folders import write_whole
from areal_async.process.file_locks import try_lock
from areal_async.protocol.fields import Count, TokenText
from areal_async.protocol.types import Record
from areal_async.protocol.wire import decode_json
from areal_async.versions import evaluations
from areal_async.versions.accuracy import sum_up
from areal_async.versions.evaluations import MAX_ERROR
from areal_async.versions.statistics import ALPHA, compare

ANSWERS, RESULT, TEXT, PAGE = "answers.jsonl", "comparison.json", "comparison.md", "comparison.html"
FOLDER = "comparisons"
"""Of a run's directory: there each has its own."""
SHOWN_DIGITS = 8
"""Of a question's hash, in the name of its folder."""
MAX_NAME_CHARACTERS = 40
"""Of a side, in the name of a folder."""
MAX_TEXT_CHARACTERS = 20_000
"""Of an answer: the rest is not kept."""
MAX_LINE_BYTES = 1 << 20
MAX_RESULT_BYTES = 16 << 20
UNREADABLE = "cannot be read"
REMEDY = "remove its folder, and compare again"

Name = Annotated[str, msgspec.Meta(max_length=1000)]
Which = Literal["a", "b"]
Asked = tuple[Which, str, int, int]
"""An answer that is wanted: side, task, row, sample."""


class Side(Record, frozen=True, kw_only=True):
    """Who answers."""

    name: Name
    """As people read it."""
    run: Name = ""
    version: Name = ""
    """Of the run; empty where no checkpoint tells it."""
    model: Name = ""
    """Folder or hub name, where it is no run's."""
    server: Name = ""
    """Address, where one runs already."""
    settings: dict[str, Name] = {}
    """What it has otherwise than the other side."""


class Answer(evaluations.Answer, frozen=True, kw_only=True):
    """One answer, as a line of the file."""

    side: Which
    text: str = ""
    """What the model said, cut off where that is long."""
    version: Name = ""
    """The weights that its server said it had."""

    @property
    def asked(self) -> Asked:
        """What it answers."""
        return self.side, self.task, self.row, self.sample


class Scores(Record, frozen=True, kw_only=True):
    """What the answers of one side came to, by the names of an evaluation's record."""

    accuracy: float | None
    low: float | None
    high: float | None
    num_scored: Count
    num_failed: Count
    num_samples: Count
    pass_at: dict[str, float]
    reasons: dict[str, Count]
    is_graded: bool
    num_tokens_mean: float | None
    """Sampled tokens of a scored answer; None for no such answer."""


class Compared(Record, frozen=True, kw_only=True):
    """What the second side, b, gets more than the first, a: see ``statistics.Paired``."""

    task: str
    """Empty where it is over the rows of all tasks."""
    num_rows: Count
    num_left_out: Count
    difference: float | None
    low: float | None
    high: float | None
    wins: Count
    ties: Count
    losses: Count
    mcnemar_p: float | None
    a: Scores
    b: Scores


class Comparison(Record, frozen=True, kw_only=True):
    """What is compared, and the result."""

    comparison_id: Name
    digest: Name
    """Hash of all that is asked: sides, rows, settings."""
    a: Side
    b: Side
    num_samples: Count
    """Answers to each row. One is greedy."""
    alpha: float = ALPHA
    """Chance that an interval of the result does not hold the difference."""
    rows: dict[TokenText, Count]
    """Task -> how many of its rows are answered."""
    at: str = ""
    """When it was begun, and by whom."""
    by: str = ""
    overall: Compared | None = None
    """Over all rows; None until all is answered."""
    tasks: list[Compared] = []
    schema: Literal[1] = 1

    @classmethod
    def of(
        cls, a: Side, b: Side, *, num_samples: int, rows: Mapping[str, int], question: Any, at: str = "", by: str = ""
    ) -> Self:
        """Return one that is to be made.

        Args:
            question: all that answers depend on beside the sides and these numbers; anything that JSON has.
        """
        asked = [msgspec.structs.asdict(a), msgspec.structs.asdict(b), num_samples, dict(rows), question]
        digest = hashlib.sha256(msgspec.json.encode(asked, order="sorted", enc_hook=str)).hexdigest()
        names = [re.sub(r"[^A-Za-z0-9.=_-]+", "-", side.name)[-MAX_NAME_CHARACTERS:].strip("-.") for side in (a, b)]
        return cls(
            comparison_id=f"{names[0]}_{names[1]}_{digest[:SHOWN_DIGITS]}",
            digest=digest,
            a=a,
            b=b,
            num_samples=num_samples,
            rows=dict(rows),
            at=at,
            by=by,
        )

    @property
    def wanted(self) -> Iterator[Asked]:
        """All answers that it is made of."""
        return (
            (side, task, row, sample)
            for side in ("a", "b")
            for task, num_rows in self.rows.items()
            for row in range(num_rows)
            for sample in range(self.num_samples)
        )

    def with_result(self, answers: Iterable[Answer]) -> Self:
        """Return it with what answers come to."""
        given = list(answers)
        tasks = [self._compared(task, [one for one in given if one.task == task]) for task in self.rows]
        overall = msgspec.structs.replace(tasks[0], task="") if len(tasks) == 1 else self._compared("", given)
        return msgspec.structs.replace(self, tasks=tasks, overall=overall)

    def _compared(self, task: str, answers: Sequence[Answer]) -> Compared:
        sides = [[one for one in answers if one.side == side] for side in ("a", "b")]
        a, b = (self._scores(side) for side in sides)
        paired = compare(*(rewards_of(side) for side in sides), alpha=self.alpha)._asdict()
        del paired["first"], paired["second"]  # over the rows of both; a side's own are in its scores
        return Compared(task=task, a=a, b=b, **paired)

    def _scores(self, answers: Sequence[Answer]) -> Scores:
        lengths = [one.num_tokens for one in answers if one.reward is not None]
        told = [((one.task, one.row), one.reward, one.error) for one in answers]
        return Scores(
            **sum_up(told, num_samples=self.num_samples),
            num_tokens_mean=sum(lengths) / len(lengths) if lengths else None,
        )


def rewards_of(answers: Iterable[Answer]) -> dict[Hashable, list[float]]:
    """Return the rewards of each row of each task, also where it has none; one side's answers."""
    rows: dict[Hashable, list[float]] = {}
    for one in answers:
        rows.setdefault((one.task, one.row), []).extend([] if one.reward is None else [one.reward])
    return rows


class Changed(NamedTuple):
    """A row that has another value from one side than from the other."""

    task: str
    row: int
    difference: float
    """Of the mean rewards, b's less a's."""
    a: list[Answer]
    b: list[Answer]


def changed_rows(answers: Iterable[Answer]) -> list[Changed]:
    """Return these rows, what was lost first, and of it what was lost by most."""
    rows: dict[tuple[str, int], dict[str, list[Answer]]] = {}
    for one in answers:
        rows.setdefault((one.task, one.row), {"a": [], "b": []})[one.side].append(one)
    changed = []
    for (task, row), sides in rows.items():
        paired = compare(*(rewards_of(side) for side in sides.values()))
        if paired.difference:
            changed.append(Changed(task, row, paired.difference, **sides))
    return sorted(changed, key=lambda one: one.difference)


class ComparisonFolder:
    """A comparison in the making: nobody else adds to it meanwhile."""

    def __init__(self, path: Path, comparison: Comparison, file: IO[bytes], answers: Iterable[Answer]) -> None:
        self.path = path
        self.comparison = comparison
        self._file = file
        self._answers = {one.asked: one for one in answers}

    @property
    def left(self) -> list[Asked]:
        """What has not been answered yet."""
        return [one for one in self.comparison.wanted if one not in self._answers]

    @property
    def answers(self) -> list[Answer]:
        """What has been answered, in the order in which it is asked."""
        return [self._answers[one] for one in self.comparison.wanted if one in self._answers]

    def add(self, answer: Answer) -> None:
        """Keep one more answer, whatever becomes of this process from now on."""
        text, error = answer.text[:MAX_TEXT_CHARACTERS], answer.error[:MAX_ERROR]
        answer = msgspec.structs.replace(answer, text=text, error=error)
        self._answers[answer.asked] = answer
        self._file.write(msgspec.json.encode(answer) + b"\n")
        self._file.flush()

    def finish(self) -> Comparison:
        """Write the result, of which nothing may be left, and return it; one that is there stays as old as it is."""
        assert not self.left
        if self.comparison.overall is None:
            self.comparison = self.comparison.with_result(self.answers)
            write_result(self.path, self.comparison)
        return self.comparison


@contextmanager
def opened(path: Path, comparison: Comparison, *, option: str = "--output") -> Iterator[ComparisonFolder]:
    """Go on with a comparison in its folder, or begin it, for as long as the block lasts.

    Args:
        option: that names the folder, for what is refused.

    Raises:
        UserError: another process is at it, it has another comparison, or its files were damaged.
        OSError: it cannot be written.
    """
    path.mkdir(parents=True, exist_ok=True)
    with (path / ANSWERS).open("a+b") as file:
        if not try_lock(file):
            raise UserError(f"{option}: another process compares in {path}; wait for it, or name another folder")
        if (path / RESULT).exists():
            found = read_result(path)
            if found.digest != comparison.digest:
                raise UserError(
                    f"{option}: got {path}, which has a comparison of {found.a.name} and {found.b.name} with other "
                    "sides, rows or settings, need the same; name another folder"
                )
            comparison = found
        else:
            write_result(path, comparison)
        yield ComparisonFolder(path, comparison, file, _read_answers(file, path / ANSWERS))


def read_result(path: Path) -> Comparison:
    """Read a comparison of its folder; ``overall`` is None where it is not whole.

    Raises:
        UserError: there is none, or its file was damaged.
    """
    file = path / RESULT
    try:
        with file.open("rb") as opened_file:
            data = opened_file.read(MAX_RESULT_BYTES + 1)
    except OSError as exc:
        raise UserError(f"{file}: {UNREADABLE}: {exc.strerror}; name the folder of a comparison") from exc
    try:
        if len(data) > MAX_RESULT_BYTES:
            raise WireError(f"got more than {MAX_RESULT_BYTES} bytes")
        return decode_json(data, Comparison, what="comparison")
    except WireError as exc:
        raise UserError(f"{file}: {UNREADABLE}: {exc}; {REMEDY}") from exc


def read_answers(path: Path) -> list[Answer]:
    """Read the answers of a comparison's folder.

    Raises:
        UserError: there are none, or the file was damaged.
    """
    file = path / ANSWERS
    try:
        with file.open("rb") as opened_file:
            return list(_decoded(opened_file, file))
    except OSError as exc:
        raise UserError(f"{file}: {UNREADABLE}: {exc.strerror}; name the folder of a comparison") from exc


def write_result(path: Path, comparison: Comparison) -> None:
    """Leave a comparison in its folder, whole or not at all."""
    write_whole(path / RESULT, msgspec.json.format(msgspec.json.encode(comparison)) + b"\n")


def _read_answers(file: IO[bytes], path: Path) -> list[Answer]:
    """Read what was answered before, and have the next line begin a line: the last may have been cut short."""
    answers = list(_decoded(file, path))
    file.truncate(sum(map(len, _lines(file, path))))
    return answers


def _decoded(file: IO[bytes], path: Path) -> Iterator[Answer]:
    for number, line in enumerate(_lines(file, path), 1):
        try:
            yield decode_json(line, Answer, what="answer")
        except WireError as exc:
            raise UserError(f"{path}: line {number} {UNREADABLE}: {exc}; {REMEDY}") from exc


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yield each line that has its end."""
    file.seek(0)
    while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
        yield line
    if len(line) == MAX_LINE_BYTES:
        raise UserError(f"{path}: got a line of more than {MAX_LINE_BYTES} bytes; {REMEDY}")
