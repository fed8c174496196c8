"""The documents as tests read them: chapters, and blocks with what a comment right above each says of it.

A block of commands or of Python without a comment is carried out by ``tests/e2e/test_guides.py``, as it stands. Else
the comment is one of these, and no reader of the page sees it:

``<!-- numbers differ -->``                carried out there too, in a shorter run: what is shown has other numbers
``<!-- run by tests/e2e/test_x.py -->``    carried out by that test
``<!-- not run: KIND; more -->``           why no test does, as one of ``NOT_RUN``, and what more there is to say
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COMMANDS = ("console", "python")
"""Languages of the blocks that are carried out."""
NUMBERS_DIFFER, RUN_BY, NO_RUN = "numbers differ", "run by ", "not run: "
NOT_RUN = (
    "needs GPUs",
    "needs a browser",
    "needs a cluster",
    "needs a network",
    "needs another host",
    "needs the real SGLang",
    "part of a workflow",
    "takes an hour",
)
"""Kinds of reasons why a block is not run."""

_BLOCK = re.compile(
    r"^#+ (?P<heading>[^\n]+)$|(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>[^\n]*)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A fenced block of a document."""

    file: str
    heading: str
    mark: str
    """What the comment above it says, or nothing."""
    language: str
    body: str

    @property
    def is_carried_out(self) -> bool:
        return self.language in COMMANDS and self.mark in ("", NUMBERS_DIFFER)


def document_files() -> list[str]:
    """Return the path of each document, in the order of the site; one that is not listed there comes last."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    order = re.findall(r"/([\w/]+)>?$", (ROOT / "tools/docs/index.md").read_text(encoding="utf-8"), re.MULTILINE)
    places = {f"{name}.md": place for place, name in enumerate(order)}
    return sorted(listed.split(), key=lambda file: (places.get(file, len(places)), file))


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def blocks_of(file: str) -> Iterator[Block]:
    """Yield the blocks of a document, in their order."""
    heading = ""
    for found in _BLOCK.finditer(text_of(file)):
        heading = found["heading"] or heading
        if found["language"] is not None:
            yield Block(file, heading, found["mark"] or "", found["language"], found["body"])


def chapter(file: str, title: str) -> str:
    """Return what stands below a heading of the second depth."""
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", text_of(file), re.DOTALL | re.MULTILINE)
    return str(found)


def commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a console block, and the lines that are shown below it."""
    for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield command, shown
