"""Have Slurm's and MUNGE's programs, for the tests of the launch backend: Debian's packages, where there are none.

    python tools/setup_slurm.py

About 5 MB to fetch, half a minute; Slurm is not configured, so none starts by itself. Anywhere else install it
yourself.
"""

import os
import shutil
import subprocess
import sys

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "munged")
PACKAGES = ("slurm-wlm", "munge", "iproute2")
SBIN = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
"""Where the daemons are: not on every user's PATH."""


def missing_programs() -> list[str]:
    """Return which programs of Slurm are not there."""
    return [name for name in PROGRAMS if shutil.which(name, path=SBIN) is None]


def main() -> int:
    """Install what is missing; return 0 when nothing is."""
    if not (missing := missing_programs()):
        return 0
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        names = ", ".join(missing)
        sys.stderr.write(f"slurm: got no {names} on PATH, need them; install {', '.join(PACKAGES)}\n")
        return 1
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-qq", "--yes", "--no-install-recommends", *PACKAGES]):
        subprocess.run(["apt-get", *words], env=environment, stdin=subprocess.DEVNULL, check=True)
    return 1 if missing_programs() else 0


if __name__ == "__main__":
    sys.exit(main())
