"""A run's gate: a version that was evaluated against the one that has the tag, row by row, from what each row got.

Invariant: a version is promoted once, whatever is killed. The comparison is named by the two versions, and the tag's
line by the comparison: who comes after a crash sees in these what is done.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from areal_async.config.health import GateSettings
from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.process.atomic_folders import LEDGER, held, write_whole
from areal_async.process.json_lines import json_lines
from areal_async.protocol.events import now
from areal_async.protocol.fields import is_version
from areal_async.protocol.types import Version
from areal_async.versions import comparison, evaluations, tags
from areal_async.versions.accuracy import PASS_REWARD
from areal_async.versions.comparison import Answer, Comparison, Side, Which
from areal_async.versions.comparison_text import markdown, told_level
from areal_async.versions.promotion import standing_in
from areal_async.versions.tags import Tag

GATE = "gate"
"""Who promotes, in the tag's line."""


class Verdict(NamedTuple):
    """What the gate says of a version."""

    version: Version
    """That of which the evaluation speaks: one that has a checkpoint, or is about to get one."""
    against: str
    """Version that has the tag; empty where none has ever had it."""
    comparison_id: str
    """Empty without that one."""
    sentence: str
    difference: float = 0.0
    is_better: bool = True
    is_worse: bool = False
    """Beyond doubt."""


def judge(run_directory: Path, settings: Settings, evaluated: Version) -> Verdict | None:
    """Say how a version does that was evaluated, and leave the comparison; None where there is nothing to be said.

    Raises:
        UserError: what the rows got is not kept, or one of the run's files was damaged.
        OSError: the comparison cannot be written.
    """
    version = checkpoint_of(run_directory, settings, evaluated)
    if version is None:
        return None
    holder = tags.read(run_directory).get(settings.gate.against)
    if holder is None:
        has_been = any(line.tag == settings.gate.against for line in tags.history(run_directory))
        first = Verdict(version, "", "", "the first that was evaluated")
        return None if has_been else first
    if holder.version == str(version):
        return None
    made = _comparison(run_directory, settings, Version.parse(holder.version), version, evaluated)
    return _verdict(made, settings, version, holder.version)


def is_judged(run_directory: Path, settings: Settings, evaluated: Version) -> bool:
    """Whether a version was compared before with another one than has the tag now: somebody has moved it since."""
    version = checkpoint_of(run_directory, settings, evaluated)
    holder = tags.read(run_directory).get(settings.gate.against)
    made = {path.parent.name for path in (run_directory / comparison.FOLDER).glob(f"{_name('*', version)}/*.json")}
    return bool(made) and (holder is None or _name(holder.version, version) not in made)


def promote(run_directory: Path, gate: GateSettings, verdict: Verdict) -> Tag | None:
    """Give the tag to a version that has its checkpoint; None where it had it before, or somebody has moved the tag.

    Raises:
        UserError: the tags cannot be read, or written.
    """
    if verdict.comparison_id and any(one.comparison == verdict.comparison_id for one in tags.history(run_directory)):
        return None
    tag = Tag(
        tag=gate.against, version=str(verdict.version), by=GATE, why=verdict.sentence, comparison=verdict.comparison_id
    )
    with held(run_directory / "checkpoints" / tag.version, LEDGER) as is_there:
        return tags.write(run_directory, tag, over=verdict.against) if is_there else None


def has_checkpoint(run_directory: Path, version: Version) -> bool:
    """Whether a version's checkpoint is there, whole."""
    return (run_directory / "checkpoints" / str(version) / LEDGER).is_file()


def checkpoint_of(run_directory: Path, settings: Settings, evaluated: Version) -> Version | None:
    """Return the version of which an evaluation speaks: its own, or the newest with a checkpoint before it.

    An evaluation takes what servers hold when it begins, which may be a step or two on. The checkpoint need not be
    there yet: it is written beside the next steps. None before the first one.
    """
    return _spoken_of(run_directory, settings, _trained(run_directory), evaluated)


def evaluation_of(run_directory: Path, settings: Settings, version: Version) -> Version | None:
    """Return the first evaluation that speaks of a version and whose rows are kept; None where none does."""
    made, trained = evaluations.evaluated(run_directory), _trained(run_directory)
    return next((one for one in made if _spoken_of(run_directory, settings, trained, one) == version), None)


