"""Grammars that an answer keeps to: XGrammar's, which is what SGLang has by default.

A grammar is compiled in a thread of its own, once for all who ask for it, and none of them waits longer than a
deadline. Invariant: what XGrammar would leave out of a schema without a word, or end the process with, is refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from areal_async.inference.embedded.engine.errors import RequestError
from areal_async.inference.embedded.engine.lifecycle import call_in_thread
from areal_async.inference.embedded.engine.text import Tokenizer

if TYPE_CHECKING:
    import xgrammar

ANY_JSON = "$$ANY$$"
"""SGLang's word for the schema of whatever is JSON."""
COMPILE_DEADLINE_S = 30.0
MAX_KEPT = 256
"""Number of compiled grammars that are kept."""
MAX_THREADS = 4
"""One compilation takes no more."""
MAX_DEPTH = 100
"""A schema nested deeper compiles for minutes: the time grows with the cube of it."""

_WHERE = re.compile(r"^\[[0-9:]+\] \S+: ")
"""The time and the line of XGrammar's that its messages begin with."""
_IGNORED = frozenset(
    "contains minContains maxContains uniqueItems multipleOf not if then else dependentRequired "
    "dependentSchemas".split()
)
"""Keywords of JSON Schema that XGrammar takes and does not keep to."""
_DATA = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are no schemas."""
_BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose values are schemas by names of the user's own."""
_FORMATS = frozenset(
    "date date-time duration email hostname ipv4 ipv6 json-pointer relative-json-pointer time uri uri-reference "
    "uri-template uuid".split()
)


