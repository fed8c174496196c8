"""Hostile trajectories, well formed by all that a message says of itself: what the decoder and the run's limits let
through, the engine trains.

    python -m tools.hostile --inputs 1000000 [--processes N] [--seed N] [--algorithm NAME ...]

Each input is a message of one group, of about two trajectories; with ``seeing`` they show images, and a model that sees
trains them. Those that are accepted are cut, packed, trained and
archived by the functions of a run, in batches of one message and of hundreds; every one is trained. A finding is
whatever raises, an update that is skipped, or a number of the metrics line that is not finite. Exits with 1 when there
are findings. What comes of a seed does not depend on the number of processes.
"""

import argparse
import functools
import math
import multiprocessing
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import anyio
import msgspec

from areal_async.algorithms.advantages import advantage_rule
from areal_async.config.settings import Settings
from areal_async.errors import WireError
from areal_async.protocol.staleness import age_at
from areal_async.protocol.types import (
    Cut,
    ImageRef,
    Version,
)
from areal_async.protocol.wire import EncodedMessage, decode_headers, decode_trajectory
from areal_async.trainer.batch.culprits import said_by
from areal_async.trainer.batch.cut import OpenGroup
from areal_async.trainer.batch.limits import TrainingLimits
from areal_async.trainer.batch.payloads import slots_of
from areal_async.trainer.batch.step import (
    AgreedBatch,
    ShardStats,
    StepReport,
    StepResult,
    TrainedShard,
    add_up_info,
    agree_on_batch,
    batch_metrics,
    metrics_line,
)
from areal_async.trainer.engine.engines import Engines, EngineThreads
from areal_async.trainer.engine.parallel.ranks import Ranks, joined_ranks
from areal_async.trainer.output.archive import write_archive
from areal_async.trainer.packing.rows import TrainRow
from areal_async.trainer.shards import ShardTrainer, build_rows
from tools import make_tiny_vision
from tools.hostile_messages import (
    GROUP_SIZE,
    LINEAGE,
    MAX_STALENESS,
    STEP,
    TOKEN_BUDGET,
    WORKFLOW,
    Target,
    hostile_message,
    stored_images,
)

MODEL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 1, "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip
"""The smallest model that passes through the engine as a large one does."""
BATCHES = (1, 15, 496)
"""Messages of batches, again and again: what is too much alone may not show among many, and the other way round."""
PART_MESSAGES = 8192
"""Inputs after which a new model is made."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "coupled": {"decoupled": False, "advantage_std": "none", "num_minibatches": 2},
    "icepop": {"correction": "icepop", "proximal": "loglinear"},
    "m2po": {"name": "m2po"},
    "reference": {"kl_coef": 0.1, "aggregation": "sequence_mean"},
    "ppo": {"name": "ppo"},
    "seeing": {},
}


@dataclass(slots=True)
class Score:
    """The outcomes of some inputs."""

    num_inputs: int = 0
    num_trajectories: int = 0
    """Trajectories in the messages."""
    num_accepted: int = 0
    """Trajectories that were trained."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Beginning of the reason -> refusals."""
    findings: list[str] = field(default_factory=list)

    def add(self, other: "Score") -> None:
        """Count another one's inputs too."""
        self.num_inputs += other.num_inputs
        self.num_trajectories += other.num_trajectories
        self.num_accepted += other.num_accepted
        self.refusals += other.refusals
        self.findings += other.findings