def _spoken_of(
    run_directory: Path, settings: Settings, trained: Mapping[int, Version], evaluated: Version
) -> Version | None:
    if (run_directory / "checkpoints" / str(evaluated)).is_dir():
        return evaluated
    is_last = evaluated.step >= settings.run.steps
    step = evaluated.step - (0 if is_last else evaluated.step % settings.trainer.checkpoint_every_steps)
    # Of an earlier lineage only where this one began behind it: others were given up, and are other weights.
    version = trained.get(step)
    if version is None or version.lineage > evaluated.lineage:
        version = Version(evaluated.lineage, step)
    return version if step else None


def _trained(run_directory: Path) -> dict[int, Version]:
    """Return which version each step has made that the run stands on."""
    lines = json_lines(run_directory / "metrics.jsonl")
    made = {line.get("step"): str(line.get("weights_version")) for line in lines}
    return {step: Version.parse(text) for step, text in made.items() if isinstance(step, int) and is_version(text)}


def _comparison(
    run_directory: Path, settings: Settings, holder: Version, version: Version, evaluated: Version
) -> Comparison:
    """Return the comparison of two versions: the one that was left before a crash, or a new one."""
    folder = run_directory / comparison.FOLDER / _name(holder, version)
    if (folder / comparison.RESULT).exists():
        return comparison.read_result(folder)
    before = evaluation_of(run_directory, settings, holder)
    if before is None:
        tag = settings.gate.against
        raise UserError(f"{holder}, which is {tag}, was not evaluated by this run; promote a version that was")
    answers = [
        *_answers("a", evaluations.read(run_directory, before), before, settings.gate),
        *_answers("b", evaluations.read(run_directory, evaluated), evaluated, settings.gate),
    ]
    num_rows: dict[str, int] = {}
    for one in answers:
        num_rows[one.task] = max(num_rows.get(one.task, 0), one.row + 1)
    run = settings.run.name
    sides = [Side(name=f"{run}/{one}", run=run, version=str(one)) for one in (holder, version)]
    made = Comparison.of(
        *sides, num_samples=1 + max((one.sample for one in answers), default=0), rows=num_rows,
        question=settings.gate.metric, at=now(), by=GATE,
    )  # fmt: skip
    made = msgspec.structs.replace(made, comparison_id=folder.name, alpha=settings.gate.alpha).with_result(answers)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / comparison.ANSWERS, msgspec.json.Encoder().encode_lines(answers))
    text = markdown(made, comparison.changed_rows(answers), {})
    write_whole(folder / comparison.TEXT, text.encode())
    comparison.write_result(folder, made)
    return made


def _answers(
    side: Which, given: Iterable[evaluations.Answer], evaluated: Version, gate: GateSettings
) -> Iterator[Answer]:
    """Yield a side's answers, or where passing is the metric one for each row, with what the best of them got."""
    answers = [Answer(side=side, version=str(evaluated), **msgspec.structs.asdict(one)) for one in given]
    if gate.metric == "accuracy":
        yield from answers
        return
    rows: dict[tuple[str, int], list[Answer]] = {}
    for one in answers:
        rows.setdefault((one.task, one.row), []).append(one)
    for own in rows.values():
        scored = [one for one in own if one.reward is not None]
        best = max(scored, key=lambda one: one.reward or 0.0, default=own[0])
        reward = None if best.reward is None else float(best.reward >= PASS_REWARD)
        yield msgspec.structs.replace(best, sample=0, reward=reward)


def _verdict(made: Comparison, settings: Settings, version: Version, against: str) -> Verdict:
    gate, overall = settings.gate, made.overall
    standing = standing_in(made, version, settings.run.name)
    if standing is None or overall is None:
        raise UserError(f"comparison {made.comparison_id}: {version} and {against} have fewer than two rows in common")
    sentence = (
        f"{gate.metric} {standing.difference:+.3f} against {gate.against} {against} "
        f"({told_level(made.alpha)} {standing.low:+.3f} to {standing.high:+.3f}, {overall.num_rows} rows)"
    )
    is_worse = standing.high < 0
    return Verdict(
        version, against, made.comparison_id, sentence, standing.difference, standing.low >= gate.at_least, is_worse
    )


def _name(holder: Version | str, version: Version | None) -> str:
    return f"gate_{holder}_{version}"
