"""What a host rebuilds is what the trainer wrote, bit for bit, or a whole copy; and few bytes at a small rate."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import torch
from safetensors.torch import save_file

from areal_async.errors import UserError
from areal_async.inference.faults import StagingFault
from areal_async.inference.supervision import deltas
from areal_async.inference.supervision.deltas import NUM_KEPT, SUFFIX, HostCopies, write_delta
from areal_async.inference.supervision.swap import Staging
from areal_async.protocol.types import WeightsVersion

NAME = "model.safetensors"
NUM_VERSIONS = 50


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Versions:
    """A trainer's: bf16 weights of a normal distribution, which Adam moves."""

    def __init__(self, folder: Path, *, lr: float = 1e-6, shape: tuple[int, int] = (300, 500)) -> None:
        self._folder, self._step = folder, 0
        generator = torch.Generator().manual_seed(7)
        self._generator = generator
        self._weights = torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator))
        self._norm = torch.nn.Parameter(torch.ones(3))
        self._adam = torch.optim.AdamW([self._weights, self._norm], lr=lr)
        self.newest: WeightsVersion | None = None

    def write(self) -> WeightsVersion:
        """Train a step and write its version, and what has changed."""
        self._weights.grad = torch.randn(self._weights.shape, generator=self._generator)
        self._norm.grad = torch.ones(3)
        self._adam.step()
        self._step += 1
        folder = self._folder / f"1-{self._step}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        tensors = {"norm": self._norm.detach().bfloat16(), "w": self._weights.detach().bfloat16()}
        save_file(tensors, folder / NAME)
        sha256 = digest(folder / NAME)
        if self.newest is not None:
            before = Path(self.newest.path, NAME)
            write_delta(before, folder / NAME, base_sha256=self.newest.sha256[NAME], sha256=sha256)
        self.newest = WeightsVersion(version=folder.name, path=str(folder), sha256={NAME: sha256})
        return self.newest


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path / "weights")


@pytest.fixture
def copies(tmp_path: Path) -> HostCopies:
    return HostCopies(tmp_path / "cache")


@pytest.fixture
def said() -> Iterator[list[structlog.typing.EventDict]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def staged(copies: HostCopies, version: WeightsVersion) -> Path:
    """Stage it; return its file, which is the trainer's, bit for bit."""
    here = copies.stage(version)
    path = Path(here.path, NAME)
    assert digest(path) == version.sha256[NAME]
    assert (here.version, Path(here.path, "config.json").read_text()) == (version.version, "{}")
    return path


def test_fifty_versions_are_rebuilt_from_few_of_their_bytes(
    versions: Versions, copies: HostCopies, said: list[structlog.typing.EventDict], tmp_path: Path
) -> None:
    size = staged(copies, versions.write()).stat().st_size
    for _ in range(NUM_VERSIONS):
        staged(copies, versions.write())

    read = [one for one in said if one["event"] == "weights.copied"]
    assert [one["num_rebuilt"] for one in read] == [0] + [1] * NUM_VERSIONS
    share = sum(one["num_bytes_read"] for one in read[1:]) / (NUM_VERSIONS * size)
    print(f"{share:.3f} of the bytes")
    assert share <= 0.3
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["1-49", "1-50", "1-51"]
    assert len(list((tmp_path / "cache").iterdir())) == NUM_KEPT
    copies.close()
    assert not (tmp_path / "cache").exists()


def test_a_chunk_and_a_block_that_end_in_mid_file_are_whole(
    copies: HostCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "CHUNK_BYTES", 2 * deltas.BLOCK_WORDS * 2)
    versions = Versions(tmp_path / "wide", shape=(7, 91_003))
    for _ in range(3):
        staged(copies, versions.write())


@pytest.mark.parametrize("fault", ["lost", "doubled", "reordered", "cut short", "forged", "missed", "own copy damaged"])
def test_a_delta_that_is_not_the_next_one_costs_a_whole_copy(
    versions: Versions, copies: HostCopies, said: list[structlog.typing.EventDict], fault: str
) -> None:
    first, second, third = (versions.write() for _ in range(3))
    held = staged(copies, first)
    delta = Path(second.path, NAME + SUFFIX)
    if fault == "lost":
        delta.unlink()
    elif fault == "doubled":
        staged(copies, second)
        second = third
        delta = shutil.copyfile(delta, Path(third.path, NAME + SUFFIX))
    elif fault == "reordered":
        shutil.copyfile(Path(third.path, NAME + SUFFIX), delta)
    elif fault == "cut short":
        os.truncate(delta, delta.stat().st_size // 2)
    elif fault == "forged":
        data = bytearray(delta.read_bytes())
        data[-2:] = b"\xff\xff"
        delta.write_bytes(data)
    elif fault == "missed":
        second = third
    else:
        held.write_bytes(b"\0" * held.stat().st_size)
    said.clear()

    staged(copies, second)

    assert [(one["num_rebuilt"], one["num_bytes_read"]) for one in said if one["event"] == "weights.copied"] == [
        (0, Path(second.path, NAME).stat().st_size)
    ]
    assert ("weights.not_rebuilt" in {one["event"] for one in said}) == (fault != "lost")
    staged(copies, third if second is not third else versions.write())
    assert said[-1]["num_rebuilt"] == 1, "the one that follows what is held then"


def test_what_changes_in_most_of_its_words_has_no_delta(copies: HostCopies, tmp_path: Path) -> None:
    versions = Versions(tmp_path / "weights", lr=1e-2)
    staged(copies, versions.write())

    newest = versions.write()

    assert not Path(newest.path, NAME + SUFFIX).exists()
    staged(copies, newest)


def test_files_that_are_not_what_was_announced_are_refused_and_written_over(
    versions: Versions, copies: HostCopies
) -> None:
    first = versions.write()
    Path(first.path, NAME).write_bytes(b"other")

    with pytest.raises(StagingFault, match=r"weights 1-1: .*model.safetensors has hash"):
        copies.stage(first)

    staged(copies, versions.write())


@pytest.mark.anyio
async def test_without_room_here_servers_read_where_the_trainer_writes(
    versions: Versions, copies: HostCopies, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    version = versions.write()

    here, _ = await Staging(copies).stage(version)

    assert here == version


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(UserError, match=r"launch.weights_cache: got .*/file/run, need a folder that .*; name another"):
        HostCopies(tmp_path / "file" / "run")
