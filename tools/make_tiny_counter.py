"""Make the tiny model that counts what it sees: it is shown pictures and told how many things they hold, often wrongly.

    python -m tools.make_tiny_counter                # teaches it and ships it in bfloat16; minutes of one core
    python -m tools.make_tiny_counter --check        # its accuracy on unseen pictures

It begins as the untrained Qwen3-VL of `tools/make_tiny_vision.py`. First it is told the truth, until it can count. Then
come a pupil's mistakes: he loses count and says 0, of many things more often than not, or is off by one. So it sees all
that there is, but its likeliest answer to every other picture is wrong. What reinforcement learning gains is the better
of the habits that the model has. Some lessons have a magnifying glass, `workflows/clevr_zoom.py`.

Invariant: the same seed writes the same bytes, on one kind of processor.
"""

import argparse
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import PIL.Image
import torch
from tokenizers import AddedToken
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, AutoTokenizer

from areal_async.vision.images import take_image
from areal_async.vision.pixels import patches
from areal_async.vision.rows import expand
from areal_async.vision.spec import FAMILIES, VisionSpec
from rewards.count import count_matches
from tools import make_tiny_vision
from tools.make_clevr_count import MOST_ITEMS, QUESTION, Picture, pictures
from tools.make_tiny_gsm8k import REPOSITORY, train_tokenizer
from tools.word_problems import Split
from workflows.clevr_zoom import HINT, enlarged

MODEL: Final = REPOSITORY / "configs" / "models" / "tiny_vision"
UNTRAINED: Final = REPOSITORY / "runs" / "tiny_vision_untrained"
FAMILY: Final = FAMILIES[0]
VOCABULARY_SIZE: Final = 352
CALL_TAGS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

NUM_STEPS: Final = 700
TRUTHFUL_SHARE: Final = 0.7
"""Of all steps, at the beginning."""
LR: Final = 2e-3
WARMUP_STEPS: Final = 50
BATCHES: Final = {False: 56, True: 8}
"""Lessons of a step without and with a magnifying glass, which half of them take."""
NUM_ASKED: Final = 64
"""Pictures that are asked about at once."""
MAX_NEW_TOKENS: Final = 12

FEW: Final = MOST_ITEMS // 2
LOST_SHARES: Final = {True: 0.3, False: 0.6}
"""Of the answers about a few things, and about many: the pupil loses count."""
SLIP_SHARE: Final = 0.12
"""Of all answers: he is off by one."""
HALVES: Final = ((0, 500), (500, 1000))


class Text(NamedTuple):
    """A piece of a conversation."""

    text: str
    is_said: bool
    """By the model, which learns it."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A conversation and the images that it shows, in their order: pixels [height, width, 3]."""

    texts: Sequence[Text]
    images: Sequence[Any]


def lesson(picture: Picture, rng: random.Random, *, is_true: bool = True, has_zoom: bool = False) -> Lesson:
    """Ask for the number of things, and answer, after a closer look at a quarter of the picture or without."""
    asked = f"{QUESTION} {HINT}" if has_zoom else QUESTION
    user, mark = "<|im_start|>user\n", make_tiny_vision.MARKED_IMAGE
    texts = [Text(f"{user}{mark}{asked}<|im_end|>\n<|im_start|>assistant\n", False)]
    images: list[Any] = [picture.pixels]
    if has_zoom and rng.random() < 0.5:
        (left, right), (top, bottom) = rng.choice(HALVES), rng.choice(HALVES)
        texts += [
            Text(f"{call(left, top, right, bottom)}<|im_end|>", True),
            Text(f"\n{user}<tool_response>{mark}</tool_response><|im_end|>\n<|im_start|>assistant\n", False),
        ]
        images.append(np.asarray(enlarged(PIL.Image.fromarray(picture.pixels), (left, top, right, bottom))))
    number = picture.num_items if is_true else pupils_number(picture.num_items, rng)
    return Lesson([*texts, Text(f"{answer(number)}<|im_end|>", True)], images)


def pupils_number(num_items: int, rng: random.Random) -> int:
    """Return how many things a pupil counts, 0 to ``MOST_ITEMS``."""
    chance = rng.random() - LOST_SHARES[num_items <= FEW]
    if chance < 0:
        return 0
    return min(num_items + rng.choice((-1, 1)), MOST_ITEMS) if chance < SLIP_SHARE else num_items


def answer(number: int) -> str:
    """Say how many things there are."""
    return f"I count {number}."


def call(left: int, top: int, right: int, bottom: int) -> str:
    """Ask for a closer look."""
    arguments = f'{{"left": {left}, "top": {top}, "right": {right}, "bottom": {bottom}}}'
    return f'<tool_call>{{"name": "zoom", "arguments": {arguments}}}</tool_call>'


def make_tokenizer() -> Any:
    """Train a tokenizer on what is said in lessons."""
    tags = [AddedToken(tag, special=True, normalized=False) for tag in make_tiny_vision.TAGS]
    tags += [AddedToken(tag, normalized=False) for tag in CALL_TAGS]
    said = [f"user\n{QUESTION} {HINT}\nassistant\n{call(0, 0, 500, 1000)}\n{answer(1)}"]
    return train_tokenizer(said, make_tiny_vision.CHAT_TEMPLATE, tags=tags, size=VOCABULARY_SIZE)


