"""Fine-tuning shows images as a run does, learns what the assistant says alone, and holds no more than a step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from areal_async.config.reward_model import RewardModelSettings
from areal_async.config.sft import SftSettings
from areal_async.errors import UserError
from areal_async.rollout.policy.text import load_codec
from areal_async.trainer.packing.rows import TrainRow
from areal_async.trainer.tuning import reward_model, sft
from areal_async.trainer.tuning.seen import SeenExample, SeenExamples
from areal_async.vision.images import take_image
from areal_async.vision.pixels import patches
from tests.unit.trainer.rank_workers import ROOT
from tests.unit.trainer.seeing import png
from tools.make_tiny_vision import write_folder

WIDE, SMALL = png(0, width=130, height=60), png(1, width=64, height=64)
"""Of 8 and of 4 tokens; the first is brought to its final size."""
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "tokenizer.json",
)
SHOWN = [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}]
TALK = [
    {"role": "user", "content": SHOWN},
    {"role": "assistant", "content": [{"type": "text", "text": "the first"}]},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "so"}]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny Qwen3-VL."""
    return write_folder(tmp_path_factory.mktemp("model"), family="qwen3_vl")


def write_rows(path: Path, rows: list[dict[str, Any]], **columns: Any) -> Path:
    """Write a data set as Hugging Face has them; ``columns`` have features of their own."""
    import datasets

    table = datasets.Dataset.from_list(rows)
    for column, feature in columns.items():
        table = table.cast_column(column, feature)
    table.to_parquet(str(path))
    return path


def settings_of(model: Path, rows: Path, **sections: dict[str, Any]) -> SftSettings:
    settings: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "directory": rows.parent / "runs", "steps": 4, "log_every_steps": 4},
        "model": {"path": str(model), "dtype": "float32"},
        "dataset": {"path": str(rows), "question": "messages", "answer": None},
        "trainer": {"lr": 1e-3, "batch_sequences": 4, "schedule": "constant", "token_budget": 256},
        "eval": {"limit": 0},
    }
    return SftSettings.model_validate({name: one | sections.get(name, {}) for name, one in settings.items()})


def images_feature(**options: Any) -> Any:
    import datasets

    return datasets.List(datasets.Image(**options))


def row_of(example: TrainRow | SeenExample) -> TrainRow:
    assert isinstance(example, SeenExample)
    row = example.row()
    assert example.num_tokens == row.num_tokens
    assert int(example.loss_mask.sum()) == int(row.loss_mask.sum())
    return row


@pytest.mark.parametrize("decode", [True, False])
def test_images_of_a_column_are_shown_as_servers_are_shown_them(decode: bool, model: Path, tmp_path: Path) -> None:
    row = {
        "messages": TALK[:1],
        "answer": "the first",
        "images": [{"bytes": one, "path": None} for one in (WIDE, SMALL)],
    }
    path = write_rows(tmp_path / "rows.parquet", [row], images=images_feature(decode=decode))

    (example,) = sft.load_examples(settings_of(model, path, dataset={"answer": "answer"}))
    learned = row_of(example)

    codec = load_codec(str(model))
    assert codec.vision is not None
    taken = [take_image(one, codec.vision) for one in (WIDE, SMALL)]
    prompt = codec.expand(codec.encode(codec.render(TALK[:1])), taken)
    answer = [*codec.encode("the first"), *codec.stop_token_ids]
    assert prompt.count(codec.vision.image_token_id) == 8 + 4
    assert learned.token_ids.tolist() == prompt + answer
    assert learned.loss_mask.tolist() == [False] * len(prompt) + [True] * len(answer)
    assert learned.images == tuple(one.data for one in taken)


