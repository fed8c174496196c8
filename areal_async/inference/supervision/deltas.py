"""Versions as what has changed since the one before, and the copies that a host rebuilds from it on its own disk.

A file of bf16 weights differs from the one before it in few of its 16-bit words where the learning rate is small: Adam
moves a weight by about the rate, and most weights' neighbours lie further off. ``FILE.delta`` beside the whole file
holds those words: for each ``BLOCK_WORDS`` words how many, then their places within the block, then what they are
now; four bytes a word. It names the digests of the file it is of and of the one it makes.

Invariants: what is rebuilt has the announced digest, or is not used; a delta to other bytes than those that are held,
by their digest, is not applied, so one that is lost, doubled or out of order costs a whole copy and nothing else.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import structlog

from areal_async.errors import UserError
from areal_async.inference.faults import StagingFault
from areal_async.process.atomic_folders import publish_file, written_whole
from areal_async.protocol.types import WeightsVersion

SUFFIX = ".delta"
WORD = np.dtype("<u2")
BLOCK_WORDS = 1 << 16
"""A place within a block is a word too."""
CHUNK_BYTES = 256 * BLOCK_WORDS * WORD.itemsize
"""Of a file in memory at once."""
MOST_SHARE = 0.5
"""Of a file's bytes: a delta of more is not worth its pass over the file that it is of."""
NUM_KEPT = 3
"""Versions on a host: the newest, and those that a slow server may still be loading."""

log = structlog.get_logger()


