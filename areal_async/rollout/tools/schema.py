"""A tool -> what the model is told of it (JSON schema), and how it is called: a function's arguments are checked."""

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from areal_async.api import DescribedTool, RunnableTool
from areal_async.errors import WorkflowError

F = TypeVar("F", bound=Callable[..., Any])

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TIMEOUT = "__areal_tool_timeout_s__"
_READ = "__areal_tool_read__"
_SECTION = re.compile(r"^(\w+):\s*$")
_ITEM = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")
_FIELD = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+):\s*(.*)$")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tool:
    """A function or a described tool, as a model may call it."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    """As OpenAI writes it: ``{"type": "function", "function": {...}}``."""
    arguments: type[msgspec.Struct] | None
    """What they are checked against; ``None`` leaves that to the tool."""
    timeout_s: float | None
    """Its own deadline, where it has one."""

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the function takes them; text that says a number counts as one.

        Raises:
            msgspec.ValidationError: they do not fit. Its message is fit for a model to read.
        """
        if self.arguments is None:
            return dict(arguments)
        checked = msgspec.convert(arguments, self.arguments, strict=False)
        return {name: getattr(checked, name) for name in arguments}


def tool(*, timeout_s: float) -> Callable[[F], F]:
    """Give a function its own deadline as a tool, in seconds."""

    def mark(function: F) -> F:
        setattr(function, _TIMEOUT, timeout_s)
        return function

    return mark


def describe_tool(tool: RunnableTool) -> Tool:
    """Return a tool's own description, or read a function's off its signature and docstring.

    Raises:
        WorkflowError: no name, or a parameter that has no type, or none that JSON can carry.
    """
    return _take_description(tool) if isinstance(tool, DescribedTool) else _describe_function(tool)


def function_schema(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a model is told of a function, as OpenAI writes it and chat templates take it."""
    about = {"description": description} if description else {}
    empty = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, **about, "parameters": parameters or empty}}


def _take_description(tool: DescribedTool) -> Tool:
    schema = dict(tool.schema)
    function = schema.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise WorkflowError(f"tool: got name {name!r:.100} in a schema, need letters, digits, _ and -, at most 64")

    async def call(**arguments: Any) -> Any:
        return await tool.call(arguments)

    return Tool(name=name, function=call, schema=schema, arguments=None, timeout_s=tool.timeout_s)


def _describe_function(function: Callable[..., Any]) -> Tool:
    """Read Google's or Sphinx's way of writing parameters."""
    name = getattr(function, "__name__", "")
    if not callable(function) or not _NAME.fullmatch(name):
        raise WorkflowError(f"tool {function!r:.100}: need a function with a name of letters, digits, _ and -")
    read = _read_once(function, name)
    timeout_s = getattr(function, _TIMEOUT, None)
    return Tool(name=name, function=function, schema=read.schema, arguments=read.arguments, timeout_s=timeout_s)


class _Read(NamedTuple):
    """What a function says of itself."""

    source: tuple[Any, ...]
    """Where it says so; what has changed is read again."""
    schema: dict[str, Any]
    arguments: type[msgspec.Struct]


def _read_once(function: Callable[..., Any], name: str) -> _Read:
    """As ``_read``, once: every trajectory has the same tools, and to read one takes a fifth of a millisecond."""
    plain = getattr(function, "__func__", function)  # a method is another object each time it is looked up
    if not inspect.isfunction(plain):
        return _read(function, name, ())
    defaults = (plain.__defaults__, dict(plain.__kwdefaults__ or {}))
    source = (plain is function, name, inspect.getdoc(function), plain.__code__, defaults, dict(plain.__annotations__))
    read: _Read | None = getattr(plain, _READ, None)
    if read is None or read.source != source:
        read = _read(function, name, source)
        setattr(plain, _READ, read)  # there, and so gone with the function, whatever its types hold
    return read


def _read(function: Callable[..., Any], name: str, source: tuple[Any, ...]) -> _Read:
    summary, notes = read_docstring(inspect.getdoc(function) or "")
    fields = [_field(name, parameter, notes) for parameter in _parameters(function, name)]
    arguments = msgspec.defstruct(name.replace("-", "_"), fields, kw_only=True, forbid_unknown_fields=True)
    return _Read(source, function_schema(name, summary, _json_schema(name, arguments)), arguments)


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return what stands before the first section, and what is said of each parameter."""
    summary: list[str] = []
    notes: dict[str, str] = {}
    section, current = "", ""
    for line in text.splitlines():
        heading, parameter = _SECTION.match(line), _FIELD.match(line.strip())
        if heading or line.startswith(":"):
            section = heading[1].lower() if heading else "args"
            current = ""
        item = parameter or (_ITEM.match(line.strip()) if section == "args" and _indent(line) in (2, 4) else None)
        if item:
            current = item[1]
            notes[current] = item[2]
        elif section == "args" and current and line.strip():
            notes[current] += f" {line.strip()}"
        elif not section:
            summary.append(line)
    return "\n".join(summary).strip(), {name: note.strip() for name, note in notes.items()}


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _parameters(function: Callable[..., Any], name: str) -> Sequence[inspect.Parameter]:
    try:
        hints = typing.get_type_hints(_plain(function), include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError, NameError, AttributeError) as exc:
        raise WorkflowError(f"tool {name}: cannot read its signature: {exc}") from exc
    for parameter in parameters:
        if parameter.kind not in _NAMED:
            raise WorkflowError(f"tool {name}: got parameter {str(parameter)!r}, need ones that have a name each")
        if parameter.name not in hints:
            raise WorkflowError(
                f"tool {name}: parameter {parameter.name!r} has no type; write one, {parameter.name}: int"
            )
    return [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]


def _plain(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def _field(tool_name: str, parameter: inspect.Parameter, notes: Mapping[str, str]) -> tuple[str, Any, Any]:
    kind = parameter.annotation
    if parameter.name in notes:
        kind = Annotated[kind, msgspec.Meta(description=notes[parameter.name])]
    default = parameter.default
    if default is inspect.Parameter.empty:
        return parameter.name, kind, msgspec.NODEFAULT
    return parameter.name, kind, msgspec.field(default_factory=lambda: default)


def _json_schema(name: str, arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the schema of an object with these fields, without the names that msgspec gives to its types."""
    try:
        _, components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    except TypeError as exc:
        cause = str(exc).strip().rpartition("\n")[2]
        raise WorkflowError(f"tool {name}: a parameter's type does not fit into JSON: {cause}") from exc
    schema: dict[str, Any] = components.pop(arguments.__name__)
    schema.pop("title", None)
    return {**schema, "$defs": components} if components else schema
