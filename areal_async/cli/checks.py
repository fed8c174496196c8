"""What can be seen to be wrong before anything is started: by looking at files, importing none of them."""

import ast
import shutil
from pathlib import Path

from areal_async.errors import UserError
from areal_async.hub import looks_like_hub_name
from areal_async.settings import DatasetSettings

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def check_workflow(spec: str) -> None:
    """Make sure that ``FILE.py[:name]`` is there and defines its coroutine.

    Raises:
        UserError: no file, no Python, or no such coroutine in it.
    """
    file, _, name = spec.partition(":")
    path, name = Path(file), name or Path(file).stem
    if not path.is_file():
        raise UserError(
            f"workflow: no file {file}; name a Python file, with :name when the coroutine is called otherwise"
        )
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=file)
    except (SyntaxError, UnicodeDecodeError) as exc:
        raise UserError(f"workflow: {file} is not Python: {exc}") from exc
    coroutines = [node.name for node in tree.body if isinstance(node, ast.AsyncFunctionDef)]
    if name in coroutines or name in _other_names(tree):
        return
    if any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body):
        raise UserError(f"workflow: {name} in {file} is a plain function, need a coroutine; write async def {name}")
    remedy = f"name one as {file}:{coroutines[0]}" if coroutines else f"write async def {name}(prompt, policy)"
    raise UserError(f"workflow: no coroutine {name} in {file}, got {', '.join(coroutines) or 'none'}; {remedy}")


def check_dataset(dataset: DatasetSettings, setting: str) -> None:
    """Make sure that a data set on this machine is there; one of the hub is found out about later.

    Raises:
        UserError: a path that is not there.
    """
    path = dataset.path
    is_file_name = path.endswith(DATA_SUFFIXES) or not looks_like_hub_name(path)
    if is_file_name and not Path(path).exists():
        raise UserError(f"{setting}.path: no file {path}; give a file, a folder or a hub name")


def check_model(path: str) -> None:
    """Make sure that a model on this machine is there; one of the hub is found out about later.

    Raises:
        UserError: a path that is not there, or a folder without a model.
    """
    folder = Path(path)
    if not folder.exists():
        if not looks_like_hub_name(path):
            raise UserError(f"model.path: no folder {path}; give a model's folder or a hub name")
    elif not (folder / "config.json").is_file():
        raise UserError(f"model.path: no config.json in {path}; give a model's folder or a hub name")


def check_interpreter(python: Path | None) -> None:
    """Make sure that the interpreter the servers run in is there.

    Raises:
        UserError: no such program.
    """
    if python is not None and shutil.which(python) is None:
        raise UserError(
            f"inference.python: no program {python}; build SGLang's environment (on a CPU: python "
            "tools/setup_sglang.py), or take inference.backend=embedded"
        )


def _other_names(tree: ast.Module) -> set[str]:
    """Return names that are imported or assigned: what they are shows only when the file runs."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
