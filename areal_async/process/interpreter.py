"""How a module of this package is started in a process of its own, whatever a user's folder has in it."""

import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
"""The folder that has the package: that of all that is installed, or a clone."""
_PACKAGED = HOME / "areal_async" / "templates"
SHIPPED = _PACKAGED if _PACKAGED.is_dir() else HOME
"""The folder with the workflows, rewards and settings that ship: ``tools/wheel.py`` puts them into the package."""


def module_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module.

    ``-m`` alone would look into the working directory first, and take a user's ``random.py`` for Python's. In a clone
    that directory may be all that leads to the package.
    """
    safely = [] if Path.cwd() == HOME else ["-P"]
    return [sys.executable, *safely, "-m", module, *words]
