"""What servers of open models take in a request beside an API's own fields; SDKs send it as ``extra_body``. Pure.

The names are those of vLLM and SGLang. They may stand in a request of any of the three APIs.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from areal_async.rollout.endpoint.calls import Form, FormKind, ToolChoice
from areal_async.rollout.endpoint.refusals import refuse_if
from areal_async.rollout.policy.json_size import has_too_many_values

Schema = dict[str, Any] | str
"""A JSON schema, or its text."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_TOKEN_ID = re.compile(r"[0-9]{1,9}")
_SAME_NAMES = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos")
_FORMS: dict[str, FormKind] = {
    "json_schema": "json_schema", "regex": "regex", "ebnf": "ebnf", "structural_tag": "structural_tag",
    "guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "ebnf",
    "structured_outputs.json": "json_schema", "structured_outputs.regex": "regex",
    "structured_outputs.grammar": "ebnf",
}  # fmt: skip
"""What each field says of the answer."""
ANY_OBJECT = Form("json_schema", {"type": "object", "additionalProperties": True})


class Structured(msgspec.Struct):
    """vLLM's ``structured_outputs``."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Extras(msgspec.Struct, kw_only=True):
    """The fields."""

    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    logit_bias: dict[str, Bias] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Schema | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: Structured | None = None


def sampling_of(extras: Extras, **own: Any) -> dict[str, Any]:
    """Return what a request says of its sampling, by the names of ``policy.chat``, with what its API calls otherwise.

    Raises:
        Refusal: a value is none that can be.
    """
    refuse_if(extras.top_k == 0, "top_k", "got 0, need -1 or at least 1")
    wanted = {
        **own,
        **{name: getattr(extras, name) for name in _SAME_NAMES},
        "logit_bias": _biases(extras.logit_bias or {}) or None,
        "min_new_tokens": extras.min_tokens,
        "stop_token_ids": tuple(extras.stop_token_ids) if extras.stop_token_ids else None,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def form_of(extras: Extras, choice: ToolChoice, own: Form | None, param: str) -> Form | None:
    """Return what an answer has to look like; ``own`` is what the API's field ``param`` says of it.

    Raises:
        Refusal: the request says two things of it.
    """
    forms = {param: own} if own else {}
    forms.update(_given(extras))
    refuse_if(len(forms) > 1, next(reversed(forms), param), f"got {' and '.join(forms)}, need one form of the answer")
    refuse_if(
        choice.is_required and bool(forms.keys() - {param}),
        next(iter(forms), param),
        "got a form of the answer with tool_choice, by which the answer has to be a call; leave one out",
    )
    return next(iter(forms.values()), None)


def _given(extras: Extras) -> Iterator[tuple[str, Form]]:
    outputs = extras.structured_outputs or Structured()
    for name, kind in _FORMS.items():
        owner, _, field = name.rpartition(".")
        value = getattr(outputs if owner else extras, field)
        if value is not None:
            yield name, Form(kind, _object(name, kind, value))
    if outputs.json_object:
        yield "structured_outputs.json_object", ANY_OBJECT
    for name, choices in (("guided_choice", extras.guided_choice), ("structured_outputs.choice", outputs.choice)):
        if choices is not None:
            refuse_if(not choices or "" in choices, name, "need at least one text, none of them empty")
            yield name, Form("regex", "|".join(f"({_escaped(text)})" for text in choices))


def _object(name: str, kind: FormKind, value: Any) -> Any:
    """Return what may be an object or its text as an object; a pattern or a grammar as it is."""
    if kind not in ("json_schema", "structural_tag"):
        return value
    try:
        if isinstance(value, str):
            value = None if has_too_many_values(value) else msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        value = None
    refuse_if(not isinstance(value, dict), name, "got a text that is no JSON object, need an object or its text")
    is_tag = kind == "structural_tag"
    refuse_if(is_tag and not isinstance(value.get("format"), dict), name, 'need {"format": {...}}')
    return value


def _escaped(text: str) -> str:
    """Return a pattern of a text, of escapes that every engine of grammars reads alike."""
    return "".join(letter if letter.isalnum() or letter > "\x7f" else f"\\u{ord(letter):04x}" for letter in text)


def _biases(given: dict[str, float]) -> dict[int, float]:
    for name in given:
        refuse_if(not _TOKEN_ID.fullmatch(name), "logit_bias", f"got the token {name!r:.50}, need ids of tokens")
    return {int(name): bias for name, bias in given.items()}