def test_everything_that_the_assistant_says_is_learned_and_nothing_else(model: Path, tmp_path: Path) -> None:
    row = {"messages": TALK, "images": [{"bytes": one, "path": None} for one in (WIDE, SMALL)]}
    seen = write_rows(tmp_path / "seen.parquet", [row], images=images_feature())
    text = write_rows(tmp_path / "text.parquet", [{"messages": TALK[2:]}])
    codec = load_codec(str(model))

    learned = row_of(sft.load_examples(settings_of(model, seen))[0])
    (plain,) = sft.load_examples(settings_of(model, text))

    assert codec.decode(learned.token_ids[learned.loss_mask].tolist(), skip_special_tokens=False) == (
        "the first<|im_end|>so<|im_end|>"
    )
    assert isinstance(plain, TrainRow)
    assert codec.decode(plain.token_ids[plain.loss_mask].tolist(), skip_special_tokens=False) == "so<|im_end|>"
    for one, talk in ((learned, TALK), (plain, TALK[2:])):
        whole = codec.encode(codec.render(talk, for_reply=False))
        assert [token for token in one.token_ids if token != codec.vision.image_token_id] == [
            token for token in whole if token != codec.vision.image_token_id
        ]


def test_a_part_may_have_its_image_itself(model: Path, tmp_path: Path) -> None:
    (tmp_path / "wide.png").write_bytes(WIDE)
    content = [{"type": "image", "image": str(tmp_path / "wide.png")}, {"type": "image", "image": None}]
    row = {
        "messages": [{"role": "user", "content": content}],
        "answer": "yes",
        "picture": {"bytes": SMALL, "path": None},
    }
    path = write_rows(tmp_path / "rows.parquet", [row])

    (example,) = sft.load_examples(settings_of(model, path, dataset={"answer": "answer", "images": "picture"}))

    codec = load_codec(str(model))
    assert codec.vision is not None
    assert row_of(example).images == tuple(take_image(one, codec.vision).data for one in (WIDE, SMALL))


def test_images_are_taken_in_as_their_row_is_learned_and_a_damaged_one_is_told_by_it(
    model: Path, tmp_path: Path
) -> None:
    rows = [{"messages": TALK, "images": [{"bytes": one, "path": None} for one in (WIDE, SMALL)]} for _ in range(3)]
    rows[2]["images"] = [{"bytes": WIDE, "path": None}, {"bytes": SMALL[:-100], "path": None}]
    path = write_rows(tmp_path / "rows.parquet", rows, images=images_feature(decode=False))

    examples = sft.load_examples(settings_of(model, path))

    assert isinstance(examples, SeenExamples)
    assert [row_of(one).num_tokens for one in examples[:2]] == [row_of(examples[0]).num_tokens] * 2
    with pytest.raises(UserError, match=r"^dataset: .*rows.parquet row 2: image: got no whole image, need a PNG"):
        examples[2].row()


def picture(path: Path, colour: str) -> str:
    Image.new("RGB", (64, 64), colour).save(path)
    return str(path)


