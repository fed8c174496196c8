"""What was recorded as a table for others: answers with their feedback, or pairs of which one is preferred.

``answers`` has a row for each answer, with the newest reward, rating and comment on it; ``pairs`` one for each
conversation that had answers of different rewards: the best and the worst, as ``reward-model`` takes them.
"""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from areal_async.errors import UserError
from areal_async.monitor.output import replacing
from areal_async.process.json_lines import json_lines
from areal_async.serving.records import ANSWERS, FEEDBACK, MAX_RATING, MIN_RATING, Answer, FeedbackLine, files_of

FORMS = ("answers", "pairs")
SUFFIXES = (".jsonl", ".parquet")
NUM_ROWS_AT_ONCE = 1000

Row = dict[str, Any]


def export(directory: Path, path: Path, *, form: str) -> int:
    """Write what a folder has recorded; return how many rows there are.

    The file appears whole or not at all. Lines that a crash cut short are left out.

    Raises:
        UserError: it cannot be written, or its name ends in none of ``SUFFIXES``.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"--export: got {path}, need a name that ends in {' or '.join(SUFFIXES)}")
    if not files_of(directory, ANSWERS):
        raise UserError(f"--export: got {directory}, which has no answers; serve some first")
    rows = read_answers(directory) if form == "answers" else pairs_of(read_answers(directory))
    with replacing("--export", path) as temporary:
        return _write_lines(temporary, rows) if path.suffix == ".jsonl" else _write_parquet(temporary, rows, form)


def read_answers(directory: Path) -> Iterator[Row]:
    """Yield every recorded answer, oldest first, with ``reward``, ``rating`` and ``comment``, None where there is none.

    Of several feedbacks on one answer the newest word counts, for each of the three. An answer that has a rating and no
    reward gets 0 for the lowest rating to 1 for the highest.
    """
    said = _feedback(directory)
    for line in _lines(directory, ANSWERS, Answer):
        row = msgspec.structs.asdict(line)
        row |= {"reward": None, "rating": None, "comment": None} | said.get((line.id, line.choice), {})
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


def _feedback(directory: Path) -> dict[tuple[str, int], Row]:
    said: dict[tuple[str, int], Row] = {}
    for line in sorted(_lines(directory, FEEDBACK, FeedbackLine), key=lambda one: one.at):
        words = {name: getattr(line, name) for name in ("reward", "rating", "comment")}
        said.setdefault((line.id, line.choice), {}).update({k: v for k, v in words.items() if v is not None})
    return said


def _lines(directory: Path, name: str, kind: type[Any]) -> Iterator[Any]:
    for path in files_of(directory, name):
        for line in json_lines(path):
            yield msgspec.convert(line, kind)


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
