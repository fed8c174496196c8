"""Have Slurm's and MUNGE's programs, for the tests of the launch backend: Debian's packages, where there are none.

    python tools/setup_slurm.py

About 5 MB to fetch, half a minute; Slurm is not configured, so none starts by itself. Anywhere else install it
yourself.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
    with alone():
        if missing_programs():
            _install()
    return 1 if missing_programs() else 0


@contextmanager
def alone() -> Iterator[None]:
    """Wait for any other setup on this machine: of two that install at once, apt refuses one."""
    folder = os.open("/var/lib/apt/lists", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _install() -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-qq", "--yes", "--no-install-recommends", *PACKAGES]):
        subprocess.run(
            ["apt-get", "-o", "DPkg::Lock::Timeout=600", *words], env=environment, stdin=subprocess.DEVNULL, check=True
        )


if __name__ == "__main__":
    sys.exit(main())
