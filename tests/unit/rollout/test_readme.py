"""The group workflow of the README does what the README says."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from areal_async import Reject
from areal_async.api import is_group_workflow
from areal_async.config.settings import SamplingSettings
from areal_async.protocol.types import Prompt
from areal_async.rollout.policy.policy import RecordingPolicy
from tests.unit.rollout.byte_model import END, ScriptedModel, codec

pytestmark = pytest.mark.anyio

README = Path(__file__).parents[3] / "areal_async" / "rollout" / "README.md"


def example() -> Any:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = [block for block in blocks if "@group_workflow" in block]
    module = ModuleType("example")
    exec(compile(code, str(README), "exec"), module.__dict__)
    return module.shortest


async def test_comparative_rewards_rank_the_right_answers_by_their_length() -> None:
    said = [b"it is 42", b"42", b"no idea", b"42 42 42"]
    policies: list[RecordingPolicy] = [
        RecordingPolicy(
            ScriptedModel([*text, END], finish_reason="length" if text == said[3] else "stop"),
            codec(),
            SamplingSettings(),
            name=str(number),
        )
        for number, text in enumerate(said)
    ]
    workflow = example()

    outcomes = await workflow(Prompt(epoch=0, index=0, row={"question": "?", "answer": "42"}), policies)

    assert is_group_workflow(workflow)
    assert [outcome for outcome in outcomes if not isinstance(outcome, Reject)] == [pytest.approx(2 / 3), 1.0, 0.0]
    assert isinstance(outcomes[3], Reject)
