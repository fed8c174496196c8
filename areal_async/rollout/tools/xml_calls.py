"""A call as Qwen3-Coder writes it -> its name and its arguments. Pure.

    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>

Values are plain text. What they stand for is said by the tool's schema: text where it may be text, JSON elsewhere.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_FUNCTION = re.compile(r"\A\s*<function=([^<>]*)>(.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_SHAPE = "need <function=NAME><parameter=KEY>value</parameter></function>"
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_NULLS = ("null", "None")


def read_xml(body: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any], str]:
    """Return name, arguments and, in words for the model, what is wrong; one that was not closed is no call."""
    function = _FUNCTION.match(body)
    if function is None or not function[1].strip():
        return "", {}, f"not a whole call, {_SHAPE}"
    name, parameters = function[1].strip(), function[2]
    if _PARAMETER.sub("", parameters).strip():
        return name, {}, f"the arguments of {name!r} are not all parameters, {_SHAPE}"
    schema = _parameters_of(name, tools)
    properties = schema.get("properties", {})
    arguments = {
        key.strip(): _typed(text, _kinds(properties.get(key.strip(), {}), schema))
        for key, text in _PARAMETER.findall(parameters)
    }
    return name, arguments, ""


def _parameters_of(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    functions = (tool.get("function", {}) for tool in tools)
    return next((one.get("parameters") or {} for one in functions if one.get("name") == name), {})


def _typed(text: str, kinds: set[str]) -> Any:
    if "null" in kinds and text.strip() in _NULLS:
        return None
    if not kinds or "string" in kinds:
        return text
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return _PYTHON_WORDS.get(text.strip(), text)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the names of the JSON types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping) or depth > len(root.get("$defs", {})) + 1:
        return set()
    kinds = schema.get("type", ())
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    found |= {"string" if isinstance(value, str) else "other" for value in schema.get("enum", ())}
    if "$ref" in schema:
        target = root.get("$defs", {}).get(str(schema["$ref"]).rpartition("/")[2])
        found |= _kinds(target, root, depth + 1)
    for among in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(among, ()):
            found |= _kinds(one, root, depth + 1)
    return found
