"""What is exported of a model that sees is loaded by transformers as one, and computes what the trainer does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_async.config.settings import LoraSettings, ModelSettings
from areal_async.rollout.policy.text import load_codec
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.output.export import export_policy
from areal_async.trainer.packing.rows import TrainRow
from areal_async.vision.images import take_image
from areal_async.vision.pixels import patches
from areal_async.vision.spec import FAMILIES, VisionSpec
from tests.unit.trainer.models import engine_of
from tests.unit.trainer.seeing import png
from tools.make_tiny_vision import write_folder

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "tokenizer.json",
)


def _row(folder: Path) -> tuple[TrainRow, VisionSpec]:
    """Return a question with an image, and an answer to learn."""
    codec = load_codec(str(folder))
    assert codec.vision is not None
    image = take_image(png(0, width=130, height=60), codec.vision)
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    prompt = codec.expand(codec.encode(codec.render([{"role": "user", "content": content}])), [image])
    answer = [*codec.encode("noise"), *codec.stop_token_ids]
    mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
    row = TrainRow(
        token_ids=np.array(prompt + answer, np.int32),
        loss_mask=mask,
        behave_logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
        advantage=1.0,
        current_mask=mask,
        images=(image.data,),
    )
    return row, codec.vision


@pytest.mark.parametrize("trainer", [{}, *({"lora": {"rank": 4}, "vision": vision} for vision in ("freeze", "lora"))])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_an_exported_model_that_sees_and_computes_the_same(
    family: str, trainer: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    source = write_folder(tmp_path / "source", family=family)
    row, spec = _row(source)
    engine = engine_of(source, ranks, token_budget=256, **trainer)
    engine.train_step([row], step=1, total_steps=2)
    Engines(actor=engine).save_checkpoint(tmp_path / "1-1", b"")

    export_policy(
        tmp_path / "1-1",
        tmp_path / "exported",
        model=ModelSettings(path=str(source), dtype="float32"),
        lora=LoraSettings.model_validate(trainer.get("lora", {})),
    )

    folder = tmp_path / "exported"
    for name in PROCESSOR_FILES:
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert AutoConfig.from_pretrained(folder).model_type == family
    assert AutoTokenizer.from_pretrained(folder).chat_template
    model, loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loaded[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    (png_of_row,) = row.images
    width, height = take_image(png_of_row, spec).width, take_image(png_of_row, spec).height
    ids = torch.from_numpy(row.token_ids).long()[None]
    with torch.no_grad():
        logits = model(
            ids,
            pixel_values=torch.from_numpy(patches(png_of_row, spec)),
            image_grid_thw=torch.tensor([spec.grid_of(width, height)]),
            mm_token_type_ids=(ids == spec.image_token_id).int(),
        ).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    learned = torch.from_numpy(row.loss_mask)
    (logprobs,) = engine.logprobs([row])
    assert torch.allclose(logprobs[learned], expected[learned[1:]], atol=1e-5)
    assert (
        logprobs[learned] - engine_of(source, ranks, token_budget=256).logprobs([row])[0][learned]
    ).abs().max() > 1e-3
