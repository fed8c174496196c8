"""The shipped calculator task is what the tool makes, and each of its tags is one token."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from areal_async.rollout.tools.parse import parse_reply
from tools.make_tiny_calculator import DATA, MODEL, TAGS, rows, write_data
from tools.word_problems import Split


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def shipped(split: Split) -> list[dict[str, Any]]:
    lines = (DATA / f"calculator_{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_shipped_data_is_what_the_tool_writes(tmp_path: Path) -> None:
    write_data(tmp_path, seed=1)

    for split in Split:
        name = f"calculator_{split}.jsonl"
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_no_question_of_one_split_is_in_another() -> None:
    questions = {split: {row["question"] for row in shipped(split)} for split in (Split.TRAIN, Split.TEST)}
    demonstrated = {row["messages"][0]["content"] for row in shipped(Split.SFT)}

    assert not questions[Split.TRAIN] & questions[Split.TEST]
    assert not demonstrated & (questions[Split.TRAIN] | questions[Split.TEST])


def test_another_seed_asks_other_questions() -> None:
    others = {row["question"] for row in rows(Split.TEST, seed=2)}

    assert len(others & {row["question"] for row in shipped(Split.TEST)}) < len(others) / 2


def test_demonstrations_are_answers_and_calls_good_and_bad() -> None:
    said = [parse_reply(row["answer"], "hermes").calls for row in shipped(Split.SFT) if len(row["messages"]) == 1]
    share_called = sum(bool(calls) for calls in said) / len(said)
    bad = [call for calls in said for call in calls if call.error or call.name != "calculate"]

    assert 0.5 < share_called < 0.6
    assert 0.1 < len(bad) / len(said) < 0.2


def test_each_tag_is_a_token_that_is_written_out(tokenizer: Any) -> None:
    for tag in TAGS:
        (token,) = tokenizer.encode(tag)
        assert tokenizer.decode([token], skip_special_tokens=True) == tag


def test_model_knows_every_token(tokenizer: Any) -> None:
    assert max(tokenizer.get_vocab().values()) < AutoConfig.from_pretrained(MODEL).vocab_size
