"""The ``/generate`` request: its fields, defaults and limits, as SGLang has them.

Invariant: a field this engine does not implement is refused when it asks for anything; it is never ignored, because
an ignored penalty or mask would silently change what a trainer learns from.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from areal_async.inference.embedded.engine.errors import RequestError, SchemaError
from areal_async.inference.embedded.engine.text import Tokenizer

_SAMPLING_EPS = 1e-6
"""A temperature below this is greedy decoding."""
_DEFAULT_NEW_TOKENS = 128
_MAX_STOP_STRINGS = 32
_MAX_PENALTY = 2.0
_MAX_BIAS = 1e9
"""A logit and far more than it are still numbers of 32 bits together."""
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_RESERVED_TOKENS = 6
"""A prompt must leave this much of the context, as in SGLang."""

_NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "beam_width": (1,),
    "stop_regex": ([],),
    "custom_params": ({},),
    "watermark": (),
}
"""Sampling fields not implemented, with the values (besides null) that ask for nothing."""

_NEUTRAL_REQUEST: dict[str, tuple[Any, ...]] = {
    "input_embeds": (),
    "video_data": ([],),
    "audio_data": ([],),
    "logprob_start_len": (-1,),
    "token_ids_logprob": ([],),
    "return_sampling_mask": (False,),
    "sampling_logprobs_mode": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_text_in_logprobs": (False,),
    "session_params": ({},),
    "lora_path": (),
    "custom_logit_processor": (),
}


class PromptBody(msgspec.Struct, kw_only=True):
    """The fields of a JSON body that every model acts on."""

    input_ids: list[int | list[int]] | None = None
    """One prompt, or a batch of them."""
    text: str | list[str] | None = None
    rid: str | list[str] | None = None

    @property
    def is_batch(self) -> bool:
        """Whether several prompts were sent, or one in a list of its own: then the answer is a list."""
        return isinstance(self.text, list) or bool(self.input_ids and isinstance(self.input_ids[0], list))

    def encode(self, tokenizer: Tokenizer | None) -> list[list[int]]:
        """Return the token ids of one prompt or of a batch of them.

        Raises:
            RequestError: neither or both are given, numbers and lists are mixed, or there is text and no tokenizer.
        """
        if (self.input_ids is None) == (self.text is None):
            raise RequestError("Either text, input_ids or input_embeds should be provided.")
        if self.text is not None:
            if tokenizer is None:
                raise RequestError("text: the model has no tokenizer; send input_ids")
            return [tokenizer.encode(one) for one in ([self.text] if isinstance(self.text, str) else self.text)]
        given = self.input_ids or []
        nested = [item for item in given if isinstance(item, list)]
        flat = [item for item in given if isinstance(item, int)]
        if nested and flat:
            raise RequestError("input_ids: got a mix of numbers and lists, need one list or a list of lists")
        return nested or [flat]


class GenerateBody(PromptBody, kw_only=True):
    """The fields of the JSON body that this engine acts on."""

    image_data: str | list[str | list[str] | None] | None = None
    """Images of the prompt, each a ``data:`` URL or base64; of a batch, one for all, or for each one or a list."""
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_prompt_token_ids: bool = False
    stream: bool = False

    def images_of(self, count: int) -> list[list[str]]:
        """Return the images of each of ``count`` prompts.

        Raises:
            RequestError: there are not as many entries as prompts, or one prompt has lists in its list.
        """
        given = self.image_data if isinstance(self.image_data, list) else [self.image_data]
        nested: list[Sequence[str | list[str] | None]]
        if not self.is_batch:
            nested = [given]
        elif not isinstance(self.image_data, list) or not given:
            nested = [given] * count
        else:
            nested = [one if isinstance(one, list) else [one] for one in given]
        if len(nested) != count:
            raise RequestError("The length of image_data should be equal to the batch size.")
        if any(isinstance(one, list) for images in nested for one in images):
            raise RequestError("image_data: got a list in the list of one prompt's images, need strings")
        return [[one for one in images if isinstance(one, str)] for images in nested]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled and when it ends, in SGLang's fields; null stands for the default."""

    max_new_tokens: int | None | UnsetType = UNSET
    """Most tokens of the answer; None means up to the context length. What the client sent is refused, not cut, when
    it does not fit."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    logit_bias: dict[int, float] = {}
    json_schema: str = ""
    regex: str = ""
    ebnf: str = ""
    structural_tag: str = ""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    """Whether the end token is one like others; also disables ``stop_token_ids``, as in SGLang."""
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    sampling_seed: int | None = None

    @property
    def most_tokens(self) -> int | None:
        """``max_new_tokens``, or what it is where the client left it out."""
        return _DEFAULT_NEW_TOKENS if self.max_new_tokens is UNSET else self.max_new_tokens

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < _SAMPLING_EPS

    @property
    def divisor(self) -> float:
        """What the logits are divided by: 1 in greedy decoding."""
        return 1.0 if self.is_greedy else self.temperature

    @property
    def grammar(self) -> tuple[str, str] | None:
        """The grammar's kind, as the request calls it, and its text."""
        return next(((kind, text) for kind in _GRAMMARS if (text := getattr(self, kind))), None)

    @property
    def has_filter(self) -> bool:
        """Whether the distribution is cut before sampling."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def has_penalty(self) -> bool:
        """Whether tokens that the answer has are treated otherwise."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)

    @property
    def is_steered(self) -> bool:
        """Whether the logits are changed before anything is drawn."""
        return self.has_penalty or bool(self.min_new_tokens or self.logit_bias or self.grammar)


