"""Each question's program says its answer when the sandbox runs it; a conversation is scored by its last answer."""

import itertools
import json
import random
from pathlib import Path

import pytest

from areal_async.config.settings import SamplingSettings
from areal_async.protocol.types import Prompt
from areal_async.rollout.policy.policy import RecordingPolicy
from areal_async.sandbox import python
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.chat_templates import codec_with
from tools.make_python_tool import DATA, KINDS, questions, write_data
from tools.word_problems import Split
from workflows.python_tool import python_tool

pytestmark = pytest.mark.anyio

ASKED = list(itertools.islice(questions(Split.TEST, random.Random(1)), len(KINDS)))


@pytest.fixture
def anyio_backend() -> str:
    """One loop: the sandbox starts for each."""
    return "asyncio"


async def test_program_of_each_kind_of_question_prints_its_answer() -> None:
    for asked in ASKED:
        assert await python(asked.program) == str(asked.answer), asked


async def test_conversation_is_scored_by_its_last_answer() -> None:
    codec = codec_with("hermes")
    asked = ASKED[0]
    call = json.dumps({"name": "python", "arguments": {"code": asked.program}})
    prompt = Prompt(epoch=0, index=0, row={"question": asked.text, "answer": f"#### {asked.answer}"})
    rewards = []
    for said in (f"#### {asked.answer}", f"#### {asked.answer + 1}"):
        texts = [f"<tool_call>{call}</tool_call>", said]
        model = ScriptedModel(*([*codec.encode(text), codec.stop_token_ids[0]] for text in texts))
        policy = RecordingPolicy(model, codec, SamplingSettings(), name="uid")
        rewards.append(await python_tool(prompt, policy))
        assert (policy.record.num_tool_calls, policy.record.num_tool_errors) == (1, 0)

    assert rewards == [1.0, 0.0]


def test_shipped_data_is_what_the_tool_writes(tmp_path: Path) -> None:
    write_data(tmp_path, seed=1)

    for name in ("python_tool_train.jsonl", "python_tool_test.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_no_program_answers_questions_of_two_splits() -> None:
    programs = {
        split: {one.program for one in itertools.islice(questions(split, random.Random(2)), 2000)} for split in Split
    }

    assert not programs[Split.TRAIN] & programs[Split.TEST]
    assert not programs[Split.SFT] & (programs[Split.TRAIN] | programs[Split.TEST])
