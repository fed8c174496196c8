"""What was written stands beside it: a bit, a file or a folder that is not so any more is found and named."""

import subprocess
from pathlib import Path

import pytest

from areal_async.process.atomic_folders import LEDGER, versions_in
from areal_async.protocol.types import Version
from areal_async.trainer.engine.digests import (
    SUMS,
    damage,
    digest_of_sums,
    find_damage,
    newest_intact,
    set_aside,
    set_aside_in,
    write_sums,
)
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks
from tests.unit.trainer.models import engine_of


def made(checkpoints: Path, version: str) -> Path:
    folder = checkpoints / version
    (folder / "state").mkdir(parents=True)
    (folder / LEDGER).write_bytes(b"{}")
    (folder / "state" / "__0_0.distcp").write_bytes(version.encode() * 4)
    write_sums(folder, {})
    return folder


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_checkpoint_of_the_engine_has_the_digest_of_each_of_its_files(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    folder = tmp_path / "1-1"
    Engines(actor=engine_of(model, ranks)).save_checkpoint(folder, b"{}")

    listed = {line.partition("  ")[2] for line in (folder / SUMS).read_text().splitlines()}
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert listed == there - {SUMS}
    assert {"ledger", "state/.metadata", "state/__0_0.distcp"} <= listed
    assert subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=folder, check=False).returncode == 0
    assert damage(folder) == ""


@pytest.mark.parametrize("name", ["ledger", "state/__0_0.distcp"])
def test_any_flipped_bit_is_found_and_its_file_named(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path, "1-3")
    for bit in range((folder / name).stat().st_size * 8):
        flip(folder / name, bit)
        assert name in damage(folder)
        flip(folder / name, bit)
    assert damage(folder) == ""


def test_no_flipped_bit_of_the_list_itself_goes_unnoticed(tmp_path: Path) -> None:
    folder = made(tmp_path, "1-3")
    for bit in range((folder / SUMS).stat().st_size * 8):
        flip(folder / SUMS, bit)
        assert damage(folder), f"bit {bit}"
        flip(folder / SUMS, bit)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path, "1-3")
    (folder / "state" / "__0_0.distcp").unlink()
    assert damage(folder) == "state/__0_0.distcp is missing"
    (folder / LEDGER).unlink()
    assert damage(folder) == "ledger is missing"
    assert damage(tmp_path / "1-4") == "its folder is gone"


def test_list_that_was_cut_short_says_nothing_of_the_rest(tmp_path: Path) -> None:
    folder = made(tmp_path, "1-3")
    whole = (folder / SUMS).read_bytes()
    for num_bytes in range(len(whole) - 1):  # all but the last line's end
        (folder / SUMS).write_bytes(whole[:num_bytes])
        assert damage(folder), f"{num_bytes} bytes"
    for num_bytes in range(whole.index(b"\n") + 1):
        (folder / SUMS).write_bytes(whole[num_bytes + 1 :])
        assert damage(folder), f"without the first {num_bytes + 1} bytes"
    (folder / SUMS).write_bytes(b"0" * 64 + b"  other\n")
    (folder / "other").touch()
    assert damage(folder)

    (folder / "notes.txt").write_text("anybody's")
    (folder / SUMS).write_bytes(whole)
    assert damage(folder) == ""


def test_list_that_is_not_the_one_on_record_is_damage(tmp_path: Path) -> None:
    folder = made(tmp_path, "1-3")
    recorded = digest_of_sums(folder)
    assert damage(folder, sums_sha256=recorded) == ""

    flip(folder / "state" / "__0_0.distcp", 3)
    (folder / SUMS).unlink()
    write_sums(folder, {})
    assert damage(folder) == "", "by itself it is whole"
    assert damage(folder, sums_sha256=recorded) == f"{SUMS} is not what was written: its SHA-256 differs"
    (folder / SUMS).unlink()
    assert damage(folder, sums_sha256=recorded) == f"{SUMS} is missing"
    assert digest_of_sums(folder) == ""


def test_checkpoint_from_before_there_were_digests_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = made(tmp_path, "1-3")
    (folder / SUMS).unlink()

    assert damage(folder) == ""


def test_newest_whole_one_that_fits_is_taken(tmp_path: Path) -> None:
    for version in ("1-2", "1-4", "1-6", "2-6", "1-8", "2-8"):
        made(tmp_path, version)
    flip(tmp_path / "2-6" / LEDGER, 0)

    def newest(*unfit: str) -> Path | None:
        return newest_intact(tmp_path, before=Version(1, 8), fits=lambda path: path.name not in unfit)

    assert newest() == tmp_path / "2-8", "of the same step, made by another lineage"
    assert newest("2-8") == tmp_path / "1-6"
    assert newest("2-8", "1-6") == tmp_path / "1-4"
    assert newest("2-8", "1-6", "1-4", "1-2") is None


def test_one_that_is_set_aside_counts_no_more_and_stays(tmp_path: Path) -> None:
    for _ in range(2):
        set_aside(made(tmp_path, "1-3"))
    made(tmp_path, "1-2")

    assert versions_in(tmp_path) == [Version(1, 2)]
    assert set_aside_in(tmp_path) == ["1-3.damaged", "1-3.damaged-2"]
    assert find_damage(tmp_path) == []


def test_damage_is_found_in_whichever_checkpoint_it_is(tmp_path: Path) -> None:
    for version in ("1-2", "1-4", "1-6"):
        made(tmp_path, version)
    flip(tmp_path / "1-4" / "state" / "__0_0.distcp", 9)

    ((version, reason),) = find_damage(tmp_path)

    assert version == "1-4"
    assert reason == "state/__0_0.distcp is not what was written: its SHA-256 differs"