def parse_body(raw: bytes) -> GenerateBody:
    """Decode the body of ``/generate``.

    Raises:
        SchemaError: not JSON, or a field of the wrong type.
        RequestError: a field this engine does not implement asks for something.
    """
    try:
        fields = msgspec.json.decode(raw)
        body = msgspec.convert(fields, GenerateBody)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise SchemaError(f"body of /generate: {exc}") from exc
    _refuse_unsupported(fields, _NEUTRAL_REQUEST)
    return body


def parse_sampling(fields: dict[str, Any]) -> SamplingParams:
    """Resolve one ``sampling_params`` object.

    Raises:
        SchemaError: a field of the wrong type.
        RequestError: a number out of range, or an unsupported field.
    """
    _refuse_unsupported(fields, _NEUTRAL_SAMPLING)
    given = {name: value for name, value in fields.items() if value is not None or name == "max_new_tokens"}
    stop = given.get("stop", [])
    given["stop"] = [text for text in stop if text != ""] if isinstance(stop, list) else [stop] if stop != "" else []
    try:
        params = msgspec.convert(given, SamplingParams, str_keys=True)
    except msgspec.ValidationError as exc:
        raise SchemaError(f"sampling_params: {exc}") from exc
    _check_ranges(params)
    return params


def _check_ranges(params: SamplingParams) -> None:
    if not math.isfinite(params.temperature) or params.temperature < 0:
        raise RequestError(f"temperature must be a non-negative finite number, got {params.temperature}.")
    if not 0.0 < params.top_p <= 1.0:
        raise RequestError(f"top_p must be in (0, 1], got {params.top_p}.")
    if not 0.0 <= params.min_p <= 1.0:
        raise RequestError(f"min_p must be in [0, 1], got {params.min_p}.")
    if params.top_k < 1 and params.top_k != -1:
        raise RequestError(f"top_k must be -1 (disable) or at least 1, got {params.top_k}.")
    most = math.inf if params.most_tokens is None else params.most_tokens
    if most < 0:
        raise RequestError(f"max_new_tokens must be at least 0, got {most}.")
    for name in ("frequency_penalty", "presence_penalty"):
        if not -_MAX_PENALTY <= getattr(params, name) <= _MAX_PENALTY:
            raise RequestError(f"{name} must be in [-2, 2], got {getattr(params, name)}.")
    if not all(-_MAX_BIAS <= bias <= _MAX_BIAS for bias in params.logit_bias.values()):
        raise RequestError(f"logit_bias: got {params.logit_bias}, need numbers from {-_MAX_BIAS:g} to {_MAX_BIAS:g}")
    if not 0.0 < params.repetition_penalty <= _MAX_PENALTY:
        raise RequestError(f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {params.repetition_penalty}.")
    if not 0 <= params.min_new_tokens <= most:
        raise RequestError(f"min_new_tokens must be in [0, max_new_tokens({most})], got {params.min_new_tokens}.")
    if sum(bool(getattr(params, kind)) for kind in _GRAMMARS) > 1:
        raise RequestError("Only one of json_schema, regex, ebnf, or structural_tag can be set.")
    if params.grammar is not None and params.min_new_tokens:
        raise RequestError("min_new_tokens: got it with a grammar, need one of them: the grammar says when to end")
    if params.sampling_seed is not None and not -(2**63) <= params.sampling_seed < 2**63:
        raise RequestError(f"sampling_seed must be in [-2**63, 2**63 - 1], got {params.sampling_seed}.")
    if len(params.stop) > _MAX_STOP_STRINGS:
        raise RequestError(f"at most {_MAX_STOP_STRINGS} stop strings are allowed, got {len(params.stop)}")


def _refuse_unsupported(fields: Any, neutral: dict[str, tuple[Any, ...]]) -> None:
    for name, values in neutral.items():
        value = fields.get(name)
        if value is not None and value not in values:
            raise RequestError(f"{name}: got {value!r}, which the embedded engine does not support; leave it out")


def check_prompt_ids(prompt_ids: list[int], *, vocab_size: int, context_length: int) -> None:
    """Refuse a prompt that the model can never be given.

    Raises:
        RequestError: it is empty, too long or not of this vocabulary.
    """
    if not prompt_ids:
        raise RequestError("input_ids cannot be empty.")
    if len(prompt_ids) >= context_length:
        raise RequestError(
            f"The input ({len(prompt_ids)} tokens) is longer than the model's context length ({context_length} tokens)."
        )
    bad_ids = [i for i in prompt_ids if not 0 <= i < vocab_size]
    if bad_ids:
        raise RequestError(f"input_ids: got {bad_ids[0]}, need token ids in [0, {vocab_size - 1}]")


def check_length(num_prompt_tokens: int, params: SamplingParams, *, context_length: int) -> int:
    """Return how many tokens the request may generate.

    A ``max_new_tokens`` that the client sent and that cannot fit is an error; the default is cut to what fits.

    Raises:
        RequestError: prompt plus answer does not fit the context, or the prompt leaves too little of it.
    """
    wanted = params.most_tokens
    total = num_prompt_tokens + (wanted or 0)
    if params.max_new_tokens is not UNSET and total > context_length:
        raise RequestError(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens. You "
            f"requested a total of {total} tokens: {num_prompt_tokens} tokens from the input messages and {wanted} "
            f"tokens for the completion. Please reduce the number of tokens in the input messages or the completion "
            f"to fit within the limit."
        )
    longest_prompt = context_length - _RESERVED_TOKENS
    if num_prompt_tokens >= longest_prompt:
        raise RequestError(
            f"Input length ({num_prompt_tokens} tokens) exceeds the maximum allowed length ({longest_prompt} tokens). "
            f"Use a shorter input or enable --allow-auto-truncate."
        )
    room = context_length - num_prompt_tokens - 2
    return room if wanted is None else min(wanted, room)
