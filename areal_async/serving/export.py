"""What was recorded as a table for others: answers with their feedback, or pairs of which one is preferred.

``answers`` has a row for each answer, with the newest reward, rating and comment on it; ``pairs`` one for each
conversation that had answers of different rewards: the best and the worst, as ``reward-model`` takes them.
"""

import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from areal_async.errors import UserError
from areal_async.monitor.output import replacing
from areal_async.serving.records import (
    ANSWERS,
    FEEDBACK,
    MAX_RATING,
    MIN_RATING,
    Answer,
    FeedbackLine,
    Line,
    files_of,
    lines_in,
)

FORMS = ("answers", "pairs")
SUFFIXES = (".jsonl", ".parquet")
NUM_ROWS_AT_ONCE = 1000

Row = dict[str, Any]


def export(directory: Path, path: Path, *, form: str) -> tuple[int, dict[Path, int]]:
    """Write what a folder has recorded; return how many rows there are, and of damaged lines how many in which file.

    The file appears whole or not at all. Damaged lines are left out, and so are those that a crash cut short.

    Raises:
        UserError: it cannot be written, or its name ends in none of ``SUFFIXES``.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"--export: got {path}, need a name that ends in {' or '.join(SUFFIXES)}")
    if not files_of(directory, ANSWERS):
        raise UserError(f"--export: got {directory}, which has no answers; serve some first")
    damaged: list[Path] = []
    answers = read_answers(directory, damaged)
    rows = answers if form == "answers" else pairs_of(answers)
    with replacing("--export", path) as temporary:
        is_text = path.suffix == ".jsonl"
        num_rows = _write_lines(temporary, rows) if is_text else _write_parquet(temporary, rows, form)
    return num_rows, Counter(damaged)


def read_answers(directory: Path, damaged: list[Path] | None = None) -> Iterator[Row]:
    """Yield every recorded answer, oldest first, with ``reward``, ``rating`` and ``comment``, None where there is none.

    What counts is what the answer's own key has said: whoever has come by its id has not been given the answer.
    Of several feedbacks on one answer the newest word counts, for each of the three. An answer that has a rating and no
    reward gets 0 for the lowest rating to 1 for the highest.

    Args:
        damaged: takes the file of each line that is damaged, which is left out.
    """
    damaged = [] if damaged is None else damaged
    said = _feedback(directory, damaged)
    for line in _lines(directory, ANSWERS, Answer, damaged):
        row = msgspec.structs.asdict(line)
        row |= {"reward": None, "rating": None, "comment": None} | said.get((line.id, line.choice, line.key), {})
        if row["reward"] is None and row["rating"] is not None:
            row["reward"] = (row["rating"] - MIN_RATING) / (MAX_RATING - MIN_RATING)
        yield row


def pairs_of(answers: Iterator[Row]) -> Iterator[Row]:
    """Yield the best and the worst answer to each conversation that has answers of different rewards."""
    best: dict[str, Row] = {}
    worst: dict[str, Row] = {}
    for row in answers:
        if row["reward"] is None or row["tool_calls"]:
            continue
        prompt = row["prompt"]
        if prompt not in best or row["reward"] > best[prompt]["reward"]:
            best[prompt] = row
        if prompt not in worst or row["reward"] < worst[prompt]["reward"]:
            worst[prompt] = row
    for prompt, good in best.items():
        bad = worst[prompt]
        if good["reward"] > bad["reward"]:
            yield {
                "question": [{"role": one["role"], "content": one["content"]} for one in good["messages"]],
                "chosen": good["completion"],
                "rejected": bad["completion"],
                **{f"{name}_chosen": good[name] for name in ("id", "version", "reward")},
                **{f"{name}_rejected": bad[name] for name in ("id", "version", "reward")},
            }


def _feedback(directory: Path, damaged: list[Path]) -> dict[tuple[str, int, str], Row]:
    said: dict[tuple[str, int, str], Row] = {}
    for line in sorted(_lines(directory, FEEDBACK, FeedbackLine, damaged), key=lambda one: one.at):
        words = {name: getattr(line, name) for name in ("reward", "rating", "comment")}
        said.setdefault((line.id, line.choice, line.key), {}).update({k: v for k, v in words.items() if v is not None})
    return said


def _lines(directory: Path, name: str, kind: type[Line], damaged: list[Path]) -> Iterator[Line]:
    for path in files_of(directory, name):
        yield from lines_in(path, kind, damaged)


def _write_lines(path: Path, rows: Iterator[Row]) -> int:
    num_rows = 0
    with path.open("wb") as file:
        for row in rows:
            file.write(msgspec.json.encode(row) + b"\n")
            num_rows += 1
        os.fsync(file.fileno())
    return num_rows


def _write_parquet(path: Path, rows: Iterator[Row], form: str) -> int:
    schema, num_rows = _schema(form), 0
    with pq.ParquetWriter(path, schema) as writer:
        while some := list(islice(rows, NUM_ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(some, schema=schema))
            num_rows += len(some)
    return num_rows


def _schema(form: str) -> "pa.Schema":
    """Return the columns of a form and their types."""
    text, whole, number = pa.string(), pa.int64(), pa.float64()
    message = {"role": text, "content": text}
    if form == "pairs":
        about = {"id": text, "version": text, "reward": number}
        ends = {f"{name}_{end}": kind for end in ("chosen", "rejected") for name, kind in about.items()}
        columns = {"question": pa.list_(pa.struct(message)), "chosen": text, "rejected": text, **ends}
        return pa.schema(columns)
    kinds = {str: text, int: whole, float: number, float | None: number, list[str]: pa.list_(text)}
    own = {
        "messages": pa.list_(pa.struct(message | dict.fromkeys(("tool_calls", "name", "tool_call_id"), text))),
        "prompt_ids": pa.list_(pa.int32()),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
    }
    columns = {name: own.get(name) or kinds[kind] for name, kind in get_type_hints(Answer).items()}
    return pa.schema({**columns, "reward": number, "rating": whole, "comment": text})
