"""Models that see: a tower makes of each image what stands in place of the embeddings of its tokens.

The tower runs apart from the language model, once for each image of a row (``packing.images``), and what it makes goes
to all tokens that show it; of Qwen3-VL some also goes into the states behind the first layers (DeepStack). transformers
has both in one call, which takes one image for each that is shown. All that follows from the sizes of images is made
in host memory and sent along (``tower_attention``): a row waits for no GPU.

Its blocks are sharded as layers are. With tensor parallel all parts hold the whole tower and compute the same with it.

Legend: T tokens of a packed row, I of them showing a part of an image each, M parts of images, H hidden.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_async.config.settings import TrainerSettings
from areal_async.errors import UserError
from areal_async.trainer.engine.tower_attention import segments_of
from areal_async.trainer.packing.rows import PackedImages
from areal_async.vision.spec import FAMILIES

STORED_PREFIXES = {"qwen2_5_vl": {"model.language_model.": "model.", "model.visual.": "visual."}}
"""Model type -> how names begin in transformers' modules -> in the folders that its makers publish, which transformers
writes too and servers read; the others' are the same."""


def sees(config: Any) -> bool:
    """Say whether a model of this configuration is one whose images are understood here."""
    return config.model_type in FAMILIES


def vision_tower(decoder: Any) -> nn.Module | None:
    """Return the tower of a model that sees; None of one that does not, or is cut into stages."""
    return getattr(getattr(decoder, "base_model", None), "visual", None)


def stored_name(name: str, config: Any) -> str:
    """Return what a Hugging Face folder, and so a server, calls a parameter."""
    for prefix, stored in STORED_PREFIXES.get(config.model_type, {}).items():
        if name.startswith(prefix):
            return stored + name.removeprefix(prefix)
    return name


def prepare_tower(decoder: Any, trainer: TrainerSettings, dtype: torch.dtype) -> None:
    """Leave of the tower's parameters those to be trained that the settings want. On the meta device.

    Args:
        dtype: of what is frozen.

    Raises:
        UserError: the settings are not for a model that sees.
    """
    tower = vision_tower(decoder)
    if tower is None:
        return
    if trainer.pipeline_parallel > 1:
        raise UserError(
            f"trainer.pipeline_parallel: got {trainer.pipeline_parallel} for a {decoder.config.model_type}, need 1 for "
            "a model that sees; shard it (num_ranks), or use tensor_parallel"
        )
    if hasattr(decoder.base_model.language_model, "_deepstack_process"):
        decoder.base_model.language_model._deepstack_process = _add_deepstack
    if not any(one.requires_grad for one in tower.parameters()):
        return  # of a reference
    if trainer.lora.is_on and trainer.vision == "train":
        raise UserError(
            f"trainer.vision: got train with trainer.lora.rank={trainer.lora.rank}, need freeze or lora; set it to "
            "lora for adapters in the tower too, or to freeze"
        )
    if trainer.vision != "train":
        tower.requires_grad_(False)
        for parameter in tower.parameters():
            parameter.data = parameter.data.to(dtype)


def embedded(decoder: Any, token_ids_T: Tensor, images: PackedImages) -> dict[str, Any]:
    """Return what the language model takes in place of the row's tokens."""
    inputs_TH: Tensor = decoder.get_input_embeddings()(token_ids_T)
    device = token_ids_T.device
    tower = decoder.base_model.visual
    made = tower(
        _sent(torch.cat(list(images.patches)), device),
        grid_thw=images.grids_N3,
        **_laid_out(tower, images.grids_N3, device),
    )
    levels_MH = [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]
    # An embedding adds the gradients of those who share a part up in one order, on a GPU too.
    shown_IH = [F.embedding(images.shown_I, level).to(inputs_TH.dtype) for level in levels_MH]
    given = {"inputs_embeds": inputs_TH.index_copy(0, images.at_I, shown_IH[0])[None]}
    if len(shown_IH) == 1:
        return given
    return given | {"visual_pos_masks": images.at_I, "deepstack_visual_embeds": shown_IH[1:]}


def _laid_out(tower: Any, grids_N3: Tensor, device: torch.device) -> dict[str, Any]:
    """Return what a tower would make of the sizes of images, by transformers' own functions on the CPU."""
    from transformers import vision_utils

    config = tower.config
    images = segments_of(vision_utils.get_vision_cu_seqlens(grids_N3), device)
    positions = vision_utils.get_vision_position_ids(grids_N3, config.spatial_merge_size)
    given: dict[str, Any] = {
        "position_ids": _sent(positions, device),
        "cu_seqlens": images,
        "max_seqlen": max(images.lengths),
    }
    if hasattr(tower, "window_size"):
        index, bounds = vision_utils.get_vision_window_index(
            grids_N3, config.spatial_merge_size, config.window_size, config.patch_size
        )
        windows = segments_of(bounds, device)
        given |= {
            "window_index": _sent(index, device),
            "cu_window_seqlens": windows,
            "max_window_seqlen": max(windows.lengths),
        }
    if hasattr(tower, "pos_embed"):
        taps, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids_N3, num_grid_per_side=tower.num_grid_per_side, mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners, spatial_merge_size=config.spatial_merge_size,
        )  # fmt: skip
        given |= {"interp_indices": _sent(taps, device), "interp_weights": _sent(weights, device)}
    return given


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, which the host does not wait for."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def _add_deepstack(hidden_1TH: Tensor, at_I: Tensor, shown_IH: Tensor) -> Tensor:
    """Add to the states of the tokens that show. transformers finds them by a mask, for which the host would wait."""
    return hidden_1TH.index_add(1, at_I, shown_IH[None])
