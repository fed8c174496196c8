"""What can be seen to be wrong before anything is started: by looking at files, importing none of them.

A name that no file or folder has is the hub's, or misspelt: the hub is asked for one small file of it.
"""

import ast
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from areal_async.config.settings import DatasetSettings, Settings, TemplateSettings
from areal_async.data.made_rows import FUNCTION
from areal_async.environments.environment import make_environment
from areal_async.environments.names import environment_name, spellings
from areal_async.errors import UserError
from areal_async.inference.commands import check_tool_call_parser
from areal_async.process.hub import fetch, is_local
from areal_async.rollout.user_code.workflows import NUM_GIVEN, check_all_taken, check_needed
from areal_async.telemetry.exporters.prometheus import check_listening
from areal_async.telemetry.exporters.traces import check_installed
from areal_async.user_files import parts_of

F = TypeVar("F", ast.FunctionDef, ast.AsyncFunctionDef)
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


def check_node(settings: Settings, *, asks_hub: bool = True) -> None:
    """Refuse what a host lacks that has a node of the run, before anything is started.

    Args:
        asks_hub: as for ``check_dataset``.

    Raises:
        UserError: a workflow, a policy, a model, its tokenizer, the servers' interpreter or parser or an extra that is
            asked for is not here, or the address to be scraped at is another host's.
    """
    for task in settings.tasks:
        check_workflow(task.workflow, settings.env_of(task))
    check_policies((task.workflow for task in settings.tasks), settings.policies)
    check_served(settings, asks_hub=asks_hub)
    check_interpreter(settings.inference.python)
    check_tool_call_parser(settings.inference)
    check_installed(settings.metrics)
    check_listening(settings.metrics)


def check_file(spec: str) -> None:
    """Make sure that the file of ``FILE.py[:name]``, or of an environment that is one, is there.

    Raises:
        UserError: it is not.
    """
    if (environment := environment_name(spec)) is not None:
        if environment.kind.is_path and not Path(environment.name).exists():
            raise UserError(f"workflow: {spec}: there is no {environment.name}; name a file or a folder that is there")
        return
    file, _ = parts_of(spec)
    if not file.is_file():
        raise UserError(
            f"workflow: no file {file}; name a Python file, with :name when the coroutine is called otherwise, or an "
            f"environment: {spellings()}"
        )


def check_workflow(spec: str, env: Mapping[str, Any] | None = None) -> None:
    """Make sure that ``FILE.py[:name]`` is there and defines its coroutine, or that an environment can be made.

    Args:
        env: options of the environment.

    Raises:
        UserError: no file, no Python, or no such coroutine in it; a package or an option that is not there.
    """
    check_file(spec)
    if environment_name(spec) is not None:
        make_environment(spec, env or {})
        return
    file, name = parts_of(spec)
    tree = _parsed(file, "workflow")
    coroutines = [node.name for node in tree.body if isinstance(node, ast.AsyncFunctionDef)]
    if name in coroutines or name in _other_names(tree):
        return
    if _last(tree, ast.FunctionDef, name) is not None:
        raise UserError(f"workflow: {name} in {file} is a plain function, need a coroutine; write async def {name}")
    remedy = f"name one as {file}:{coroutines[0]}" if coroutines else f"write async def {name}(prompt, policy)"
    raise UserError(f"workflow: no coroutine {name} in {file}, got {', '.join(coroutines) or 'none'}; {remedy}")


def check_policies(specs: Iterable[str], policies: Collection[str]) -> None:
    """Make sure that the workflows take the policies that there are, as far as their files show it.

    Raises:
        UserError: one takes a policy that is not there, or nobody takes one that is.
    """
    taken: set[str] = set()
    is_sure = True
    for spec in (one for one in specs if environment_name(one) is None):  # which takes none
        file, name = parts_of(spec)
        tree = _parsed(file, "workflow")
        others = _other_names(tree)  # these show only when the file runs
        found = _last(tree, ast.AsyncFunctionDef, name)
        if found is None or found.decorator_list or name in others:  # imported, made or wrapped: so does this
            is_sure = False
            continue
        needed, optional = _policies_of(found.args)
        perhaps_made = _made_per_node(tree) | others
        needed = [one for one in needed if one in policies or one not in perhaps_made]
        check_needed(needed, policies, name=name)
        taken.update(needed, optional)
    if is_sure:
        check_all_taken(policies, taken)


def check_dataset(dataset: DatasetSettings, setting: str, *, asks_hub: bool = True) -> None:
    """Make sure that a data set is there, on this machine or on the hub.

    Args:
        asks_hub: unless other hosts load it, whose cache may have what this one's has not.

    Raises:
        UserError: a path, or a function that is to return the rows, that is not there; or a name that nobody knows.
    """
    if dataset.python is not None:
        _check_function(dataset.python, f"{setting}.python")
    if dataset.environment is not None:
        check_workflow(dataset.environment, dataset.env)
    path = dataset.path
    if path is None or Path(path).exists():
        return
    if is_local(path):
        raise UserError(f"{setting}.path: no file {path}; give a file, a folder or a hub name")
    if asks_hub:
        fetch("dataset", path, files=("README.md",), setting=f"{setting}.path")


