"""What a project begins with: a workflow that ships, and of everything that it needs a copy of the user's own.

There is one original of each file: in a clone where it is used there, in an installation below
``areal_async/templates``, where ``tools/wheel.py`` puts it. A copy is changed only where it names the place of another.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from areal_async.cli.projects import texts
from areal_async.errors import UserError
from areal_async.process.interpreter import SHIPPED
from areal_async.user_files import imported_files

WORKFLOW = "workflow"
"""Name of a project's own workflow, and of its settings."""
KINDS = ("", "_1gpu", "_cpu")
"""Of settings, as their file's name ends."""
UNTYPED = ("latex2sympy2_extended", "math_verify", "mpmath", "sympy")
"""What rewards may import that brings no types."""
_PLACED = re.compile(r"\bpath: ((?:data|models)/[\w./]+)")
"""Where settings name a data set or a model that lies beside them."""


class Template(NamedTuple):
    """A workflow that ships, as the beginning of a project."""

    stem: str
    """What its file, its coroutine and its settings are called."""
    sentence: str
    """What the model is asked for."""
    needs: tuple[str, ...] = ()
    """Packages that it imports and that are not installed with this one."""


TEMPLATES = {
    "gsm8k": Template("gsm8k", "word problems: one question, one answer, scored by its final number"),
    "tools": Template("calculator", "sums too long for the head, with a plain function as the model's tool"),
    "agent": Template(
        "openai_agent", "sums too long for the head, by an agent that is written with OpenAI's SDK", ("openai",)
    ),
    "environment": Template("nim", "a game, as an environment with steps in plain Python, and a reward for each reply"),
    "vision": Template("clevr_count", "how many things an image shows"),
}


def files_of(template: Template, name: str) -> dict[str, bytes]:
    """Return what each file of a project has in it, by its path there.

    Args:
        name: of its runs; of those on a CPU it ends in ``_cpu``.

    Raises:
        UserError: the installation lacks a file.
    """
    try:
        code = _code(template, SHIPPED)
        settings, placed = _settings(template, name, SHIPPED)
        files = {file: text.encode() for file, text in (code | settings).items()}
        files |= {str(path.relative_to(SHIPPED / "configs")): path.read_bytes() for path in placed}
    except FileNotFoundError as exc:
        raise UserError(
            f"init: no file {exc.filename}, which belongs to this installation; install areal-async anew"
        ) from exc
    untyped = [
        one for one in UNTYPED if any(re.search(rf"\bimport {one}\b|\bfrom {one}\b", text) for text in code.values())
    ]
    files["test_workflow.py"] = texts.TEST.encode()
    files["pyproject.toml"] = texts.pyproject(untyped).encode()
    files["README.md"] = texts.readme(name, template.sentence, sorted(files), template.needs).encode()
    files[".gitignore"] = texts.GITIGNORE.encode()
    return files


def _code(template: Template, root: Path) -> dict[str, str]:
    """Return the workflow, and the modules that it needs of those that ship; other workflows lie beside it."""
    first = root / "workflows" / f"{template.stem}.py"
    found, waiting = [first], [first]
    while waiting:
        for file in imported_files(waiting.pop(), [root]):
            if file not in found and file.parent.name in ("workflows", "rewards"):
                found.append(file)
                waiting.append(file)
    code = {}
    for file in found:
        text = re.sub(r"\bfrom workflows\.", "from ", _read(file))
        if file == first:
            code[f"{WORKFLOW}.py"] = text.replace(f"async def {template.stem}(", f"async def {WORKFLOW}(")
        elif file.parent.name == "rewards":
            code[f"rewards/{file.name}"] = text
        elif file.name != "__init__.py":
            code[file.name] = text
    return code


def _settings(template: Template, name: str, root: Path) -> tuple[dict[str, str], list[Path]]:
    """Return the files of settings, and the originals of the data and models that they name."""
    files, placed = {}, set[Path]()
    for kind in KINDS:
        path = root / "configs" / f"{template.stem}{kind}.yaml"
        if kind == "_1gpu" and not path.is_file():
            continue
        text = _read(path)
        for place in _PLACED.findall(text):
            placed.update(_files_at(root / "configs" / place))
        text = _PLACED.sub(r"path: ../\1", text)
        text = text.replace(f"  name: {template.stem}", f"  name: {name}")
        text = re.sub(
            rf"\b(?:python -m areal_async )?run workflows/{template.stem}\.py", f"areal-async run {WORKFLOW}.py", text
        )
        text = text.replace(f"workflows/{template.stem}.py", f"{WORKFLOW}.py")
        files[f"configs/{WORKFLOW}{kind}.yaml"] = text.replace(f"configs/{template.stem}", f"configs/{WORKFLOW}")
    return files, sorted(placed)


def _files_at(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (one for one in path.iterdir() if one.is_file())
    else:
        yield path


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
