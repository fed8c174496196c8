"""What a request of any of the three APIs may say, and the call that it asks for. Pure.

Beside what the APIs have in common that is what servers of open models take, by the names of vLLM and SGLang; SDKs send
it as ``extra_body``.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from areal_async.rollout.endpoint.calls import CompletionRequest, Form, FormKind, ToolChoice
from areal_async.rollout.endpoint.refusals import refuse_if
from areal_async.rollout.policy.json_size import decode_object

Schema = dict[str, Any] | str
"""A JSON schema, or its text."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_TOKEN_ID = re.compile(r"[0-9]{1,9}")
_SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "ignore_eos",
)  # fmt: skip
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


class ApiRequest(msgspec.Struct, kw_only=True):
    """A request, but for what its API says in a way of its own."""

    model: str = ""
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
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


def call_of(
    request: ApiRequest,
    messages: list[dict[str, Any]],
    tools: tuple[list[dict[str, Any]], ToolChoice],
    *,
    form: Form | None,
    form_param: str,
    max_new_tokens: int | None,
    stop: Sequence[str] | None = None,
    **options: Any,
) -> CompletionRequest:
    """Return what a request asks for.

    Args:
        tools: what the model is told of, and what it may call of that.
        form: what the API's field ``form_param`` says of the answer.
        options: other fields of the call.

    Raises:
        Refusal: a value is none that can be, or the request says two things of its answer.
    """
    refuse_if(request.top_k == 0, "top_k", "got 0, need -1 or at least 1")
    sampling = {
        **{name: getattr(request, name) for name in _SAME_NAMES},
        "max_new_tokens": max_new_tokens,
        "stop": tuple(stop) if stop else None,
        "logit_bias": _biases(request.logit_bias or {}) or None,
        "min_new_tokens": request.min_tokens,
        "stop_token_ids": tuple(request.stop_token_ids) if request.stop_token_ids else None,
    }
    described, choice = tools
    return CompletionRequest(
        messages=messages,
        tools=described,
        sampling={name: value for name, value in sampling.items() if value is not None},
        is_streamed=bool(request.stream),
        choice=choice,
        form=_form_of(request, choice, form, form_param),
        **options,
    )


def _form_of(request: ApiRequest, choice: ToolChoice, own: Form | None, param: str) -> Form | None:
    forms = {param: own} if own else {}
    forms.update(_given(request))
    refuse_if(len(forms) > 1, next(reversed(forms), param), f"got {' and '.join(forms)}, need one form of the answer")
    refuse_if(
        choice.is_required and bool(forms.keys() - {param}),
        next(iter(forms), param),
        "got a form of the answer with tool_choice, by which the answer has to be a call; leave one out",
    )
    return next(iter(forms.values()), None)


def _given(request: ApiRequest) -> Iterator[tuple[str, Form]]:
    outputs = request.structured_outputs or Structured()
    for name, kind in _FORMS.items():
        owner, _, field = name.rpartition(".")
        value = getattr(outputs if owner else request, field)
        if value is not None:
            yield name, Form(kind, _object(name, kind, value))
    if outputs.json_object:
        yield "structured_outputs.json_object", ANY_OBJECT
    for name, choices in (("guided_choice", request.guided_choice), ("structured_outputs.choice", outputs.choice)):
        if choices is not None:
            refuse_if(not choices or "" in choices, name, "need at least one text, none of them empty")
            yield name, Form("regex", "|".join(f"({_escaped(text)})" for text in choices))


def _object(name: str, kind: FormKind, value: Any) -> Any:
    """Return what may be an object or its text as an object; a pattern or a grammar as it is."""
    if kind not in ("json_schema", "structural_tag"):
        return value
    if isinstance(value, str):
        value = decode_object(value)
    refuse_if(value is None, name, "got a text that is no JSON object, need an object or its text")
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