class Course:
    """The road from the bytes of messages to a metrics line in a trainer of one rank."""

    def __init__(self, algorithm: Mapping[str, Any], ranks: Ranks, directory: Path, *, sees: bool = False) -> None:
        """``directory`` is for the model and the archive; ``sees``: whether the model does."""
        if sees:
            make_tiny_vision.write_folder(directory / "model", family="qwen3_vl")
        else:
            _write_model(directory / "model")
        self.settings = Settings.model_validate(
            {
                "model": {"path": str(directory / "model"), "dtype": "float32"},
                "algorithm": dict(algorithm),
                "rollout": {"group_size": GROUP_SIZE, "min_group_size": 1, "max_staleness": MAX_STALENESS},
                "tasks": [{"workflow": f"{WORKFLOW}.py", "dataset": {"path": "none"}}],
                "trainer": {"token_budget": TOKEN_BUDGET, "lr": 1e-9},
            }
        )
        self._engines = Engines.for_run(self.settings, ranks)
        threads = EngineThreads.for_run(self.settings, ranks)
        self._shards = ShardTrainer(self.settings, engines=self._engines, threads=threads)
        vision = self._engines.vision
        images = () if vision is None else stored_images(vision)
        self._files = {one.sha256: one.data for one in images}
        self._target = Target(vocab_size=self._engines.vocab_size, vision=vision, images=images)
        self._limits = TrainingLimits(self.settings, vocab_size=self._engines.vocab_size, vision=vision)
        self._directory = directory

    def run(self, *, seed: int, first: int, count: int) -> Score:
        """Send ``count`` messages through, from index ``first`` on."""
        score, begin, end, sizes = Score(), first, first + count, cycle(BATCHES)
        while begin < end:
            numbers = range(begin, min(begin + next(sizes), end))
            made = [hostile_message(Random(f"{seed}.{number}"), f"0-{number}-0", self._target) for number in numbers]
            score.num_inputs += len(made)
            score.num_trajectories += sum(len(one.slots) for one in made)
            if reason := self._fails(made, score):
                alone = zip(numbers, (self._fails([one], Score()) for one in made), strict=True)
                found = [f"message {number}: {why}" for number, why in alone if why]
                score.findings += found or [f"messages {numbers}: {reason}"]
            begin = numbers.stop
        return score

    def _fails(self, made: list[EncodedMessage], score: Score) -> str:
        """Train these; return why that cannot be done, nothing where it can."""
        try:
            self._train(made, score)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is what is looked for
            return said_by(exc)
        return ""

    def _train(self, made: list[EncodedMessage], score: Score) -> None:
        settings, stored = self.settings, []
        for sequence, one in enumerate(made, start=1):
            try:
                message = decode_headers(one.headers, sequence=sequence, num_bytes=len(one.payload))
                self._limits.check_message(message)
            except WireError as exc:
                score.refusals[_kind(exc)] += 1
                continue
            group = OpenGroup(
                group_id=message.group_id, workflow=message.workflow, group_size=message.group_size,
                ticket_version=Version.parse(message.ticket_version), num_failed_attempts=0, order=sequence,
            )  # fmt: skip
            group.add(message)
            stored.append(group.as_cut_group())
        cut = Cut(lineage=LINEAGE, step=STEP, groups=stored, max_staleness=MAX_STALENESS)
        trajectories, missing = {}, []
        for placed in slots_of(cut):
            try:
                trajectory = decode_trajectory(made[placed.item.sequence - 1].payload, placed.item.slot)
                self._limits.check_trajectory(trajectory, cut=cut, lineage=LINEAGE)
                for image in trajectory.images.values():
                    self._limits.check_image(image, self._fetch(image))
                trajectories[placed.position] = trajectory
            except WireError as exc:
                missing.append(placed.key)
                score.refusals[_kind(exc)] += 1
        batch = agree_on_batch(slots_of(cut), missing, advantage_rule(settings))
        age = functools.partial(_age, cut)
        rows, ages = build_rows(
            trajectories,
            images=self._files,
            advantages=batch.advantages,
            cut=cut,
            start=Version(LINEAGE, STEP - 1),
            temperature=1.0,
        )
        trained = self._run_calls(rows, batch)
        made_version = Version(LINEAGE, STEP)
        write_archive(
            self._directory,
            TrainedShard(cut=cut, slots=batch.slots, trajectories=trajectories, ages=ages, report=trained),
            made=made_version, rank=0, advantages=batch.advantages,
            images=None if self._target.vision is None else self._files,
        )  # fmt: skip
        said = ShardStats(ages=ages, info=add_up_info(one.info for one in trajectories.values()))
        said = msgspec.json.decode(msgspec.json.encode(said), type=ShardStats)
        numbers = batch_metrics(batch, [said], workflows=[WORKFLOW], age=age) | trained.others
        result = StepResult(
            version=made_version, batch=numbers, stats=trained.stats, started=0.0, wait_s=0.0, train_s=0.0
        )
        line = metrics_line(result)
        bad = [name for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)]
        bad += [name for name in ("num_skipped", "value_num_skipped") if line.get(name)]
        if bad:
            raise ArithmeticError(f"got {', '.join(f'{name}={line[name]}' for name in bad)}")
        score.num_accepted += len(trajectories)

    def _fetch(self, image: ImageRef) -> bytes:
        """Return what the stream of images has under this name, as it is read there."""
        data = self._files.get(image.sha256, b"")
        if len(data) != image.num_bytes:
            raise WireError(f"image {image.sha256}: got {len(data)} bytes, need {image.num_bytes}")
        return data

    def _run_calls(self, rows: Seq[TrainRow], batch: AgreedBatch) -> StepReport:
        done: list[StepReport] = []

        async def run() -> None:  # a result would be printed by the loop's runner, into an error that nobody sees
            done.append(await self._shards.run_calls(rows, batch, step=STEP, settings=self.settings))

        anyio.run(run)
        return done[0]