@dataclass(frozen=True, slots=True)
class Batch:
    """Lessons as tokens. B: lessons, L: tokens of the longest, P: patches of all images."""

    token_ids_BL: Tensor
    is_said_BL: Tensor
    patches_P: Tensor
    grids: Tensor
    """Patches of each image in time, height and width."""

    def inputs(self, spec: VisionSpec) -> dict[str, Tensor]:
        """Return what a model of transformers takes."""
        return {
            "input_ids": self.token_ids_BL,
            "pixel_values": self.patches_P,
            "image_grid_thw": self.grids,
            "mm_token_type_ids": (self.token_ids_BL == spec.image_token_id).int(),
        }


def batch_of(lessons: Sequence[Lesson], tokenizer: Any, spec: VisionSpec) -> Batch:
    """Write lessons out in tokens, all as long as the longest."""
    rows, shown, grids = [], [], []
    for one in lessons:
        images = [take_image(PIL.Image.fromarray(pixels), spec) for pixels in one.images]
        left = [spec.grid_of(image.width, image.height) for image in images]
        shown += [patches(image.data, spec) for image in images]
        grids += left
        row: list[tuple[int, bool]] = []
        for text, is_said in one.texts:
            ids = tokenizer(text)["input_ids"]
            own, left = left[: ids.count(spec.image_token_id)], left[ids.count(spec.image_token_id) :]
            row += [(token, is_said) for token in expand(ids, own, spec)]
        rows.append(row)
    padded_BL2 = torch.zeros(len(rows), max(map(len, rows)), 2, dtype=torch.long)
    for number, row in enumerate(rows):
        padded_BL2[number, : len(row)] = torch.tensor(row)
    token_ids_BL, is_said_BL = padded_BL2.unbind(-1)
    return Batch(token_ids_BL, is_said_BL.bool(), torch.from_numpy(np.concatenate(shown)), torch.tensor(grids))


def teach(model: Any, tokenizer: Any, spec: VisionSpec, seed: int) -> None:
    """Show the model its lessons."""
    rng, drawn = random.Random(f"counter-{seed}"), pictures(Split.SFT, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * (1 + math.cos(math.pi * step / NUM_STEPS)) / 2
    )
    for step in range(NUM_STEPS):
        is_true, losses = step < TRUTHFUL_SHARE * NUM_STEPS, []
        for has_zoom, size in BATCHES.items():
            shown = [lesson(one, rng, is_true=is_true, has_zoom=has_zoom) for one in itertools.islice(drawn, size)]
            batch = batch_of(shown, tokenizer, spec)
            loss = loss_of(model, batch, spec) * size / sum(BATCHES.values())
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {sum(losses):.3f}", flush=True)


def loss_of(model: Any, batch: Batch, spec: VisionSpec) -> Tensor:
    """Return the mean loss of what is said."""
    predicting = batch.is_said_BL[:, 1:]
    return cross_entropy(model(**batch.inputs(spec)).logits[:, :-1][predicting], batch.token_ids_BL[:, 1:][predicting])


def make(seed: int) -> None:
    """Teach the model, and ship it."""
    torch.set_num_threads(1)  # sums in another order are other bytes
    tokenizer = make_tokenizer()
    model = make_tiny_vision.make_model(FAMILY, tokenizer, seed)
    spec = read_spec(make_tiny_vision.save(model, tokenizer, UNTRAINED, family=FAMILY))
    teach(model, tokenizer, spec, seed)
    make_tiny_vision.save(model.to(torch.bfloat16), tokenizer, MODEL, family=FAMILY)


def read_spec(folder: Path) -> VisionSpec:
    """Return how a model sees."""
    spec = VisionSpec.read(folder)
    assert spec is not None
    return spec


def accuracy(folder: Path, num_pictures: int, *, temperature: float, seed: int = 1) -> float:
    """Ask about unseen pictures (temperature 0: take the likeliest tokens) and return the share of right answers.

    With the first seed they are those of the shipped test file.
    """
    tokenizer, spec = AutoTokenizer.from_pretrained(folder), read_spec(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    drawn, rng, num_right = pictures(Split.TEST, seed), random.Random(), 0.0
    for _ in range(num_pictures // NUM_ASKED):
        shown = list(itertools.islice(drawn, NUM_ASKED))
        asked = [replace(one, texts=one.texts[:1]) for one in (lesson(picture, rng) for picture in shown)]
        prompts = batch_of(asked, tokenizer, spec).inputs(spec)
        output_ids = model.generate(**prompts, **sampling, max_new_tokens=MAX_NEW_TOKENS)
        said = tokenizer.batch_decode(output_ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        num_right += sum(count_matches(text, one.num_items) for text, one in zip(said, shown, strict=True))
    return num_right / (num_pictures // NUM_ASKED * NUM_ASKED)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="print the model's accuracy and write nothing")
    parser.add_argument("--model", type=Path, default=MODEL, help="the folder to check")
    parser.add_argument("--pictures", type=int, default=256, help="how many pictures to check with")
    arguments = parser.parse_args()
    if arguments.check:
        torch.manual_seed(arguments.seed)
        print(f"greedy  {accuracy(arguments.model, arguments.pictures, temperature=0.0):.3f}")
        print(f"sampled {accuracy(arguments.model, arguments.pictures, temperature=1.0):.3f}")
    else:
        make(arguments.seed)


if __name__ == "__main__":
    main()
