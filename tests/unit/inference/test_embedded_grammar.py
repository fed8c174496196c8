"""Grammars of the embedded engine: compiled aside, once, within a deadline, and only where they can be kept to."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from areal_async.inference.embedded.engine.errors import RequestError
from areal_async.inference.embedded.engine.grammar import MAX_KEPT, Grammar, Grammars
from areal_async.inference.embedded.engine.protocol import SamplingParams
from areal_async.inference.embedded.engine.sequence import RunningSequence
from areal_async.inference.embedded.engine.text import load_tokenizer
from tests.unit.inference.embedded_engine import ALPHABET, EOS_ID, FIRST_BYTE_ID, VOCAB_SIZE

pytestmark = pytest.mark.anyio

SCHEMA = ("json_schema", '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}')


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Counting(Grammars):
    """Counts what it compiles."""

    num_compiled = 0

    def _compile(self, kind: str, text: str) -> Any:
        self.num_compiled += 1
        return super()._compile(kind, text)


def grammars_of(folder: Path) -> Counting:
    return Counting(load_tokenizer(folder), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS_ID}))


async def test_siblings_wait_for_one_compilation_and_each_has_a_beginning_of_its_own(models: list[Path]) -> None:
    grammars = grammars_of(models[0])

    siblings = await asyncio.gather(*(grammars.begin("regex", "a") for _ in range(8)))
    late = await grammars.begin("regex", "a")
    siblings[0].accept(FIRST_BYTE_ID + ALPHABET.index("a"))
    siblings[0].accept(EOS_ID)

    assert grammars.num_compiled == 1
    assert siblings[0].is_over
    assert not any(one.is_over for one in [*siblings[1:], late])


async def test_who_waits_past_the_deadline_is_told_and_the_next_finds_it_compiled(models: list[Path]) -> None:
    grammars = grammars_of(models[0])
    grammars._deadline_s = 0.0
    with pytest.raises(RequestError, match="json_schema: not compiled within 0 s; make it simpler"):
        await grammars.begin(*SCHEMA)

    grammars._deadline_s = 60.0
    await grammars.begin(*SCHEMA)

    assert grammars.num_compiled == 1


async def test_a_grammar_that_is_none_is_refused_in_xgrammars_words_alone(models: list[Path]) -> None:
    with pytest.raises(RequestError, match=r"^regex: Failed to compile the grammar: Regex parsing error at position 3"):
        await grammars_of(models[0]).begin("regex", "[a")


async def test_the_oldest_grammar_gives_way(models: list[Path]) -> None:
    grammars = grammars_of(models[0])
    for index in range(MAX_KEPT + 1):
        await grammars.begin("regex", f"a{index}")

    assert len(grammars._compiled) == MAX_KEPT


@pytest.mark.parametrize("missing", ["tokenizer", "end-of-sequence token"])
async def test_a_model_that_lacks_what_a_grammar_needs_is_named(models: list[Path], missing: str) -> None:
    tokenizer = None if missing == "tokenizer" else load_tokenizer(models[0])
    eos = frozenset({EOS_ID} if missing == "tokenizer" else ())

    with pytest.raises(RequestError, match=f"regex: the model has no {missing}"):
        await Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=eos).begin("regex", "a")


async def test_a_schema_that_would_not_be_kept_to_is_refused_with_the_place(models: list[Path]) -> None:
    grammars = grammars_of(models[0])
    string: dict[str, Any] = {"type": "string"}
    table: list[tuple[Any, str]] = [
        ({"properties": {"not": {"type": "array", "uniqueItems": True}}}, "#/properties/not: got uniqueItems"),
        ({"$defs": {"x": {"items": [{"multipleOf": 2}]}}}, "#/\\$defs/x/items/0: got multipleOf"),
        ({"if": {}, "then": {}}, "#: got if, then"),
        ({**string, "format": "phone"}, "#: got format 'phone'"),
        ({"type": ["string", "null"], "pattern": "a", "minLength": 3}, "got several of format, pattern and a length"),
        (json.loads('{"items":' * 101 + "{}" + "}" * 101), "nested deeper than 100"),
    ]
    for schema, problem in table:
        with pytest.raises(RequestError, match=f"json_schema: .*{problem}"):
            await grammars.begin("json_schema", json.dumps(schema))

    for schema in ({"enum": [{"if": 1}], "const": {"not": 2}}, {"properties": {"if": {}, "format": {}}}, True, {}):
        await grammars.begin("json_schema", json.dumps(schema))


async def test_a_grammar_that_the_vocabulary_cannot_write_ends_its_answer_as_the_requests_fault(tmp_path: Path) -> None:
    vocab = {"<eos>": 0, "a": 1, "b": 2}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, [])), eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path)
    grammar = await Grammars(load_tokenizer(tmp_path), vocab_size=3, eos_token_ids=frozenset({0})).begin("regex", "az")
    logits = torch.zeros(1, 3)

    Grammar.mask(logits, [(0, grammar)])
    assert logits.tolist() == [[-torch.inf, 0.0, -torch.inf]]
    grammar.accept(1)
    Grammar.mask(logits, [(0, grammar)])
    sequence = RunningSequence(
        rid="r", prompt_ids=(1,), params=SamplingParams(), max_new_tokens=5, stop_token_ids=frozenset(),
        stop_strings=None, grammar=grammar, seed=0, stream_interval=1, emit=lambda sequence, piece: None,
    )  # fmt: skip

    assert sequence.append(2, float("nan"))
    assert sequence.finish_reason is not None
    assert (sequence.finish_reason["type"], sequence.finish_reason["status_code"]) == ("abort", 400)
    assert sequence.output_ids == []
    assert not sequence.is_poisoned
