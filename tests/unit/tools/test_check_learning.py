"""What must not learn is caught when it does: with rewards of others, and with noise in the place of images."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from areal_async.config.settings import SamplingSettings
from areal_async.config.sources import load_settings
from areal_async.inference.request import ref_of
from areal_async.protocol.types import Prompt
from areal_async.rollout.policy.policy import RecordingPolicy
from areal_async.vision.images import take_image
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.seeing import picture, seeing_codec, vision
from tools import shuffled_gsm8k
from tools.blind_clevr_count import blind_clevr_count
from tools.check_learning import CLEVR_COUNT, GSM8K, JOBS, Result, report
from tools.make_tiny_gsm8k import REPOSITORY
from tools.shuffled_clevr_count import shuffled_clevr_count

RUN = Result(name="one", first=0.4, last=0.9, before=0.43, after=0.95, staleness_max=2, num_steps=40, duration_s=90.0)
STILL = replace(RUN, after=0.44)
BLIND = replace(RUN, before=0.1, after=0.12)
IMAGE = take_image(picture("red", 64, 96), vision())


async def play(workflow: Any, *, index: int = 0, said: str = "3") -> tuple[float, RecordingPolicy]:
    codec = seeing_codec()
    model = ScriptedModel([*codec.encode(said), codec.stop_token_ids[0]])
    policy = RecordingPolicy(model, codec, SamplingSettings(), name="uid")
    row = {"images": [IMAGE], "problem": "How many?", "answer": "3"}
    return await workflow(Prompt(epoch=0, index=index, row=row), policy), policy


@pytest.mark.anyio
async def test_blind_siblings_are_shown_the_same_noise_in_the_size_of_the_image() -> None:
    shown = [(await play(blind_clevr_count, index=index))[1].turns[0].images for index in (0, 0, 1)]

    assert shown[0] == shown[1]
    assert shown[1] != shown[2]
    assert ref_of(IMAGE) not in [*shown[0], *shown[2]]
    (image,) = (await play(blind_clevr_count))[1].record.images.values()
    assert (image.width, image.height) == (64, 96)
    assert len(PIL.Image.Image.getcolors(image.open(), 2**16) or []) > 1000


@pytest.mark.anyio
async def test_shuffled_rewards_are_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffled_gsm8k, "_earned", earned := [0.0] * shuffled_gsm8k.POOL)

    dealt = [(await play(shuffled_clevr_count))[0] for _ in range(8)]

    assert sum(dealt) < 8, "each has earned one"
    assert sum(dealt) + sum(earned) == 8


@pytest.mark.parametrize(
    ("results", "control", "blind", "is_well"),
    [
        ([RUN, RUN], STILL, BLIND, True),
        ([RUN], None, None, True),
        ([RUN, replace(RUN, after=0.67)], STILL, BLIND, False),
        ([RUN], replace(RUN, after=0.47), BLIND, False),
        ([RUN], STILL, replace(BLIND, after=0.2), False),
    ],
)
def test_a_gain_that_is_too_small_or_that_must_not_be_is_told(
    results: list[Result], control: Result | None, blind: Result | None, is_well: bool
) -> None:
    assert report(results, control, job=CLEVR_COUNT, blind=blind) is is_well


def test_word_problems_need_not_gain_as_much() -> None:
    assert report([replace(RUN, after=0.6)], None, job=GSM8K)
    assert not report([replace(RUN, after=0.6)], None, job=CLEVR_COUNT)


@pytest.mark.parametrize("name", JOBS)
def test_files_of_a_job_are_there_and_fit_together(name: str) -> None:
    job = JOBS[name]
    settings = load_settings(REPOSITORY / job.config)

    assert [task.workflow for task in settings.tasks] == [job.workflow]
    assert (REPOSITORY / settings.model.path).resolve() == job.model
    for workflow in (job.control, job.blind):
        assert workflow is None or f"def {Path(workflow).stem}(" in (REPOSITORY / workflow).read_text(encoding="utf-8")
