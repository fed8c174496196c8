"""What both cards tell of a run, up to one of its versions: from the files in its directory, without secrets."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_async.config.change_record import CHANGES
from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.hub.redaction import Redaction, shown_settings
from areal_async.monitor.report.summary import last_per_step
from areal_async.monitor.view import by_task
from areal_async.process.hub import fetch, is_local
from areal_async.process.json_lines import Line, read_json_lines
from areal_async.protocol.types import Version
from areal_async.trainer.output.archive_reader import read_lines
from areal_async.versions.registry import read_code, read_rows

CARD = "README.md"
LICENCES = ("LICENSE*", "LICENCE*", "COPYING*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model or a data set that the run began from."""

    name: str
    """Name on the hub, or of the folder or file."""
    is_on_hub: bool
    licence: str
    """The hub's name of its licence, as its own card says; empty where nothing tells."""
    hint: str
    """What is known of its licence, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What is told."""

    run: str
    version: Version
    settings: Mapping[str, Any]
    """The sections that others may read, redacted."""
    steps: Sequence[Line]
    """Lines of ``metrics.jsonl`` up to the version's step."""
    has_version: bool
    """Whether these steps led to the version; else the run has gone back behind it."""
    evaluations: Mapping[str, Sequence[Line]]
    """By task, up to the version's step; one task alone has an empty name."""
    changes: Sequence[Line]
    """Settings that were changed while the run went on, redacted."""
    rows: Mapping[str, Mapping[str, Any]]
    """Setting that names rows -> their number and hash."""
    model: Source
    data: Sequence[Source]
    hashes: Mapping[str, str]
    """SHA-256 of the settings, and of each file of the run's workflows."""

    @classmethod
    def read(cls, directory: Path, settings: Settings, version: Version) -> "RunFacts":
        """Read them. What the hub says of sources is asked there where it can be reached."""
        steps = [line for line in map(dict, read_lines(directory)) if line["step"] <= version.step]
        evaluations = [one for one in read_json_lines(directory / "eval.jsonl") if one.get("step", 0) <= version.step]
        datasets = [*(task.dataset for task in settings.tasks), settings.eval.dataset]
        names = dict.fromkeys(one.path for one in datasets if one is not None and one.path is not None)
        config = hashlib.sha256((directory / "config.yaml").read_bytes()).hexdigest()
        return cls(
            run=settings.run.name,
            version=version,
            settings=shown_settings(settings.model_dump(mode="json")),
            steps=steps,
            has_version=not steps or steps[-1].get("weights_version") == str(version),
            evaluations={name: last_per_step(part) for name, part in by_task(evaluations, settings).items()},
            changes=[
                Redaction().tree({one["setting"]: [one.get("before"), one.get("after")]})
                for one in read_json_lines(directory / CHANGES)
                if "setting" in one
            ],
            rows=read_rows(directory),
            model=source("model", settings.model.path),
            data=[source("dataset", name) for name in names],
            hashes={"settings": config} | read_code(directory),
        )


def source(kind: str, path: str) -> Source:
    """Look for what is known of where a run began from, and of its licence."""
    is_on_hub = not is_local(path)
    name = path if is_on_hub else Path(path).name
    folder = Path(path)
    if is_on_hub:
        with suppress(UserError):
            folder = fetch("model" if kind == "model" else "dataset", path, files=[CARD])
    licence = _licence_in(folder / CARD)
    files = [one.name for one in _licence_files(folder)] if not licence else []
    if licence:
        hint = f"its card says {licence}"
    elif files:
        hint = f"its folder has {', '.join(files)}"
    else:
        hint = "nothing here tells which"
    return Source(name=name, is_on_hub=is_on_hub, licence=licence, hint=hint)


def _licence_in(card: Path) -> str:
    from huggingface_hub import metadata_load  # imported here: it takes a while

    with suppress(OSError, ValueError):
        found = (metadata_load(card) or {}).get("license")
        if found:
            return ", ".join(map(str, found)) if isinstance(found, list) else str(found)
    return ""


def _licence_files(folder: Path) -> Iterator[Path]:
    for pattern in LICENCES:
        yield from sorted(folder.glob(pattern)) if folder.is_dir() else ()