def write_delta(base: Path, file: Path, *, base_sha256: str, sha256: str) -> int:
    """Write beside a file what has changed in it since ``base``; return its bytes, or 0 where that is not worth it.

    Raises:
        OSError: one cannot be read, or it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    size = file.stat().st_size
    if base.stat().st_size != size or size % WORD.itemsize:
        return 0
    counts, places, words, num_bytes = [], [], [], 0
    with base.open("rb") as before, file.open("rb") as after:
        for old, new in zip(_chunks(before), _chunks(after), strict=True):
            changed = np.flatnonzero(old != new)
            num_blocks = -(-len(new) // BLOCK_WORDS)
            counts.append(np.bincount(changed // BLOCK_WORDS, minlength=num_blocks).astype(np.uint32))
            places.append((changed % BLOCK_WORDS).astype(WORD))
            words.append(new[changed])
            num_bytes += 4 * num_blocks + 2 * WORD.itemsize * len(changed)
            if num_bytes > MOST_SHARE * size:
                return 0
    content = {
        name: np.concatenate(parts) for name, parts in (("counts", counts), ("places", places), ("words", words))
    }
    temporary = file.with_name(f".{file.name}{SUFFIX}.tmp")
    try:
        save_file(content, temporary, metadata={"base_sha256": base_sha256, "sha256": sha256})
    except SafetensorError as exc:
        raise OSError(f"{temporary}: {exc}") from exc
    shutil.copymode(file, temporary)
    publish_file(temporary, delta := file.with_name(file.name + SUFFIX))
    return delta.stat().st_size


def apply_delta(delta: Path, base: Path, into: Path, *, base_sha256: str, sha256: str) -> str:
    """Write ``into`` what a delta makes of ``base``; return why it is not that, or nothing.

    Args:
        base_sha256: of ``base``, as it was when it was written here.
        sha256: what the result is to have.

    Raises:
        OSError: one cannot be read, or ``into`` cannot be written.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(delta, framework="np") as content:
            names = content.metadata() or {}
            if (names.get("base_sha256"), names.get("sha256")) != (base_sha256, sha256):
                return "it is of other files"
            counts, places, words = (content.get_tensor(name) for name in ("counts", "places", "words"))
    except SafetensorError as exc:
        return str(exc)
    digest, block, word = hashlib.sha256(), 0, 0
    with base.open("rb") as before, into.open("wb") as after:
        for chunk in _chunks(before):
            blocks = counts[block : block + CHUNK_BYTES // WORD.itemsize // BLOCK_WORDS]
            ends = word + int(blocks.sum())
            where = np.repeat(np.arange(len(blocks)) * BLOCK_WORDS, blocks) + places[word:ends]
            if where.size and where.max() >= len(chunk):
                return "it changes what is not there"
            chunk[where] = words[word:ends]
            block, word = block + len(blocks), ends
            after.write(chunk.data)
            digest.update(chunk.data)
        os.fsync(after.fileno())
    return "" if digest.hexdigest() == sha256 else f"it makes {digest.hexdigest()}, need {sha256}"


class HostCopies:
    """The newest versions on the disk of a host, for the servers of one node."""

    def __init__(self, folder: Path) -> None:
        """Begin with none; what an earlier node has left in ``folder`` goes.

        Raises:
            UserError: nothing can be written there.
        """
        self._folder = folder
        self._kept: list[WeightsVersion] = []
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as exc:
            raise UserError(
                f"launch.weights_cache: got {folder}, need a folder that a node can write on each host ({exc}); name "
                "another, or leave it out"
            ) from exc

    def stage(self, target: WeightsVersion) -> WeightsVersion:
        """Have a version here, rebuilt where that can be, else copied; return it as it lies here.

        Raises:
            StagingFault: its files are not what was announced.
            OSError: they cannot be read, or there is no room here.
        """
        source, num_read, num_rebuilt = Path(target.path), 0, 0
        with written_whole(self._folder / target.version) as partial:
            for path in sorted(source.iterdir()):
                if path.is_file() and not path.name.endswith(SUFFIX) and path.name not in target.sha256:
                    shutil.copyfile(path, partial / path.name)
            for name, sha256 in target.sha256.items():
                num_bytes = self._rebuild(source / name, partial / name, sha256)
                num_rebuilt += bool(num_bytes)
                num_read += num_bytes or _copy(source / name, partial / name, sha256, target.version)
        staged = WeightsVersion(
            version=target.version, path=str(self._folder / target.version), sha256=target.sha256,
            tensors_sha256=target.tensors_sha256, kind=target.kind,
        )  # fmt: skip
        self._kept = [*(one for one in self._kept if one.version != target.version), staged]
        while len(self._kept) > NUM_KEPT:
            shutil.rmtree(self._kept.pop(0).path, ignore_errors=True)
        log.info(
            "weights.copied", version=target.version, num_files=len(target.sha256), num_rebuilt=num_rebuilt,
            num_bytes_read=num_read,
        )  # fmt: skip
        return staged

    def close(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _rebuild(self, source: Path, into: Path, sha256: str) -> int:
        """Make a file of the newest one here and its delta; return the bytes read of that, 0 where it can't."""
        delta = source.with_name(source.name + SUFFIX)
        if not self._kept or not delta.exists():
            return 0
        held = self._kept[-1]
        base_sha256 = held.sha256.get(source.name, "")
        try:
            why = apply_delta(delta, Path(held.path, source.name), into, base_sha256=base_sha256, sha256=sha256)
        except OSError as exc:
            why = str(exc)
        if why:
            log.warning("weights.not_rebuilt", file=str(source), held=held.version, cause=why)
            return 0
        return delta.stat().st_size


def check_files(target: WeightsVersion) -> None:
    """Hold the files of a version against their announced hashes.

    Raises:
        StagingFault: a file is missing or differs.
    """
    for name, expected in target.sha256.items():
        path = Path(target.path, name)
        try:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as exc:
            raise StagingFault(f"weights {target.version}: {exc}") from exc
        if found != expected:
            raise StagingFault(f"weights {target.version}: {path} has hash {found}, need {expected}")


def _copy(source: Path, into: Path, sha256: str, version: str) -> int:
    digest, num_bytes = hashlib.sha256(), 0
    with source.open("rb") as before, into.open("wb") as after:
        while chunk := before.read(CHUNK_BYTES):
            after.write(chunk)
            digest.update(chunk)
            num_bytes += len(chunk)
        os.fsync(after.fileno())
    if digest.hexdigest() != sha256:
        raise StagingFault(f"weights {version}: {source} has hash {digest.hexdigest()}, need {sha256}")
    return num_bytes


def _chunks(file: IO[bytes]) -> Iterator["np.ndarray[tuple[int], np.dtype[np.uint16]]"]:
    """Give the words of a file, so many at a time that they are whole blocks but for the last."""
    while len(chunk := np.fromfile(file, WORD, CHUNK_BYTES // WORD.itemsize)):
        yield chunk