def _check_function(spec: str, setting: str) -> None:
    file, name = parts_of(spec, default=FUNCTION)
    if not file.is_file():
        raise UserError(
            f"{setting}: no file {file}; name a Python file, with :name when its function is not {FUNCTION}"
        )
    tree = _parsed(file, setting)
    found = _last(tree, ast.FunctionDef, name)
    if name in _other_names(tree):
        return  # what it is shows only when the file runs
    if found is None:
        raise UserError(f"{setting}: no function {name} in {file}; write def {name}() that returns rows")
    if not found.decorator_list and not _may_return(found):
        raise UserError(
            f"{setting}: {name}() in {file} returns None, need rows like {{'question': ...}}; return a list of dicts, "
            "or yield them"
        )


def _may_return(function: ast.FunctionDef) -> bool:
    """Say whether a function returns or yields anything but None, or raises, in its own body."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Return(value=None | ast.Constant(value=None)):
                continue
            case ast.Return() | ast.Yield() | ast.YieldFrom() | ast.Raise():
                return True
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.ClassDef():
                continue
        waiting.extend(ast.iter_child_nodes(node))
    return False


def _parsed(file: Path, what: str) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except (SyntaxError, UnicodeDecodeError) as exc:
        raise UserError(f"{what}: {file} is not Python: {exc}") from exc


def check_model(path: str, setting: str = "model.path", *, asks_hub: bool = True) -> None:
    """Make sure that a model is there, on this machine or on the hub.

    Args:
        asks_hub: as for ``check_dataset``.

    Raises:
        UserError: a path that is not there, a folder without a model, or a name that nobody knows.
    """
    folder = Path(path)
    if not folder.exists():
        if is_local(path):
            raise UserError(f"{setting}: no folder {path}; give a model's folder or a hub name")
        if asks_hub:
            fetch("model", path, files=("config.json",), setting=setting)
    elif not (folder / "config.json").is_file():
        raise UserError(f"{setting}: no config.json in {path}; give a model's folder or a hub name")


def check_tokenizer(path: str, setting: str = "model.path") -> None:
    """Make sure that a model on this machine has a tokenizer; one of the hub is found out about later.

    Raises:
        UserError: a folder without one.
    """
    folder = Path(path)
    if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES):
        raise UserError(
            f"{setting}: no tokenizer in {path}, need its files (tokenizer.json or the like) beside the weights; copy "
            "them there, with the chat template"
        )


def check_served(settings: Settings, *, asks_hub: bool = True) -> None:
    """Make sure that each model that answers or scores is there, with its tokenizer.

    Raises:
        UserError: as ``check_model`` and ``check_tokenizer``.
    """
    frozen = {f"policies.{name}.path": str(policy.path) for name, policy in settings.frozen_policies.items()}
    frozen |= {f"arms.{name}.path": arm.path for name, arm in settings.arms.items()}
    for setting, path in {"model.path": settings.model.path, **frozen}.items():
        check_model(path, setting, asks_hub=asks_hub)
        check_tokenizer(path, setting)


def check_template(settings: Settings) -> None:
    """Make sure that the chat template that the settings give can be used; with none given, nothing is loaded.

    Raises:
        UserError: it cannot, as ``chat_template.take_template`` says.
    """
    template = settings.rollout.template
    if template == TemplateSettings():
        return
    # Imported here: it takes seconds.
    from areal_async.rollout.policy.text import load_codec

    load_codec(settings.model.path, template)


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


def _last(tree: ast.Module, kind: type[F], name: str) -> F | None:
    """Return the function that the file defines last under this name; None where it defines none."""
    found = [node for node in tree.body if isinstance(node, kind) and node.name == name]
    return found[-1] if found else None


def _policies_of(arguments: ast.arguments) -> tuple[list[str], list[str]]:
    """Return the parameters after the first two that need a value, and those that have one."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = [*zip(positional, defaults, strict=True)][NUM_GIVEN:]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    needed = [one.arg for one, default in pairs if default is None]
    return needed, [one.arg for one, default in pairs if default is not None]


def _made_per_node(tree: ast.Module) -> set[str]:
    """Return the names of the functions that are made once per node."""
    marks = ("per_node", "areal_async.per_node")
    functions = [node for node in tree.body if isinstance(node, ast.AsyncFunctionDef)]
    return {one.name for one in functions if any(ast.unparse(mark) in marks for mark in one.decorator_list)}


def _other_names(tree: ast.Module) -> set[str]:
    """Return names that are imported or assigned: what they are shows only when the file runs."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def check_groups(settings: Settings) -> None:
    """Refuse to train on single answers with an algorithm that compares answers: no step would move a weight.

    Raises:
        UserError: a task has groups of one.
    """
    algorithm = settings.algorithm
    for index, task in enumerate(settings.tasks):
        if algorithm.needs_siblings and settings.rollout_of(task.name).group_size < 2:
            setting = "rollout.group_size" if task.group_size is None else f"tasks.{index}.group_size"
            raise UserError(
                f"{setting}: got 1 with algorithm.name={algorithm.name}, {algorithm.needs_siblings}, need at least 2; "
                "an answer is compared with others to its prompt: raise it, or take a preset that does not, as "
                "reinforce_pp"
            )
