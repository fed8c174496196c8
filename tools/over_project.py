"""Have an environment find what the project's has, after what it has itself: ``ENVIRONMENT/bin/python THIS PYTHON``.

Its own packages may be of versions that the project could not have, and nothing large is installed twice.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

FILE = "zz_project.pth"
"""Read after those of the environment's own packages."""
PROGRAMS = ("nats-server",)
"""What a run starts by its place beside the interpreter."""


def main(project: Path) -> None:
    """Write the file, and links to the programs."""
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = subprocess.run([project, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()
    root = Path(__file__).resolve().parents[1]
    Path(sysconfig.get_path("purelib"), FILE).write_text(f"{theirs}\n{root}\n")
    for program in PROGRAMS:
        link = Path(sys.executable).with_name(program)
        link.unlink(missing_ok=True)
        link.symlink_to(project.absolute().with_name(program))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
