"""Have a browser without a window, for the test that looks at a run's report: Debian's, where there is none.

    python tools/setup_browser.py

About 86 MB to fetch and 250 MB on disk, some ten seconds. Anywhere else install Chromium or Chrome yourself.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BROWSERS = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
PACKAGE = BROWSERS[0]


def find_browser() -> str | None:
    """Return the program, or None where there is none on PATH."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def main() -> int:
    """Install one where there is none; return 0 when there is one."""
    if find_browser():
        return 0
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        sys.stderr.write(f"browser: got none of {', '.join(BROWSERS)} on PATH, need one; install {PACKAGE}\n")
        return 1
    with alone():
        if not find_browser():
            _install()
    return 0 if find_browser() else 1


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
    for words in (["update", "-qq"], ["install", "-qq", "--yes", "--no-install-recommends", PACKAGE]):
        subprocess.run(
            ["apt-get", "-o", "DPkg::Lock::Timeout=600", *words], env=environment, stdin=subprocess.DEVNULL, check=True
        )


if __name__ == "__main__":
    sys.exit(main())
