"""Does a run learn on a cluster what it learns here? As root, with Slurm and Ray (`make test-slurm`, `make test-ray`).

    python -m tools.compare_backends

The CPU job with two ranks: on this host under several seeds, then once as a job of a real Slurm and once in a real
Ray, both of three hosts of which two train (`tools/one_slurm.py`, `tools/one_ray.py`). Prints the table of
`tools/check_learning.py`, and what `doctor` counts of each. Exits with 1 where the accounts differ, or where the gain
of a cluster is further from the mean of the seeds than three of their standard deviations.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.check_learning import NOISE, RUNS, Result, greedy_accuracy, report, run
from tools.make_tiny_gsm8k import MODEL
from tools.one_ray import one_ray
from tools.one_slurm import one_slurm

WORKFLOW = "workflows/gsm8k.py"
NUM_HOSTS = 3
SPREAD = ["--trainer.num_hosts", "2"]
COUNTED = ("trained", "lost", "twice", "over age")


def here(arguments: list[str], *, before: float, seed: int) -> Result:
    """Run it on this host."""
    return run(f"backend-local-{seed}", WORKFLOW, ["--run.seed", str(seed), *arguments], before=before)


def under_slurm(arguments: list[str], *, before: float) -> Result:
    """Run it as a job, whose output passes through at its end."""
    settings = [*arguments, *SPREAD, "--launch.backend", "slurm"]
    with TemporaryDirectory(prefix="slurm-") as folder, one_slurm(Path(folder), num_hosts=NUM_HOSTS) as slurm:

        def inside(command: list[str]) -> list[str]:
            script = f"exec {shlex.join(command)}"
            return slurm.command("sbatch", "--wait", f"--nodes={NUM_HOSTS}", f"--output={folder}/out", "--wrap", script)

        try:
            return run("backend-slurm", WORKFLOW, settings, before=before, inside=inside)
        finally:
            print(Path(folder, "out").read_text())


def under_ray(arguments: list[str], *, before: float) -> Result:
    """Run it from the first host of a cluster."""
    settings = [*arguments, *SPREAD, "--launch.backend", "ray", "--launch.num_hosts", str(NUM_HOSTS)]
    with one_ray(NUM_HOSTS) as cluster:
        environment = {**os.environ, **cluster.environment}
        return run(
            "backend-ray", WORKFLOW, settings, before=before, environment=environment,
            inside=lambda command: cluster.command(*command),
        )  # fmt: skip


def accounts(name: str) -> dict[str, int]:
    """Return what is proved of a run that has ended; raise where something is not."""
    words = [sys.executable, "-m", "areal_async", "doctor", "--json", "--run", str(RUNS / name)]
    slots = json.loads(subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout)["slots"]
    return {counted: slots[counted] for counted in COUNTED}


def agree(seeds: list[Result], clusters: list[Result]) -> bool:
    """Print the comparison; say whether the clusters did as this host does."""
    counted = [accounts(one.name) for one in [*seeds, *clusters]]
    print(f"accounts: {counted[0]}" if all(one == counted[0] for one in counted) else f"accounts DIFFER: {counted}")
    gains = [one.gain for one in seeds]
    mean, spread = statistics.mean(gains), max(statistics.stdev(gains), NOISE)
    far = {one.name: (one.gain - mean) / spread for one in clusters}
    print(f"gain here {mean:.3f}, standard deviation {spread:.3f} over {len(seeds)} seeds")
    for name, distance in far.items():
        print(f"{name}: {distance:+.1f} standard deviations from it")
    return all(one == counted[0] for one in counted) and all(abs(one) <= 3 for one in far.values())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="two at least")
    parser.add_argument("settings", nargs="*", help="settings for every run, after --")
    chosen = parser.parse_args()
    if len(chosen.seeds) < 2:
        parser.error(f"--seeds: got {len(chosen.seeds)}, need 2 at least for a spread")
    arguments, before = ["--trainer.num_ranks", "2", *chosen.settings], greedy_accuracy(MODEL)
    seeds = [here(arguments, before=before, seed=seed) for seed in chosen.seeds]
    clusters = [make(arguments, before=before) for make in (under_slurm, under_ray)]
    learns = report([*seeds, *clusters], None)
    sys.exit(0 if agree(seeds, clusters) and learns else 1)


if __name__ == "__main__":
    main()
