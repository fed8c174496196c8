"""What a build takes into the package from outside of it: the files that ``areal-async init`` writes projects from,
and what an environment takes where a project has none of its own.

There is one copy of each in this repository, where it is used and tested. A wheel has them below
``areal_async/templates``: ``areal_async/process/interpreter.py`` knows which of both places it is. pip runs this by
itself (``pyproject.toml``), in an environment that has nothing but setuptools.
"""

import os
from glob import glob
from typing import Any

from setuptools.command.build_py import build_py

WORKFLOWS = ("gsm8k", "calculator", "openai_agent", "nim", "clevr_count")
MODELS = ("tiny", "tiny_tools", "tiny_vision")
PATTERNS = (
    *(f"workflows/{name}*.py" for name in WORKFLOWS),
    *(f"configs/{name}{kind}.yaml" for name in WORKFLOWS for kind in ("", "_1gpu", "_cpu")),
    "workflows/terminal.py",
    "configs/environment*.yaml",
    "rewards/*.py",
    *(f"configs/data/{name}_t*" for name in ("gsm8k_tiny", "calculator", "clevr_count")),
    *(f"configs/models/{name}/*" for name in MODELS),
)
"""From the repository's root."""


class BuildWithTemplates(build_py):  # type: ignore[misc]  # has no types
    """Builds the package with the files of ``PATTERNS``; an editable installation reads them where they are."""

    def _get_data_files(self) -> Any:
        return [*super()._get_data_files(), self._templates()]

    def get_data_files_without_manifest(self) -> Any:
        """Return what a source distribution has of data."""
        return [*super().get_data_files_without_manifest(), self._templates()]

    def get_source_files(self) -> Any:
        """Return what a source distribution has of code: this file too, for it is built from."""
        return [*super().get_source_files(), "tools/wheel.py"]

    def _templates(self) -> tuple[str, str, str, list[str]]:
        files = sorted({file for pattern in PATTERNS for file in glob(pattern)})
        return "areal_async", "", os.path.join(self.build_lib, "areal_async", "templates"), files
