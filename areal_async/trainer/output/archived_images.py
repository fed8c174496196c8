"""The images that trained batches have shown, beside the archive: one Parquet file per step and rank, each image once.

    datasets.load_dataset("parquet", data_files="runs/<name>/images/*.parquet")

decodes them, for the column says so in the way of ``datasets``. A file is called as that of its trajectories, which
name images by their hash, and is there before it. Imports no torch and no Pillow.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from areal_async.errors import UserError
from areal_async.process.atomic_folders import publish_file
from areal_async.protocol.types import ImageRef, Version

FOLDER: Final = "images"
"""In the run's directory."""
GROUP_BYTES: Final = 32 << 20
"""Of the images that are written, and read, together; a larger one goes alone."""
_FEATURES = {
    "sha256": {"dtype": "string", "_type": "Value"},
    "width": {"dtype": "int32", "_type": "Value"},
    "height": {"dtype": "int32", "_type": "Value"},
    "image": {"_type": "Image"},
}
_SCHEMA = pa.schema(
    [
        ("sha256", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


def write_images(path: Path, refs: Iterable[ImageRef], images: Mapping[str, bytes]) -> None:
    """Store the images that are referred to; synced when this returns. Where there are none, there is no file.

    Args:
        images: hash -> the PNG.
    """
    named = {ref.sha256: ref for ref in refs}
    if not named:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    # PNGs are compressed already, and no two are the same.
    with pq.ParquetWriter(
        temporary, _SCHEMA, compression="none", use_dictionary=False, write_statistics=["sha256"]
    ) as writer:
        for together in _parted(named, images):
            rows = [
                {
                    "sha256": ref.sha256,
                    "width": ref.width,
                    "height": ref.height,
                    "image": {"bytes": images[ref.sha256], "path": None},
                }
                for ref in together
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA))
    publish_file(temporary, path)


def images_pattern(run_directory: Path, made: Version) -> Path:
    """Return what names the files with the images of the step that made a version, with a star for the rank."""
    return run_directory / FOLDER / f"step-{made.step:06d}-{made.lineage}-*.parquet"


def image_files(run_directory: Path, made: Version) -> list[Path]:
    """Return those that there are: one for each rank that had any."""
    pattern = images_pattern(run_directory, made)
    return sorted(pattern.parent.glob(pattern.name))


def read_images(run_directory: Path, made: Version, wanted: Collection[str]) -> dict[str, bytes]:
    """Return those images of the step that made a version whose hashes are wanted: hash -> the PNG.

    Raises:
        UserError: one is not there, or is not what its hash says, or a file cannot be read.
    """
    images = find_images(image_files(run_directory, made), wanted)
    if absent := sorted(set(wanted) - images.keys()):
        raise UserError(
            f"archive of {run_directory}: step {made.step} has shown the image {absent[0]}, which is in none of its "
            f"files in {FOLDER}/, or is damaged there; restore them"
        )
    return images


def find_images(paths: Iterable[Path], wanted: Collection[str]) -> dict[str, bytes]:
    """Return the wanted images that are whole in some files: hash -> the PNG.

    Raises:
        UserError: a file cannot be read.
    """
    missing, found = set(wanted), dict[str, bytes]()
    for path in paths:
        for sha256, png in each_image(path, missing) if missing else ():
            if hashlib.sha256(png).hexdigest() == sha256:
                found[sha256] = png
        missing -= found.keys()
    return found


def each_image(path: Path, wanted: Collection[str] | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield hash and bytes of the wanted images of one file, or of all, a few of them in memory at a time.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                names = file.read_row_group(group, columns=["sha256"]).column("sha256").to_pylist()
                if wanted is not None and not set(names) & set(wanted):
                    continue
                content = file.read_row_group(group, columns=["image"]).column("image").combine_chunks().field("bytes")
                for name, png in zip(names, content, strict=True):
                    if wanted is None or name in wanted:
                        yield name, png.as_py() or b""
    except (OSError, pa.ArrowException, KeyError) as exc:
        raise UserError(f"archive {path}: cannot be read: {str(exc).partition(chr(10))[0]}") from exc


def _parted(named: Mapping[str, ImageRef], images: Mapping[str, bytes]) -> Iterator[list[ImageRef]]:
    """Part images into those that are written together, by hash."""
    together: list[ImageRef] = []
    num_bytes = 0
    for sha256, ref in sorted(named.items()):
        if together and num_bytes + len(images[sha256]) > GROUP_BYTES:
            yield together
            together, num_bytes = [], 0
        together.append(ref)
        num_bytes += len(images[sha256])
    yield together
