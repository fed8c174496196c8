"""A log that has grown too large is set aside and begins anew, under whoever writes it; what it takes stays bounded."""

from pathlib import Path

import anyio
import pytest

from areal_async.launch import rotation
from areal_async.launch.rotation import rotate, run_rotation
from tests.brokers import until

LINE = b"x" * 99 + b"\n"


def test_whoever_writes_a_log_goes_on_at_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "server-0-0.log"
    with path.open("ab", buffering=0) as file:
        file.write(LINE * 20)

        assert rotate(tmp_path, 1000) == [path]
        file.write(b"next\n")

    assert path.read_bytes() == b"next\n"
    assert (tmp_path / "server-0-0.log.1").read_bytes() == LINE * 20


def test_what_logs_take_stays_bounded_however_much_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0.jsonl"
    with path.open("ab", buffering=0) as file:
        for _ in range(100):
            file.write(LINE * 15)
            rotate(tmp_path, 1000)

    assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= 2 * len(LINE) * 15
    assert {one.name for one in tmp_path.iterdir()} == {"trainer-0.jsonl", "trainer-0.jsonl.1"}


def test_what_is_small_or_no_log_is_left_alone(tmp_path: Path) -> None:
    sizes = {"node-0.jsonl": 10, "node-0.jsonl.1": 30, "stacks-node-0.txt": 30, "node-0.out": 0}
    for name, num_lines in sizes.items():
        (tmp_path / name).write_bytes(LINE * num_lines)

    assert rotate(tmp_path, 1000) == []
    assert rotate(tmp_path / "nowhere", 1000) == []
    assert {one.name: one.stat().st_size // len(LINE) for one in tmp_path.iterdir()} == sizes


def test_a_log_that_cannot_be_set_aside_stays_whole_and_holds_up_no_other(tmp_path: Path) -> None:
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_bytes(LINE * 20)
    (tmp_path / "a.log.1").mkdir()

    assert rotate(tmp_path, 1000) == [tmp_path / "b.log"]
    assert (tmp_path / "a.log").read_bytes() == LINE * 20
    assert not (tmp_path / "a.log.tmp").exists()


@pytest.mark.anyio
async def test_all_logs_of_a_folder_are_looked_at_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(rotation, "INTERVAL_S", 0.01)
    path = tmp_path / "controller.jsonl"

    def is_empty() -> bool:
        return path.stat().st_size == 0

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_rotation, tmp_path)
        for letter in (b"a", b"b"):
            path.write_bytes(letter * 2000)
            await until(is_empty)
            assert path.with_name("controller.jsonl.1").read_bytes() == letter * 2000
        tasks.cancel_scope.cancel()
