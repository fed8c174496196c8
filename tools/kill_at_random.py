"""Does it learn the same when its processes die? One job undisturbed and with random SIGKILLs, several times each.

    python -m tools.kill_at_random                         # 3 pairs of runs, 20 kills over 10 minutes each
    python -m tools.kill_at_random --runs 1 --kills 5 --minutes 2

Any process but the launcher is struck, broker and inference servers too: a role first, then one of its processes, so
that each role dies about as often. Undisturbed and disturbed runs alternate, with the same seeds; each must reach its
end by itself. Exits with 1 unless the doctor refutes nothing in any of them and the mean final rewards (mean over the
last steps, mean over the runs) differ by less than ``--within``.
"""

import argparse
import logging
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL

import structlog

from tools.faults_counts import SlotCounts, count_slots
from tools.faults_run import FaultFailed, FaultRun, send_signal

VERBS = ("controller", "node", "trainer")
OTHERS = {"broker": "nats-server", "server": "areal_async.inference.embedded"}
FINAL_STEPS = 20
"""The final reward is the mean over so many steps: one step's has a standard deviation of about 0.04."""
BESIDES_S = 900.0
"""Time that a run may take beyond its kills."""


@dataclass(slots=True)
class Result:
    """A run and what was found in it."""

    reward: float
    duration_s: float
    counts: SlotCounts
    killed: Counter[str] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        found = self.counts
        return not (found.lost or found.twice or found.over_age or found.broken)

    def __str__(self) -> str:
        killed = " ".join(f"{role} {count}" for role, count in sorted(self.killed.items())) or "nothing"
        found = self.counts
        return (
            f"reward {self.reward:.3f} in {self.duration_s:.0f} s, killed {killed}; acked {found.acked}, "
            f"trained {found.trained}, lost {len(found.lost)}, twice {len(found.twice)}, "
            f"over age {len(found.over_age)}, refuted {len(found.broken)}"
        )


def carry_out(parent: Path, name: str, arguments: argparse.Namespace, *, seed: int, num_kills: int) -> Result:
    """Run the job once to its end, with kills at random moments.

    Raises:
        FaultFailed: it did not reach its end, or ended before its last kill.
    """
    chance = random.Random(seed)
    length_s = 60 * arguments.minutes
    run = FaultRun(
        parent,
        name=name,
        workflow=arguments.file,
        run__seed=seed,
        run__steps=arguments.steps,
        rollout__batch_groups=16,
        trainer__checkpoint_every_steps=10,
    )
    killed: Counter[str] = Counter()
    started = time.monotonic()
    try:
        run.start()
        run.wait_for_step(1)
        first = time.monotonic()
        for moment in sorted(chance.uniform(0, length_s) for _ in range(num_kills)):
            time.sleep(max(0.0, first + moment - time.monotonic()))
            killed[kill_one(run, chance)] += 1
        run.finish(deadline_s=length_s + BESIDES_S)
        rewards = [line["reward_mean"] for line in run.steps]
        return Result(
            reward=statistics.mean(rewards[-FINAL_STEPS:]),
            duration_s=time.monotonic() - started,
            counts=count_slots(run.run_directory),
            killed=killed,
        )
    finally:
        run.kill_everything()
        run.close()


def kill_one(run: FaultRun, chance: random.Random) -> str:
    """Kill one process; return its role.

    Raises:
        FaultFailed: the run has ended.
    """
    found = {verb: run.role_pids(verb) for verb in VERBS} | {role: run.pids(word) for role, word in OTHERS.items()}
    alive = {role: pids for role, pids in found.items() if pids}
    if not alive or not run.is_alive:
        raise FaultFailed(f"the run ended before its last kill; give it more --steps: {run.last_words()}")
    role = chance.choice(sorted(alive))
    send_signal(chance.choice(sorted(alive[role])), SIGKILL)
    return role


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", default="workflows/gsm8k.py")
    parser.add_argument("--steps", type=int, default=720, help="enough that the kills fall into the run")
    parser.add_argument("--minutes", type=float, default=10.0, help="over which the kills are spread")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--runs", type=int, default=3, help="of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of the first run of each kind")
    parser.add_argument("--within", type=float, default=0.1, help="difference of the mean rewards")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    results: dict[str, list[Result]] = {"undisturbed": [], "disturbed": []}
    with tempfile.TemporaryDirectory(prefix="kill-at-random-") as folder:
        for seed in range(arguments.seed, arguments.seed + arguments.runs):
            for kind, num_kills in (("undisturbed", 0), ("disturbed", arguments.kills)):
                try:
                    result = carry_out(Path(folder), f"{kind}-{seed}", arguments, seed=seed, num_kills=num_kills)
                except FaultFailed as exc:
                    print(f"{kind}, seed {seed}: {exc}")
                    return 1
                results[kind].append(result)
                print(f"{kind}, seed {seed}: {result}", flush=True)
    means = {kind: statistics.mean(result.reward for result in found) for kind, found in results.items()}
    difference = means["disturbed"] - means["undisturbed"]
    print(
        f"final reward, mean of {arguments.runs}: undisturbed {means['undisturbed']:.3f}, "
        f"disturbed {means['disturbed']:.3f}, difference {difference:+.3f} (need {arguments.within:g} or less)"
    )
    are_clean = all(result.is_clean for found in results.values() for result in found)
    return 0 if are_clean and abs(difference) <= arguments.within else 1


if __name__ == "__main__":
    sys.exit(main())
