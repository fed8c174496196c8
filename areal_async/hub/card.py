"""The cards: what stands in the ``README.md`` of a folder for the hub, the same of a model and of a data set. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from areal_async.config.tree import value_at
from areal_async.hub.facts import RunFacts, Source
from areal_async.hub.redaction import HIDDEN
from areal_async.monitor.report.data import package_versions
from areal_async.monitor.report.summary import PICTURE, reward_text
from areal_async.versions.evaluated import measured

TAGS = ["areal-async", "reinforcement-learning"]


def sections(facts: RunFacts, hashes: Mapping[str, str]) -> Iterator[str]:
    """Yield the parts that both cards have: data, reward, evaluation, settings, versions, hashes, licence.

    Args:
        hashes: file of the folder -> SHA-256.
    """
    yield "## Data\n\n" + _data(facts)
    if facts.steps:
        yield f"## Reward\n\n![Reward, evaluation and staleness per step]({PICTURE})\n\n" + _reward(facts)
    if any(facts.evaluations.values()):
        yield "## Evaluation\n\n" + _evaluation(facts)
    yield "## Settings\n\n" + _settings(facts)
    yield "## Versions\n\n" + table(("written with", "version"), package_versions().items())
    yield "## Hashes\n\n" + table(("SHA-256", "of"), ((f"`{sha}`", name) for sha, name in _hashes(facts, hashes)))
    yield "## Licence\n\n" + _licence(facts)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def whole(front: str, title: str, parts: Iterable[str]) -> str:
    """Return a card.

    Args:
        front: YAML of what the hub reads.
    """
    return "\n\n".join([f"---\n{front.strip()}\n---", f"# {title}", *parts]) + "\n"


def _cell(value: Any) -> str:
    return " ".join(str(value).split("\n")).replace("|", "\\|")


def hub_names(sources: Iterable[Source]) -> list[str]:
    """Return those that the hub has: it refuses other names."""
    return [one.name for one in sources if one.is_on_hub]


def _data(facts: RunFacts) -> str:
    rows = []
    for setting, recorded in facts.rows.items():
        try:
            named = value_at(facts.settings, setting.split("."))
        except KeyError:  # rows of an earlier start
            continue
        first = "held out" if ".eval." in setting or setting.startswith("eval.") else "trained"
        task = value_at(facts.settings, setting.split(".")[:2])["workflow"] if setting.startswith("tasks.") else "all"
        where = next((named[key] for key in ("path", "environment", "python") if named.get(key)), task)
        part = " ".join(named[key] for key in ("name", "split") if named.get(key))
        rows.append((first, f"`{task}`", f"`{where}` {part}", recorded["num_rows"], f"`{recorded['sha256']}`"))
    return table(("", "task", "rows", "number", "SHA-256"), rows) if rows else "The run has recorded no rows."


def _reward(facts: RunFacts) -> str:
    text = f"Mean {reward_text(facts.steps)}, of {_total(facts, 'num_trajectories'):,} trajectories."
    if facts.has_version:
        return text
    return f"{text} The run went back behind {facts.version}: these are the steps that it went on with."


def _total(facts: RunFacts, key: str) -> int:
    return sum(int(line.get(key) or 0) for line in facts.steps)


def _evaluation(facts: RunFacts) -> str:
    rows = [
        (line.get("eval_id"), line.get("step"), task or line.get("workflow", ""), measured(line), _interval(line))
        for task, lines in facts.evaluations.items()
        for line in lines
    ]
    return table(("version", "step", "task", "result", "95 % interval, scored"), rows)


def _interval(line: Mapping[str, Any]) -> str:
    number = f"{line.get('num_scored')} of {(line.get('num_scored') or 0) + (line.get('num_failed') or 0)} answers"
    low, high = line.get("low"), line.get("high")
    return number if low is None or high is None else f"{low:.3f} to {high:.3f}, {number}"


def _settings(facts: RunFacts) -> str:
    text = yaml.safe_dump(dict(facts.settings), sort_keys=False, allow_unicode=True)
    about = (
        f"As the run's `config.yaml` has them, without what speaks of machines and addresses; `{HIDDEN}` stands for a "
        "secret, and of a path its last name is left."
    )
    fence = max(["``", *re.findall("`{3,}", text)], key=len) + "`"  # prompts may have code
    shown = f"{about}\n\n<details><summary>settings</summary>\n\n{fence}yaml\n{text}{fence}\n\n</details>"
    if not facts.changes:
        return shown
    changed = [(f"`{name}`", *values) for line in facts.changes for name, values in line.items()]
    return f"{shown}\n\nChanged while the run went on:\n\n" + table(("setting", "before", "after"), changed)


def _hashes(facts: RunFacts, hashes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, sha256 in hashes.items():
        yield sha256, f"`{name}`"
    for name, sha256 in facts.hashes.items():
        yield sha256, f"the run's {name}" if name == "settings" else f"`{name}`, of the run's code"


def _licence(facts: RunFacts) -> str:
    lines = [
        f"- {kind} `{one.name}`: {one.hint}"
        for kind, sources in (("model", [facts.model]), ("data", facts.data))
        for one in sources
    ]
    return "What this was made of, whose licences may bind it; look at each before you publish:\n\n" + "\n".join(lines)
