"""The documentation site: the README.md files of this repository as Sphinx pages, with a reference made from the code.

make docs     # build it and serve it at http://127.0.0.1:8000
make check    # builds it, and fails on any warning: a dead link, a page that nothing leads to
"""

import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

project = "areal_async"
author = "the areal_async authors"
root_doc = "tools/docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "areal_async/**.md",
    "configs/README.md",
    "configs/deploy/nats/README.md",
    "rewards/README.md",
    "tools/README.md",
    "tools/docs/**.md",
    "workflows/README.md",
]
exclude_patterns = [".*", "build", "runs", "tests", "**/__pycache__"]

extensions = ["myst_parser", "tools.docs.reference"]
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]

html_theme = "furo"
html_title = "areal_async"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "default"


def setup(site: Sphinx) -> None:
    """Lead from the site's address to its first page."""
    site.connect("build-finished", write_front_door)


def write_front_door(site: Sphinx, error: Exception | None) -> None:
    """Write ``index.html`` where none of the pages is."""
    if error is None:
        door = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>{project}</title>'
        (Path(site.outdir) / "index.html").write_text(door + "\n", encoding="utf-8")
