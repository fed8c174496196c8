"""The trajectories that a run has trained, as a data set: ``datasets.load_dataset(FOLDER)`` gives a row for each."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from areal_async.errors import UserError
from areal_async.hub.card import TAGS, hub_names, sections, table, whole
from areal_async.hub.facts import CARD, RunFacts
from areal_async.hub.folders import DATA_SET, Exported, draw_curve, filled, hash_files
from areal_async.hub.known_secrets import KnownSecrets
from areal_async.monitor.token_text import Detokenizer
from areal_async.monitor.token_views import IdDetokenizer
from areal_async.monitor.trajectory_export import TEXTS, describe, prompt_and_answer, schema
from areal_async.monitor.trajectory_list import entry_of
from areal_async.trainer.output.archive_reader import IMAGES, ArchivedTrajectory, archive_files, read_recorded
from areal_async.trainer.output.archived_images import read_images

FILE_BYTES = 256 << 20
"""After which another file is begun."""
DICTIONARY_BYTES = 64 << 20
"""Of a step's images, each of which is stored once though siblings show the same."""
NOT_TOLD = ("state", "error", "near_step")
"""Columns in which all that was trained has the same, or what only a list needs."""
COLUMNS = {
    "id": "group and sibling, as `trajectories --show` takes it",
    "step": "training step that trained it",
    "workflow": "the task",
    "reward, advantage": "what it was scored and trained with; means where replies have their own (`credits`)",
    "oldest, newest": "versions of the weights that sampled it",
    "truncated": "turns that ended by length",
    "prompt, answer": "text up to the first sampled token, and all from there on",
    "sequences": "`text`, and for each token `token_ids`, `loss_mask` (sampled), `trained` (in the loss), `logprobs` "
    "of the sampling policy, `versions`",
    "info": "what the workflow recorded, as JSON",
    "images": "what was shown, in the order of `sequences`; of a model that sees alone",
}


def write_data_set(folder: Path, directory: Path, facts: RunFacts, secrets: KnownSecrets, decoder: Detokenizer) -> None:
    """Write the data set of all steps up to the facts' version.

    Has a step's trajectories in memory, and its images.

    Raises:
        UserError: a secret is in it, an archived file is damaged, or there is no tokenizer, without which nobody could
            look for secrets.
    """
    if isinstance(decoder, IdDetokenizer):
        raise UserError(
            f"export: got no tokenizer of {facts.model.name}, need it, for what is said is looked through before it is "
            "given away; put the model's folder back"
        )
    files = [paths for made, paths in sorted(archive_files(directory).items()) if made.step <= facts.version.step]
    sees = IMAGES in pq.read_schema(files[0][0]).names
    with filled(folder, Exported(DATA_SET, facts.run, str(facts.version)), secrets) as partial:
        (partial / "data").mkdir()
        batches = (_rows(directory, paths, decoder, sees=sees) for paths in files)
        num_rows = _write(partial / "data", batches, _schema(sees=sees))
        hashes = hash_files(partial)
        draw_curve(facts, partial)
        (partial / CARD).write_text(_card(facts, hashes, num_rows=num_rows, sees=sees), encoding="utf-8")


def _schema(*, sees: bool) -> pa.Schema:
    """Return the columns, with what ``datasets`` has to know to decode images."""
    from datasets import Features, Image, List  # imported here: it takes seconds

    text = pa.string()
    columns = [one for one in schema() if one.name not in NOT_TOLD] + [pa.field(name, text) for name in TEXTS]
    features = Features.from_arrow_schema(pa.schema(columns))
    if sees:
        features[IMAGES] = List(Image())
    return features.arrow_schema


def _rows(directory: Path, paths: Sequence[Path], decoder: Detokenizer, *, sees: bool) -> list[dict[str, Any]]:
    recorded = read_recorded(paths)
    wanted = {sha256 for one in recorded for sha256 in one.trajectory.images}
    images = read_images(directory, recorded[0].made, wanted) if wanted else {}
    return [_row(one, decoder, images if sees else None) for one in recorded]


def _row(one: ArchivedTrajectory, decoder: Detokenizer, images: Mapping[str, bytes] | None) -> dict[str, Any]:
    told = describe(entry_of(one), one, one.trajectory, decoder)
    row = {name: value for name, value in told.items() if name not in NOT_TOLD}
    row |= dict(zip(TEXTS, prompt_and_answer(one.trajectory, decoder), strict=True))
    if images is not None:
        shown = [ref.sha256 for sequence in one.trajectory.sequences for ref in sequence.images or ()]
        row[IMAGES] = [{"bytes": images[sha256], "path": None} for sha256 in shown]
    return row


def _write(folder: Path, batches: Iterator[list[dict[str, Any]]], columns: pa.Schema) -> int:
    """Write each batch as one row group; return how many rows."""
    writer, num_rows, num_files = None, 0, 0
    path = folder
    try:
        for rows in batches:
            if writer is not None and path.stat().st_size > FILE_BYTES:
                writer.close()
                writer = None
            if writer is None:
                path = folder / f"train-{num_files:05d}.parquet"
                writer = pq.ParquetWriter(path, columns, dictionary_pagesize_limit=DICTIONARY_BYTES)
                num_files += 1
            writer.write_table(pa.Table.from_pylist(rows, schema=columns))
            num_rows += len(rows)
    finally:
        if writer is not None:
            writer.close()
    return num_rows


def _card(facts: RunFacts, hashes: Mapping[str, str], *, num_rows: int, sees: bool) -> str:
    from huggingface_hub import DatasetCardData  # imported here: it takes a while

    name = f"{facts.run}-trajectories-{facts.version}"
    data = DatasetCardData(
        pretty_name=name,
        size_categories=_size_category(num_rows),
        source_datasets=hub_names(facts.data) or None,
        task_categories=["image-text-to-text" if sees else "text-generation"],
        tags=TAGS,
        configs=[{"config_name": "default", "data_files": [{"split": "train", "path": "data/*.parquet"}]}],
    )
    about = (
        f"The {num_rows:,} trajectories that the run `{facts.run}` of areal_async trained `{facts.model.name}` on, in "
        f"the {facts.version.step} steps up to its version {facts.version}. What was never trained is not in it."
    )
    columns = table(("column", "what it has"), ((f"`{name}`", text) for name, text in COLUMNS.items()))
    return whole(data.to_yaml(), name, [about, f"## Rows\n\n{columns}", *sections(facts, hashes)])


def _size_category(num_rows: int) -> str:
    """Return the hub's name for so many rows."""
    edges = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M", 10_000_000: "1M<n<10M"}
    return next((name for edge, name in edges.items() if num_rows < edge), "10M<n<100M")
