"""The tiny model that counts was shown what its workflows show, no picture of a run, and told wrong numbers too."""

import itertools
import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from areal_async.rollout.tools.parse import parse_reply
from tools import make_tiny_counter
from tools.make_clevr_count import MOST_ITEMS, QUESTION, pictures
from tools.make_search import DATA
from tools.make_tiny_counter import FEW, MODEL, Lesson, accuracy, lesson, pupils_number
from tools.word_problems import Split
from workflows.clevr_zoom import HINT

NUM_LESSONS = 100
IMAGE = {"type": "image"}


def lessons(seed: int = 1) -> list[Lesson]:
    rng, drawn = random.Random(seed), pictures(Split.SFT, seed)
    return [lesson(one, rng, has_zoom=True) for one in itertools.islice(drawn, NUM_LESSONS)]


def written(one: Lesson) -> str:
    return "".join(text.text for text in one.texts)


def test_no_picture_of_a_run_is_ever_shown() -> None:
    shown = {one.images[0].tobytes() for one in lessons()}
    for split in ("train", "test"):
        rows = datasets.Dataset.from_parquet(str(DATA / f"clevr_count_{split}.parquet"), keep_in_memory=True)

        assert not shown & {np.asarray(row["images"][0].convert("RGB")).tobytes() for row in rows}


def test_lessons_are_written_as_the_chat_template_writes_them() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    looks = [one for one in lessons() if len(one.images) == 2]
    assert 0.3 < len(looks) / NUM_LESSONS < 0.7
    for one in looks:
        (call,) = parse_reply(one.texts[1].text.removesuffix("<|im_end|>"), "hermes").calls
        assert call.name == "zoom"
        assert not call.error
        assert set(call.arguments) == {"left", "top", "right", "bottom"}
        messages = [
            {"role": "user", "content": [IMAGE, {"type": "text", "text": f"{QUESTION} {HINT}"}]},
            {"role": "assistant", "content": one.texts[1].text.removesuffix("<|im_end|>")},
            {"role": "tool", "content": [IMAGE]},
            {"role": "assistant", "content": one.texts[3].text.removesuffix("<|im_end|>")},
        ]

        assert tokenizer.apply_chat_template(messages, tokenize=False) == written(one) + "\n"


def test_a_call_is_written_by_the_template_as_in_lessons() -> None:
    """A client may send it back taken apart."""
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    arguments = {"left": 0, "top": 500, "right": 500, "bottom": 1000}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "zoom", "arguments": arguments}}],
    }

    text = tokenizer.apply_chat_template([called], tokenize=False)

    assert text == f"<|im_start|>assistant\n{make_tiny_counter.call(**arguments)}<|im_end|>\n"


def test_same_seed_gives_the_same_lessons() -> None:
    assert [written(one) for one in lessons()] == [written(one) for one in lessons()]
    assert [written(one) for one in lessons()] != [written(one) for one in lessons(2)]


@pytest.mark.parametrize(("num_items", "least", "most"), [(1, 0.5, 0.66), (FEW, 0.5, 0.66), (MOST_ITEMS, 0.24, 0.48)])
def test_a_pupil_is_wrong_more_often_about_many_things(num_items: int, least: float, most: float) -> None:
    rng = random.Random(1)

    said = [pupils_number(num_items, rng) for _ in range(1000)]

    assert least < said.count(num_items) / len(said) < most
    assert set(said) <= {0, num_items - 1, num_items, min(num_items + 1, MOST_ITEMS)}
    assert (said.count(0) > said.count(num_items)) == (num_items > FEW)


def test_same_seed_teaches_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tiny_counter, "NUM_STEPS", 2)
    monkeypatch.setattr(make_tiny_counter, "BATCHES", {False: 4, True: 2})
    monkeypatch.setattr(make_tiny_counter, "UNTRAINED", tmp_path / "untrained")
    made = []
    for number in range(2):
        monkeypatch.setattr(make_tiny_counter, "MODEL", tmp_path / f"taught-{number}")
        make_tiny_counter.make(seed=1)
        made.append({file.name: file.read_bytes() for file in (tmp_path / f"taught-{number}").iterdir()})

    assert made[0] == made[1]
    assert made[0]["model.safetensors"] != (tmp_path / "untrained" / "model.safetensors").read_bytes()


def test_the_model_that_ships_counts_and_often_fails() -> None:
    assert 0.3 < accuracy(MODEL, 128, temperature=0.0) < 0.6
    assert 0.3 < accuracy(MODEL, 128, temperature=1.0) < 0.6
