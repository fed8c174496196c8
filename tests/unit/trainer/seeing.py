"""Models that see, of a few thousand parameters, rows that show them images, and what transformers makes of those."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from areal_async.errors import UserError
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.rows import TrainRow
from areal_async.vision.pixels import patches
from areal_async.vision.spec import Grid, VisionSpec
from tests.unit.trainer.models import engine_of

SEEING = ("qwen3_vl", "qwen2_5_vl")
VOCAB, TEXT_TOKENS = 64, 60
IMAGE, VIDEO, START, END = range(TEXT_TOKENS, VOCAB)
PATCH, MERGE = 4, 2
TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "qwen2_5_vl": {"fullatt_block_indexes": [1], "window_size": 16},
}


def save_seeing_model(directory: Path, family: str, *, tied: bool = True, tower: dict[str, Any] | None = None) -> Path:
    """Write a random model that sees, and how it takes images.

    Args:
        tower: of ``vision_config``, what is to be otherwise.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    text = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": PATCH,
        "temporal_patch_size": 2, "spatial_merge_size": MERGE, "out_hidden_size": 32, "initializer_range": 0.2,
        **TOWERS[family], **(tower or {}),
    }  # fmt: skip
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=vision, tie_word_embeddings=tied, image_token_id=IMAGE,
        video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():  # none is 0 or 1, as those of norms begin
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.2)
    model.save_pretrained(directory)
    processor = {
        "patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.4, 0.3], "min_pixels": 64, "max_pixels": 4096,
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def png(seed: int, *, width: int = 16, height: int = 24) -> bytes:
    """Return an image of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def size_of(image: bytes) -> tuple[int, int]:
    """Return width and height."""
    from PIL import Image

    return Image.open(io.BytesIO(image)).size


def seeing_row(images: Sequence[bytes], *, index: int, length: int = 5) -> TrainRow:
    """Return a row of these images with text before, between and behind them, the last of which is trained."""
    random = np.random.default_rng(index)
    token_ids = [int(random.integers(2, TEXT_TOKENS))]
    for image in images:
        width, height = size_of(image)
        token_ids += [START, *[IMAGE] * (width * height // (PATCH * MERGE) ** 2), END]
    token_ids += random.integers(2, TEXT_TOKENS, length).tolist()
    size = len(token_ids)
    mask = np.arange(size) >= size - length
    return TrainRow(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=mask,
        behave_logprobs=random.normal(-4.1, 0.3, size).astype(np.float32),
        advantage=float(random.normal()),
        current_mask=mask,
        images=tuple(images),
        index=index,
    )


def seeing_rows() -> list[TrainRow]:
    """Return rows of 0, 1 and 3 images, of which some show the same ones."""
    shared, wide, small = png(0), png(1, width=32, height=16), png(2, width=8, height=8)
    shown = [[], [shared], [wide, shared, small], [shared], [], [small, png(3), png(4)]]
    return [seeing_row(images, index=index) for index, images in enumerate(shown)]


def given_images(row: TrainRow, spec: VisionSpec) -> dict[str, Any]:
    """Return what transformers takes beside a row's tokens."""
    if not row.images:
        return {}
    grids = [Grid(1, height // PATCH, width // PATCH) for width, height in map(size_of, row.images)]
    return {
        "pixel_values": torch.from_numpy(np.concatenate([patches(one, spec) for one in row.images])),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": torch.from_numpy(row.token_ids == IMAGE).int()[None],
    }


def transformers_logprobs(model: Any, row: TrainRow, spec: VisionSpec) -> torch.Tensor:
    """Return the logprobs of a row's trained tokens by transformers, which is given it alone and places it itself."""
    ids = torch.from_numpy(row.token_ids).long()[None]
    log_probs = F.log_softmax(model(input_ids=ids, **given_images(row, spec)).logits[0], dim=-1)
    logprobs: torch.Tensor = F.pad(log_probs[:-1].gather(1, ids[0, 1:, None])[:, 0], (1, 0))
    return logprobs[torch.from_numpy(row.loss_mask)]


def policy_loss(model: Any, rows: Sequence[TrainRow], spec: VisionSpec) -> torch.Tensor:
    """Return the loss of these rows by a model of transformers, which is given them one by one."""
    num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
    loss = torch.zeros(())
    for row in rows:
        logprobs = transformers_logprobs(model, row, spec)
        behave = torch.from_numpy(row.behave_logprobs)[torch.from_numpy(row.loss_mask)]
        weight = (logprobs.detach() - behave).exp().clamp(max=5.0)
        loss = loss - (weight * (logprobs - logprobs.detach()).exp() * row.advantage).sum() / num_tokens
    return loss


def transformers_gradients(folder: Path, rows: Sequence[TrainRow]) -> dict[str, NDArray[Any]]:
    """Return the gradient of every parameter, by its name in the folder, of the loss of these rows one by one."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    spec = VisionSpec.read(folder)
    assert spec is not None
    policy_loss(model, rows, spec).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return stored_parameters(model)


def stored_parameters(model: Any) -> dict[str, NDArray[Any]]:
    """Return a transformers model's parameters by their names in a folder."""
    from tempfile import TemporaryDirectory

    from safetensors.numpy import load_file

    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded: dict[str, NDArray[Any]] = load_file(Path(folder) / "model.safetensors")
        return loaded


def check_gradients(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Make sure that the gradients are the expected ones, to 1e-5 of each parameter's largest."""
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.abs(got[name] - gradient).max() < 1e-5 * max(1.0, np.abs(gradient).max()), name


def gradients_of(
    ranks: Ranks,
    folder: Path,
    rows_of_ranks: Sequence[Sequence[TrainRow]],
    trainer: dict[str, Any],
    *,
    dtype: str = "float32",
) -> dict[str, NDArray[Any]]:
    """Return the gradients of an update on rank 0, and nothing on the others.

    Args:
        rows_of_ranks: of each data-parallel rank.
    """
    engine = engine_of(folder, ranks, dtype=dtype, **{"max_grad_norm": 1e9, **trainer})
    seen: dict[str, NDArray[Any]] = {}
    engine.watch_gradients(lambda whole: seen.update({name: one.numpy() for name, one in whole.items()}))
    engine.train_step(rows_of_ranks[engine.dims.data.rank], step=1, total_steps=1)
    return seen


def refusal_of(ranks: Ranks, folder: Path, trainer: dict[str, Any]) -> str:
    """Return why a model is not loaded with these settings; empty where it is."""
    try:
        engine_of(folder, ranks, **trainer)
    except UserError as exc:
        return str(exc)
    return ""
