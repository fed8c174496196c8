"""Rows that travel come back as they were."""

from dataclasses import fields, replace

import numpy as np
import pytest

from areal_async.trainer.engine.parallel.resharder import decode_rows, encode_rows
from areal_async.trainer.packing.rows import VALUES, TrainRow, with_columns
from tests.unit.trainer.models import random_rows


def full_row() -> TrainRow:
    """Return a row that has all that a row can have."""
    row = with_columns(random_rows(1), {VALUES: [np.arange(random_rows(1)[0].num_tokens) / 3]})[0]
    length = row.num_tokens
    return replace(
        row,
        advantage=np.linspace(-1, 1, length).astype(np.float32),
        temperature=np.linspace(0, 2, length).astype(np.float32),
        ages=np.arange(length, dtype=np.int64),
        turns=np.zeros(length, dtype=np.int16),
        images=(b"one", b"another"),
        index=7,
    )


@pytest.mark.parametrize("rows", [[], random_rows(3), [full_row()]], ids=["none", "plain", "full"])
def test_rows_come_back_as_they_were(rows: list[TrainRow]) -> None:
    back = decode_rows(encode_rows(rows))

    assert len(back) == len(rows)
    for row, other in zip(rows, back, strict=True):
        for field in fields(TrainRow):
            mine, theirs = getattr(row, field.name), getattr(other, field.name)
            if field.name == "columns":
                assert {name: list(np.float32(one)) for name, one in mine.items()} == {
                    name: list(one) for name, one in theirs.items()
                }
            elif isinstance(mine, np.ndarray):
                assert np.array_equal(mine, theirs)
                assert mine.dtype == theirs.dtype
                assert theirs.flags.writeable
            else:
                assert mine == theirs