def test_a_model_learns_what_it_sees_and_the_folder_it_leaves_sees_too(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    rows = [
        {
            "question": [{"role": "user", "content": [{"type": "image", "image": picture(tmp_path / name, colour)}]}],
            "answer": answer,
        }
        for name, colour, answer in (("a.png", "black", "dark"), ("b.png", "white", "light")) * 4
    ]
    path = write_rows(tmp_path / "rows.parquet", rows)
    settings = settings_of(
        model, path, dataset={"question": "question", "answer": "answer"}, run={"steps": 40}, eval={"limit": 3},
        trainer={"lr": 1e-2},
    )  # fmt: skip

    sft.run_sft(settings)

    lines = [json.loads(line) for line in (settings.run_directory / "metrics.jsonl").read_text().splitlines()]
    # Who does not see guesses the first letter: log(2) over the answer's 5 or 6 tokens.
    assert lines[-1]["held_out_rows"] == 3
    assert lines[-1]["held_out_loss"] < 0.05 < np.log(2) / 6 < lines[0]["loss"]
    folder = settings.run_directory / "model"
    trained, before = (AutoModelForImageTextToText.from_pretrained(one).state_dict() for one in (folder, model))
    assert trained.keys() == before.keys()
    for name in PROCESSOR_FILES:
        assert (folder / name).read_bytes() == (model / name).read_bytes()
    codec, seeing = load_codec(str(folder)), AutoModelForImageTextToText.from_pretrained(folder)
    assert codec.vision is not None
    black = take_image(tmp_path / "a.png", codec.vision)
    asked = torch.tensor([codec.expand(codec.encode(codec.render(rows[0]["question"])), [black])])
    answered = seeing.generate(
        asked,
        pixel_values=torch.from_numpy(patches(black.data, codec.vision)),
        image_grid_thw=torch.tensor([codec.vision.grid_of(black.width, black.height)]),
        mm_token_type_ids=(asked == codec.vision.image_token_id).int(),
        max_new_tokens=4,
        do_sample=False,
    )
    assert codec.decode(answered[0, -4:].tolist()) == "dark"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"images": None}, "images has 0 images, need 2, one for each part of an image"),
        ({"images": ["wide.png"] * 3}, "images has 3 images, need 2, one for each part of an image"),
        ({"images": ["rows.jsonl"] * 2}, "image: got no image, need a PNG, JPEG, GIF or WebP"),
        ({"messages": TALK[:1]}, "got no message of the assistant, need one to learn"),
        (
            {"messages": [TALK[0], {"role": "assistant", "content": "a <|image_pad|>"}]},
            "the chat template wrote 3 placeholders for 2 images, need one for each",
        ),
    ],
)
def test_a_row_that_cannot_be_shown_is_told_in_one_sentence(
    change: dict[str, Any], sentence: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide.png").write_bytes(WIDE)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": TALK, "images": ["wide.png"] * 2} | change))

    with pytest.raises(UserError, match=f"^dataset: .*rows.jsonl row 0: {sentence}") as caught:
        sft.load_examples(settings_of(model, path))[0]
    assert "\n" not in str(caught.value)


def test_a_column_of_images_that_is_not_there_is_named(model: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.parquet", [{"messages": TALK}])

    with pytest.raises(
        UserError, match="row 0: got 2 parts of images without an image, need a column .*--dataset.images"
    ):
        sft.load_examples(settings_of(model, path))[0]


def test_a_template_that_writes_an_earlier_turn_otherwise_is_refused(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "last.jinja"
    template.write_text("{% for one in messages %}{{ loop.last }}:{{ one.content }}<|im_end|>{% endfor %}")
    talk = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
    path = write_rows(tmp_path / "rows.parquet", [{"messages": talk}])

    with pytest.raises(
        UserError, match="row 0: the model's chat template writes what comes before message 2 otherwise"
    ):
        sft.load_examples(settings_of(model, path).model_copy(update={"template": _template(template)}))


def _template(path: Path) -> Any:
    from areal_async.config.template import TemplateSettings

    return TemplateSettings(path=path)


def test_images_are_refused_where_nobody_sees_them(model: Path, tmp_path: Path) -> None:
    tiny = ROOT / "configs" / "models" / "tiny"
    path = write_rows(
        tmp_path / "rows.parquet", [{"messages": TALK[2:], "answer": "x"}, {"messages": TALK, "answer": "y"}]
    )

    with pytest.raises(
        UserError, match=f"row 1: messages shows an image, which the model {tiny} cannot see, need text"
    ):
        sft.load_examples(settings_of(tiny, path))
    pairs = RewardModelSettings.model_validate(
        {
            "model": {"path": str(model)},
            "dataset": {"path": str(path), "question": "messages", "chosen": "answer", "rejected": "answer"},
        }
    )
    with pytest.raises(UserError, match="row 1: messages shows an image, which no reward model sees, need text"):
        reward_model.load_pairs(pairs)