class Grammar:
    """How far one answer has come in its grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self.is_stuck = False
        """No token of the vocabulary can come next, and no end either."""

    def accept(self, token_id: int) -> None:
        """Go on by one token."""
        self._matcher.accept_token(token_id)

    @property
    def is_over(self) -> bool:
        """Whether the end of the answer was accepted."""
        return bool(self._matcher.is_terminated())

    @staticmethod
    def mask(logits_NV: torch.Tensor, grammars: Sequence[tuple[int, Grammar]]) -> None:
        """Make impossible, in place, what the grammars (row, grammar) do not have next."""
        import xgrammar

        vocab_size = logits_NV.shape[-1]
        words_MW = xgrammar.allocate_token_bitmask(len(grammars), vocab_size)
        for index, (_, grammar) in enumerate(grammars):
            grammar._matcher.fill_next_token_bitmask(words_MW, index)
        for (_, grammar), has_next in zip(grammars, words_MW.any(dim=-1).tolist(), strict=True):
            grammar.is_stuck = not has_next
        rows_M = torch.tensor([row for row, _ in grammars], device=logits_NV.device)
        masked_MV = logits_NV[rows_M]
        # Elsewhere by torch alone: its Triton kernel would be compiled in the midst of generation.
        backend: Literal["cpu", "torch_native"] = "cpu" if logits_NV.device.type == "cpu" else "torch_native"
        words_MW = words_MW.to(logits_NV.device)
        xgrammar.apply_token_bitmask_inplace(masked_MV, words_MW, vocab_size=vocab_size, backend=backend)
        logits_NV[rows_M] = masked_MV


class Grammars:
    """Compiles for one model, and keeps what it has compiled. On the event loop."""

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._deadline_s = COMPILE_DEADLINE_S
        self._compiled: OrderedDict[tuple[str, str], asyncio.Future[xgrammar.CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None

    async def begin(self, kind: str, text: str) -> Grammar:
        """Return the beginning of a grammar.

        Args:
            kind: ``json_schema``, ``regex``, ``ebnf`` or ``structural_tag``, as the request calls it.

        Raises:
            RequestError: it is none, or not one that can be kept to, or took too long to compile.
        """
        if self._tokenizer is None or not self._eos_token_ids:
            missing = "tokenizer" if self._tokenizer is None else "end-of-sequence token"
            raise RequestError(f"{kind}: the model has no {missing}, which a grammar needs; leave it out")
        key = (kind, text)
        if key not in self._compiled:
            self._compiled[key] = self._start(key)
        self._compiled.move_to_end(key)
        try:
            async with asyncio.timeout(self._deadline_s):
                return Grammar(await asyncio.shield(self._compiled[key]))
        except TimeoutError as exc:
            raise RequestError(f"{kind}: not compiled within {self._deadline_s:g} s; make it simpler") from exc

    def _start(self, key: tuple[str, str]) -> asyncio.Future[xgrammar.CompiledGrammar]:
        """Compile in a thread: a grammar without end holds up only those who ask for it."""
        while len(self._compiled) >= MAX_KEPT:
            self._compiled.popitem(last=False)
        compiling = asyncio.ensure_future(
            call_in_thread(lambda: self._compile(*key), name="grammar", expected=(RequestError,))
        )

        def forget_failed(done: asyncio.Future[xgrammar.CompiledGrammar]) -> None:
            if (done.cancelled() or done.exception() is not None) and self._compiled.get(key) is done:
                del self._compiled[key]

        compiling.add_done_callback(forget_failed)
        return compiling

    def _compile(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        try:
            if "\0" in text or (kind in ("json_schema", "structural_tag") and "\\u0000" in text):
                raise ValueError("got a NUL character, need none: it would end the process")
            compiler = self._load_compiler()
            if kind == "json_schema" and text == ANY_JSON:
                return compiler.compile_builtin_json_grammar()
            if kind == "json_schema":
                for schema, place in _schemas(json.loads(text), "#", depth=0):
                    _check_schema(schema, place)
                return compiler.compile_json_schema(text)
            if kind == "structural_tag":
                return compiler.compile_structural_tag(_modern_tag(json.loads(text)))
            return compiler.compile_regex(text) if kind == "regex" else compiler.compile_grammar(text)
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
            reason = _WHERE.sub("", " ".join(str(exc).split())) or type(exc).__name__
            raise RequestError(f"{kind}: Failed to compile the grammar: {reason}") from exc

    def _load_compiler(self) -> xgrammar.GrammarCompiler:
        """Read the vocabulary, once."""
        import xgrammar

        with self._lock:
            if self._compiler is None:
                assert self._tokenizer is not None
                vocabulary = xgrammar.TokenizerInfo.from_huggingface(
                    self._tokenizer.whole, vocab_size=self._vocab_size, stop_token_ids=self._eos_token_ids
                )
                threads = min(MAX_THREADS, os.cpu_count() or 1)
                # Its own cache takes one structural tag for another.
                self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=threads, cache_enabled=False)
            return self._compiler


def _modern_tag(tag: Any) -> Any:
    """Return a structural tag in the form with ``format``; SGLang takes the one with ``structures`` too."""
    import xgrammar

    if not isinstance(tag, dict) or tag.get("structures") is None:
        return json.dumps(tag)
    items = [
        xgrammar.StructuralTagItem(begin=one["begin"], schema=json.dumps(one.get("schema") or {}), end=one["end"])
        for one in tag["structures"]
    ]
    modern = xgrammar.StructuralTag.from_legacy_structural_tag(items, tag["triggers"])
    form: Any = modern.format  # the one of many kinds that old tags become
    form.at_least_one = tag.get("at_least_one", False)
    return modern


def _schemas(value: Any, place: str, *, depth: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Walk all schemas in a schema, with their places in it."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{place[:80]}...: nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _schemas(one, f"{place}/{index}", depth=depth + 1)
    elif isinstance(value, dict):
        yield value, place
        for name, inner in value.items():
            if name in _BY_NAME and isinstance(inner, dict):
                for key, schema in inner.items():
                    yield from _schemas(schema, f"{place}/{name}/{key}", depth=depth + 1)
            elif name not in _DATA:
                yield from _schemas(inner, f"{place}/{name}", depth=depth + 1)


def _check_schema(schema: dict[str, Any], place: str) -> None:
    ignored = sorted(_IGNORED & schema.keys())
    if ignored:
        raise ValueError(f"{place}: got {', '.join(ignored)}, which an answer would not be kept to; leave it out")
    if schema.get("type", "string") != "string" and "string" not in schema["type"]:
        return
    format_name = schema.get("format")
    if format_name is not None and format_name not in _FORMATS:
        raise ValueError(f"{place}: got format {format_name!r}, need one of {', '.join(sorted(_FORMATS))}")
    kinds = [bool(names & schema.keys()) for names in ({"format"}, {"pattern"}, {"minLength", "maxLength"})]
    if sum(kinds) > 1:
        raise ValueError(
            f"{place}: got several of format, pattern and a length, need one: they are not kept to together"
        )
