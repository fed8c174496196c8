"""What a run came to: a few lines and ``reward.png``, from the files in its directory alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_async.config.settings import Settings
from areal_async.monitor.advice import advice
from areal_async.monitor.report.picture import write_picture
from areal_async.monitor.view import STEP_PARTS, by_task, number
from areal_async.process.json_lines import Line, read_json_lines
from areal_async.protocol.types import mean
from areal_async.versions.arms import FILE, arm_text
from areal_async.versions.evaluated import answers, failures, figure, kind

NUM_EDGE_STEPS = 5
"""Steps at either end whose rewards are averaged."""
PICTURE = "reward.png"

PLACES = {
    "metrics.jsonl": "one line per step",
    "eval.jsonl": "one line per evaluation",
    "arms.jsonl": "what each arm has come to, one line now and then",
    "evaluations": "one line per answer to a held-out row",
    PICTURE: "reward, evaluation and staleness per step",
    "model": "the trained model, a Hugging Face folder",
    "model_best": "that of the best checkpoint",
    "trajectories": "what was trained on, Parquet",
    "images": "what was shown in it, Parquet",
    "checkpoints": "what a resumed run starts from",
    "logs": "one file per process",
}


def summarise(settings: Settings) -> list[str]:
    """Return the lines that end a run, after drawing ``reward.png``; only where things are when nothing was trained."""
    directory = settings.run_directory
    steps = read_json_lines(directory / "metrics.jsonl")
    parts = by_task(read_json_lines(directory / "eval.jsonl"), settings)
    evaluations = {workflow: last_per_step(part) for workflow, part in parts.items()}
    lines = []
    if steps:
        draw(steps, evaluations, directory / PICTURE)
        accuracies = [text for workflow, part in evaluations.items() for text in _accuracy_texts(workflow, part)]
        arms = {str(line.get("name")): line for line in read_json_lines(directory / FILE)}
        accuracies += [f"arm {name} {arm_text(line)}" for name, line in arms.items()]
        lines = [reward_text(steps), *accuracies, _time_text(steps), _tokens_text(steps)]
        lines += advice(steps, evaluations, settings)
    return lines + [
        f"{directory / name}: {sentence}" for name, sentence in PLACES.items() if (directory / name).exists()
    ]


def draw(steps: Sequence[Line], evaluations: Mapping[str, Sequence[Line]], path: Path) -> None:
    """Draw the curves of some steps, at least one, and of each task's evaluations, into a PNG file."""
    curves = {f"{_label(part[-1])}, held out {name}".strip(): part for name, part in evaluations.items() if part}
    write_picture(steps, curves, path)


def last_per_step(evaluations: Sequence[Line]) -> list[Line]:
    """Keep the newest evaluation of each step, by step: a restored run may have evaluated one twice."""
    by_step = {int(number(line, "step")): line for line in evaluations}
    return [by_step[step] for step in sorted(by_step)]


def reward_text(steps: Sequence[Line]) -> str:
    """Return the mean reward at either end of some steps."""
    rewards = [number(line, "reward_mean") for line in steps]
    first, last = rewards[:NUM_EDGE_STEPS], rewards[-NUM_EDGE_STEPS:]
    return f"reward: {mean(first):.3f} over the first {len(first)} steps, {mean(last):.3f} over the last {len(last)}"


def _accuracy_texts(workflow: str, evaluations: Sequence[Line]) -> list[str]:
    if not evaluations:
        return []
    last, of_task = evaluations[-1], f" of {workflow}" if workflow else ""
    ends = [evaluations[0], last] if len(evaluations) > 1 else [last]
    figures = ", ".join(f"{figure(line)} at step {line.get('step')}" for line in ends)
    rows = f", over {int(number(last, 'num_scored'))} held-out {answers(last)}" if len(ends) > 1 else ""
    return [f"{_name(last)}{of_task}: {figures}{rows}{failures(last)}"]


def _label(evaluation: Line) -> str:
    name = kind(evaluation)
    return name if name.startswith("avg") else f"greedy {name}"


def _name(evaluation: Line) -> str:
    return "sampled answers" if kind(evaluation).startswith("avg") else _label(evaluation)


def _time_text(steps: Sequence[Line]) -> str:
    total_s = sum(number(line, "time_step_s") for line in steps)
    parts = {name: sum(number(line, key) for line in steps) for name, key in STEP_PARTS.items()}
    shares = ", ".join(f"{name} {seconds / total_s:.0%}" for name, seconds in parts.items()) if total_s else "none"
    return f"time: {total_s:.0f} s in {len(steps)} steps: {shares}"


def _tokens_text(steps: Sequence[Line]) -> str:
    tokens, trajectories, stale, failed = (
        int(sum(number(line, key) for line in steps))
        for key in ("num_tokens", "num_trajectories", "dropped_stale", "failed")
    )
    return f"trained: {tokens:,} tokens of {trajectories:,} trajectories; dropped as stale {stale:,}, failed {failed:,}"
