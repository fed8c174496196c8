"""Trajectories as a file for other programs: JSON lines and Parquet with all tokens, CSV with facts and texts."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from areal_async.monitor.output import replacing
from areal_async.monitor.text import json_text
from areal_async.monitor.token_text import Detokenizer
from areal_async.monitor.token_views import token_lists
from areal_async.monitor.trajectory_list import Entry
from areal_async.protocol.types import Trajectory
from areal_async.trainer.output.archive_reader import ArchivedTrajectory

SUFFIXES = (".jsonl", ".parquet", ".csv")
TEXTS = ("prompt", "answer")
"""Columns of CSV besides the facts: what was given up to the first sampled token, and all from there on."""


def export(
    path: Path,
    entries: Sequence[Entry],
    recorded: Mapping[str, ArchivedTrajectory],
    decoder: Detokenizer,
    *,
    stored: Mapping[str, Trajectory] = MappingProxyType({}),
) -> int:
    """Write entries, with the tokens of those that were trained, and of those that are stored; return how many.

    The file's name ends in one of ``SUFFIXES``. It appears whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    whole = {name: one.trajectory for name, one in recorded.items()} | dict(stored)
    with replacing("--export", path) as temporary:
        if path.suffix == ".csv":
            with temporary.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow((*Entry._fields, *TEXTS))
                writer.writerows((*entry, *prompt_and_answer(whole.get(entry.id), decoder)) for entry in entries)
        else:
            rows = [describe(entry, recorded.get(entry.id), whole.get(entry.id), decoder) for entry in entries]
            if path.suffix == ".jsonl":
                temporary.write_text("".join(json_text(row) + "\n" for row in rows), encoding="utf-8")
            else:
                _write_parquet(temporary, rows)
    return len(entries)


def prompt_and_answer(trajectory: Trajectory | None, decoder: Detokenizer) -> tuple[str, str]:
    """Return prompt and answer; those of several sequences one below the other, nothing without tokens."""
    parts = []
    for sequence in trajectory.sequences if trajectory is not None else ():
        tokens, first = sequence.token_ids.tolist(), int(sequence.loss_mask.argmax())
        parts.append(tuple(decoder.decode(one, skip_special_tokens=False) for one in (tokens[:first], tokens[first:])))
    prompts, answers = zip(*parts, strict=True) if parts else ((), ())
    return "\n\n".join(prompts), "\n\n".join(answers)


def describe(
    entry: Entry, recorded: ArchivedTrajectory | None, trajectory: Trajectory | None, decoder: Detokenizer
) -> dict[str, Any]:
    """Return everything about one trajectory. Token lists have one entry per token, None for a version nobody sampled.

    ``trained`` is None where it is not known yet; all are empty without a trajectory.
    """
    sequences, credits = (trajectory.sequences, trajectory.slot.credits) if trajectory is not None else ([], [])
    return {
        **entry._asdict(),
        "info": json_text(trajectory.info if trajectory is not None else {}),
        "credits": [msgspec.structs.asdict(credit) for credit in credits],
        "sequences": [
            {
                "text": decoder.decode(sequence.token_ids.tolist(), skip_special_tokens=False),
                "trained": recorded.trained_mask(sequence) if recorded is not None else None,
                **token_lists(sequence),
            }
            for sequence in sequences
        ],
    }


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema()), path)


def schema() -> pa.Schema:
    """Return the columns of what ``describe`` returns."""
    whole, number, text = pa.int64(), pa.float64(), pa.string()
    kinds: dict[object, pa.DataType] = {str: text, int: whole, int | None: whole, float | None: number}
    sequence = {
        "text": text,
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "trained": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(text),
        "images": pa.list_(pa.struct({"sha256": text, "num_bytes": whole, "width": whole, "height": whole})),
    }
    credit = {"reward": number, "num_tokens": whole, "role": text}
    columns = {name: kinds[kind] for name, kind in get_type_hints(Entry).items()}
    columns |= {"info": text, "credits": pa.list_(pa.struct(credit)), "sequences": pa.list_(pa.struct(sequence))}
    return pa.schema(columns)
