"""Folders as they are uploaded, each with its card and ``areal_async.json``, which says what it is of.

They appear whole or not at all, and never with the value of a known secret in them.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from areal_async.hub.card import TAGS, hub_names, sections, whole
from areal_async.hub.facts import CARD, RunFacts
from areal_async.hub.known_secrets import KnownSecrets
from areal_async.monitor.report.summary import PICTURE, draw
from areal_async.process.atomic_folders import written_whole
from areal_async.process.json_lines import decode_object
from areal_async.versions.evaluated import kind as kind_of

FOLDER = "hub"
"""In the run's directory: what was exported for the hub, where no other place is named."""
MANIFEST = "areal_async.json"
MAX_MANIFEST_BYTES = 1 << 20
BLOCK_BYTES = 1 << 20
MODEL, DATA_SET = "model", "dataset"
"""Kinds of repositories, as the hub calls them."""


class Exported(NamedTuple):
    """What a folder is of."""

    kind: str
    run: str
    version: str

    @property
    def what(self) -> str:
        """Say what it is."""
        return f"model of checkpoint {self.version}" if self.kind == MODEL else f"trajectories up to {self.version}"

    @property
    def place(self) -> str:
        """Name of its folder in ``FOLDER``."""
        return f"{'model' if self.kind == MODEL else 'trajectories'}_{self.version}"


def read_exported(folder: Path) -> Exported | None:
    """Return what a folder says that it is of; None for another folder."""
    try:
        with (folder / MANIFEST).open("rb") as file:
            found = decode_object(file.read(MAX_MANIFEST_BYTES)) or {}
        return Exported(*(str(found[name]) for name in Exported._fields))
    except (OSError, KeyError):
        return None


@contextmanager
def filled(folder: Path, exported: Exported, secrets: KnownSecrets) -> Iterator[Path]:
    """Give a folder to fill, which becomes ``folder`` unless a secret is found in it.

    Raises:
        UserError: one is found.
    """
    with written_whole(folder) as partial:
        yield partial
        (partial / MANIFEST).write_text(json.dumps(exported._asdict(), indent=1) + "\n", encoding="utf-8")
        secrets.refuse_in(partial)


def write_model(folder: Path, facts: RunFacts, secrets: KnownSecrets, *, write: Callable[[Path], None]) -> None:
    """Write a model's folder: what transformers loads, the reward curve and the card.

    Args:
        write: writes the model's own files into a folder, which it replaces.

    Raises:
        UserError: a secret is in it.
    """
    with filled(folder, Exported(MODEL, facts.run, str(facts.version)), secrets) as partial:
        write(partial)
        (partial / CARD).unlink(missing_ok=True)  # that of the model it began from
        hashes = hash_files(partial)
        sees = "vision_config" in json.loads((partial / "config.json").read_bytes())
        draw_curve(facts, partial)
        (partial / CARD).write_text(_model_card(facts, hashes, sees=sees), encoding="utf-8")


def draw_curve(facts: RunFacts, folder: Path) -> None:
    """Draw the reward curve, where a step was trained."""
    if facts.steps:
        draw(facts.steps, facts.evaluations, folder / PICTURE)


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file, by its name."""
    return {str(path.relative_to(folder)): _hash(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _model_card(facts: RunFacts, hashes: dict[str, str], *, sees: bool) -> str:
    from huggingface_hub import EvalResult, ModelCardData  # imported here: it takes a while

    task = "image-text-to-text" if sees else "text-generation"
    name = f"{facts.run}-{facts.version}"
    results = [
        EvalResult(
            task_type=task,
            dataset_type="held-out",
            dataset_name=f"held-out rows of {line.get('workflow')}",
            metric_type=kind_of(line),
            metric_value=line["accuracy"],
        )
        for lines in facts.evaluations.values()
        for line in lines
        if line.get("eval_id") == str(facts.version) and line.get("accuracy") is not None
    ]
    data = ModelCardData(
        base_model=facts.model.name if facts.model.is_on_hub else None,
        datasets=hub_names(facts.data) or None,
        eval_results=results or None,
        library_name="transformers",
        license=facts.model.licence or None,
        model_name=name,
        pipeline_tag=task,
        tags=TAGS,
    )
    algorithm = facts.settings["algorithm"]["name"]
    loader = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    about = (
        f"`{facts.model.name}`, trained for {facts.version.step} steps by reinforcement learning (`{algorithm}`): "
        f"version {facts.version} of the run `{facts.run}` of areal_async."
    )
    use = (
        f"## Use\n\n```python\nfrom transformers import {loader}, AutoTokenizer\n\n"
        f'model = {loader}.from_pretrained(".")  # this folder, or its name on the hub\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")\n```'
    )
    return whole(data.to_yaml(), name, [about, use, *sections(facts, hashes)])
