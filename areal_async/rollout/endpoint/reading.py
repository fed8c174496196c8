"""A body -> a request of an API, every field of it accounted for. Pure, but for a word in the log.

An API's structs name the fields that are honoured and those that are hints (``HINTS``): what programs say in passing,
and what an answer may leave out of account without being another one. Every other field is one that cannot be had here,
wherever in a request it stands. Invariant: no such field is passed over in silence.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
import structlog

from areal_async.rollout.endpoint.refusals import Refusal
from areal_async.rollout.policy.json_size import MAX_JSON_VALUES, has_too_many_values

T = TypeVar("T")

MAX_NAMES = 256
"""Fields that are counted by name; a program may make up as many as it likes."""
MAX_NAME_CHARACTERS = 80

log = structlog.get_logger()


class Unhad(NamedTuple):
    """A field that is known, and cannot be had."""

    reason: str
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing."""


_ONE_ANSWER = "one answer is sampled as the policy says it"
_TEMPLATE = "the chat template and its arguments are the run's, rollout.template"
_HOSTED = "nothing is run or kept here beside the model"
_THOUGHTS_KEPT = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""What Claude Code sends."""
UNHAD: Mapping[str, Unhad] = {
    "seed": Unhad("the siblings of a group have to differ: nothing is drawn by a seed"),
    "best_of": Unhad(_ONE_ANSWER, (1,)),
    "use_beam_search": Unhad(_ONE_ANSWER, (False,)),
    "length_penalty": Unhad(_ONE_ANSWER, (1,)),
    "chat_template": Unhad(_TEMPLATE),
    "chat_template_kwargs": Unhad(_TEMPLATE, ({},)),
    "add_generation_prompt": Unhad(_TEMPLATE, (True,)),
    "continue_final_message": Unhad("no beginning can be put into the model's mouth", (False,)),
    "echo": Unhad("an answer does not repeat its question", (False,)),
    "suffix": Unhad("nothing is put between two texts", ("",)),
    "skip_special_tokens": Unhad("an answer is told without special tokens", (True,)),
    "modalities": Unhad("this model writes text only", (["text"],)),
    "audio": Unhad("this model writes text only"),
    "functions": Unhad("no longer spoken here, use tools", ([],)),
    "function_call": Unhad("no longer spoken here, use tool_choice", ("none",)),
    "web_search_options": Unhad(_HOSTED),
    "moderation": Unhad(_HOSTED),
    "background": Unhad(_HOSTED, (False,)),
    "conversation": Unhad(_HOSTED),
    "prompt": Unhad(_HOSTED),
    "truncation": Unhad("a conversation that is too long is refused, never shortened", ("disabled",)),
    "context_management": Unhad("a conversation is taken as it comes", ([], {}, _THOUGHTS_KEPT)),
    "container": Unhad(_HOSTED),
    "mcp_servers": Unhad(_HOSTED, ([],)),
}
"""Why, for fields of a request that programs are likely to send."""


class Unsupported:
    """What becomes of fields that cannot be had: a refusal, or a count and a line in the log for each (``warn``)."""

    def __init__(self, on_unsupported: Literal["refuse", "warn"] = "refuse") -> None:
        self._is_refused = on_unsupported == "refuse"
        self.counts: Counter[str] = Counter()
        """Field -> how often it was left out of account; ``[]`` stands for any place in a list."""

    def meet(self, param: str, reason: str, *, code: str = "unsupported_parameter") -> None:
        """Say that a field cannot be had.

        Raises:
            Refusal: it is not to be left out of account.
        """
        param = param[:MAX_NAME_CHARACTERS]
        if self._is_refused:
            cure = "leave it out, or set endpoint.on_unsupported=warn to have it left out of account"
            raise Refusal("bad_request", f"{param}: {reason}; {cure}", param=param, code=code)
        name = re.sub(r"\[[0-9]+\]", "[]", param)
        name = name if name in self.counts or len(self.counts) < MAX_NAMES else "others"
        self.counts[name] += 1
        if self.counts[name] == 1:
            log.warning("endpoint.field_left_out", field=name, reason=reason)


def read(body: bytes, kind: type[T], unsupported: Unsupported) -> T:
    """Decode a request.

    Raises:
        Refusal: it is no JSON, not of this kind, or asks for what cannot be had.
    """
    if has_too_many_values(body):
        raise Refusal("too_large", f"request: got more than {MAX_JSON_VALUES} values; put long lists into a text")
    try:
        request = msgspec.json.decode(body, type=kind)
        fields = msgspec.json.decode(body)
    except msgspec.ValidationError as exc:
        problem, _, place = str(exc).partition(" - at `$")
        param = place.rstrip("`").lstrip(".") or None
        raise Refusal("bad_request", f"{param or 'request'}: {problem}", param=param, code=_code(problem)) from exc
    except (msgspec.DecodeError, RecursionError, UnicodeError) as exc:
        raise Refusal("bad_request", f"request: not valid JSON ({exc})") from exc
    for param in _strange(fields, kind, ""):
        known = UNHAD.get(param)
        if known is None:
            unsupported.meet(param, "not known here", code="unknown_parameter")
        elif fields[param] not in known.neutral:
            unsupported.meet(param, known.reason)
    return request


def _code(problem: str) -> str:
    """Return OpenAI's word for what is wrong with a value."""
    if problem.startswith("Object missing required field"):
        return "missing_required_parameter"
    is_of_other_type = re.match(r"Expected `[^`]*`, got ", problem) is not None
    return "invalid_type" if is_of_other_type else "invalid_value"


def _strange(value: Any, kind: Any, where: str) -> Iterator[str]:
    """Yield the places of the fields that a request has and its kind does not name; null is as good as no field."""
    items, fields = _parts(kind)
    if isinstance(value, list) and items is not None:
        for number, item in enumerate(value):
            yield from _strange(item, items, f"{where}[{number}]")
    elif isinstance(value, dict) and fields is not None:
        for name, inner in value.items():
            place = f"{where}.{name}" if where else name
            if inner is None:
                continue
            if name in fields:
                yield from _strange(inner, fields[name], place)
            else:
                yield place


class _ValueParts(NamedTuple):
    """What is inside of a value of a kind."""

    items: Any
    """The kind of a list's items; None where it is not said."""
    fields: Mapping[str, Any] | None
    """Field -> kind, of a struct; None where any may come."""


@cache
def _parts(kind: Any) -> _ValueParts:
    if get_origin(kind) is Annotated:
        return _parts(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        parts = [_parts(one) for one in get_args(kind)]
        items = next((one.items for one in parts if one.items is not None), None)
        return _ValueParts(items, next((one.fields for one in parts if one.fields is not None), None))
    if get_origin(kind) is list:
        return _ValueParts(get_args(kind)[0], None)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        return _ValueParts(None, {**fields, **dict.fromkeys(getattr(kind, "HINTS", ()), Any)})
    return _ValueParts(None, None)