def _age(cut: Cut, version: Version) -> int:
    return age_at(step=cut.step, version=version, lineage=cut.lineage, branches={})


def _kind(error: WireError) -> str:
    said = re.sub(r"hostile\.[0-9a-f]+|[0-9a-f]{64}|\d+", "N", str(error))
    return said.split(": got ")[-1][:40]


def _write_model(directory: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    Qwen3ForCausalLM(Qwen3Config(**MODEL)).save_pretrained(directory)


def run_part(algorithm: str, seed: int, numbers: range) -> Score:
    """Send some messages through a course of their own, in a process of its own."""
    with joined_ranks(deadline_s=600.0) as ranks, tempfile.TemporaryDirectory() as directory:
        course = Course(ALGORITHMS[algorithm], ranks, Path(directory), sees=algorithm == "seeing")
        return course.run(seed=seed, first=numbers.start, count=len(numbers))


def main() -> None:
    """Run the algorithms and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000, help="messages, shared among the algorithms")
    parser.add_argument("--processes", type=int, default=1, help="each keeps one core busy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--algorithm", choices=list(ALGORITHMS), nargs="+", default=list(ALGORITHMS), help="these alone"
    )
    arguments = parser.parse_args()
    count, total, since = arguments.inputs // len(arguments.algorithm), Score(), time.monotonic()
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn")) as processes:
        coming = {}
        for number, name in enumerate(arguments.algorithm):
            begins = range(number * count, (number + 1) * count, PART_MESSAGES)
            parts = [range(begin, min(begin + PART_MESSAGES, begins.stop)) for begin in begins]
            coming[name] = processes.map(functools.partial(run_part, name, arguments.seed), parts)
        for name, scores in coming.items():
            score = Score()
            for part in scores:
                score.add(part)
                _say(name, score, total, since)
            for reason, times in score.refusals.most_common():
                print(f"    {times:8} {reason}")
            for finding in score.findings[:10]:
                print(f"    FINDING {finding}", flush=True)
            total.add(score)
    _say("all", total, Score(), since)
    sys.exit(1 if total.findings else 0)


def _say(what: str, score: Score, others: Score, since: float) -> None:
    rate = (score.num_inputs + others.num_inputs) / (time.monotonic() - since)
    share = score.num_accepted / max(1, score.num_trajectories)
    print(
        f"{what}: {score.num_inputs} messages, {score.num_accepted} of {score.num_trajectories} trajectories trained "
        f"({share:.0%}), {len(score.findings)} findings, {rate:.0f} messages/s",
        flush=True,
    )


if __name__ == "__main__":
    main()
