"""The search finds the document that a query names, and a conversation with it is scored by its last answer."""

import json
from typing import Any

import pytest

from areal_async.config.settings import SamplingSettings
from areal_async.errors import ToolError
from areal_async.protocol.types import Prompt
from areal_async.rollout.policy.policy import RecordingPolicy
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.chat_templates import codec_with
from tools.make_search import DATA, draw_things, questions, write_data
from tools.word_problems import Split
from workflows.search import CORPUS, MAX_QUERY_CHARACTERS, NUM_RESULTS, corpus, look_up, search

pytestmark = pytest.mark.anyio

DOCUMENTS = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("document", DOCUMENTS[::40], ids=lambda document: str(document["title"]))
async def test_document_that_a_query_names_comes_first(document: dict[str, str]) -> None:
    first, *others = (await look_up(f"the {document['title'].lower()}?")).splitlines()

    assert first == f"{document['title']}: {document['text']}"
    assert len(others) == NUM_RESULTS - 1


@pytest.mark.parametrize("query", ["", "the of", "zebra", "\0", "'; --"])
async def test_query_that_fits_nothing_finds_nothing(query: str) -> None:
    assert await look_up(query) == "nothing found"


async def test_endless_query_is_told_so() -> None:
    with pytest.raises(ToolError, match="got 201 characters, need at most 200"):
        await look_up("x" * (MAX_QUERY_CHARACTERS + 1))


def test_shipped_data_is_what_the_tool_writes(tmp_path: Any) -> None:
    write_data(tmp_path, seed=1)

    for name in ("search_corpus.jsonl", "search_train.jsonl", "search_test.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_no_fact_is_asked_for_in_two_splits_and_every_name_is_one_things() -> None:
    things = draw_things(seed=1)
    asked = {split: {one.text for one in questions(things, split)} for split in Split}

    assert len({thing.name for thing in things}) == len(things) == len(corpus()[0])
    assert not asked[Split.TRAIN] & asked[Split.TEST]
    assert not asked[Split.SFT] & (asked[Split.TRAIN] | asked[Split.TEST])


async def test_conversation_is_scored_by_its_last_answer() -> None:
    codec = codec_with("hermes")
    asked = next(questions(draw_things(seed=1), Split.TEST))
    call = json.dumps({"name": "look_up", "arguments": {"query": asked.thing.name}})
    prompt = Prompt(epoch=0, index=0, row={"question": asked.text, "answer": f"#### {asked.answer}"})
    rewards = []
    for said in (f"#### {asked.answer}", "#### 1"):
        texts = [f"<tool_call>{call}</tool_call>", said]
        model = ScriptedModel(*([*codec.encode(text), codec.stop_token_ids[0]] for text in texts))
        policy = RecordingPolicy(model, codec, SamplingSettings(), name="uid")
        rewards.append(await search(prompt, policy))
        told = codec.decode(model.calls[1][0])
        assert f"{asked.thing.name}: {asked.thing.document['text']}" in told
        assert (policy.record.num_tool_errors, policy.record.num_breaks) == (0, 0)

    assert rewards == [1.0, 0.0]
