"""JSON lines are read while they are written: the last one at once, however long the file is, and never half of one."""

from pathlib import Path

import pytest

from areal_async.monitor.report.data import StepLines
from areal_async.process.json_lines import BLOCK_BYTES, read_last_json_line


@pytest.mark.parametrize("size", [1, 100, BLOCK_BYTES // 2, BLOCK_BYTES - 20, BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_the_last_whole_line_is_found_wherever_a_block_begins(size: int, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = [f'{{"step": {step}, "text": "{"x" * size}"}}\n' for step in range(1, 6)]
    path.write_text("".join(lines) + '{"step": 6, "te')

    last = read_last_json_line(path)

    assert last == {"step": 5, "text": "x" * size}


def test_a_file_without_a_whole_line_has_no_last_one(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_last_json_line(path) is None
    path.write_text("")
    assert read_last_json_line(path) is None
    path.write_text('{"step": 1}')
    assert read_last_json_line(path) is None


def test_a_line_that_is_none_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": \n')

    assert read_last_json_line(path) == {"step": 1}


def test_steps_are_read_once_and_anew_after_a_restored_trainer_has_replaced_the_file(tmp_path: Path) -> None:
    path, steps = tmp_path / "metrics.jsonl", StepLines(tmp_path)
    assert steps.read() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert [line["step"] for line in steps.read()] == [1, 2, 3]
    with open(path, "a") as file:
        file.write('{"step": 4}\n')
    assert [line["step"] for line in steps.read()] == [1, 2, 3, 4]

    other = tmp_path / "other"
    other.write_text('{"step": 1}\n{"step": 2, "loss": 1}\n')
    other.replace(path)

    assert steps.read() == [{"step": 1}, {"step": 2, "loss": 1}]
