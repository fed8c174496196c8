"""Models that see: a tower makes of each image what stands in place of the embeddings of its tokens.

The tower runs apart from the language model, once for each image of a row (``packing.images``), and what it makes goes
to all tokens that show it; of Qwen3-VL some also goes into the states behind the first layers (DeepStack). transformers
has both in one call, which takes one image for each that is shown. A tower attends within each image, both ways, and
by torch's own kernel.

Its blocks are sharded as layers are. With tensor parallel all parts hold the whole tower and compute the same with it.

Legend: T tokens of a packed row, I of them showing a part of an image each, M parts of images, H hidden.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_async.config.settings import TrainerSettings
from areal_async.errors import UserError
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
    if not any(one.requires_grad for one in tower.parameters()):
        return  # of a reference
    if trainer.lora.is_on and trainer.vision != "freeze":
        raise UserError(
            f"trainer.vision: got {trainer.vision} with trainer.lora.rank={trainer.lora.rank}, need freeze; adapters "
            "are trained of the language model alone"
        )
    if trainer.vision == "freeze":
        tower.requires_grad_(False)
        for parameter in tower.parameters():
            parameter.data = parameter.data.to(dtype)


def embedded(decoder: Any, token_ids_T: Tensor, images: PackedImages) -> dict[str, Any]:
    """Return what the language model takes in place of the row's tokens."""
    inputs_TH: Tensor = decoder.get_input_embeddings()(token_ids_T)
    device = token_ids_T.device
    made = decoder.base_model.visual(torch.cat(list(images.patches)).to(device), grid_thw=images.grids_N3)
    levels_MH = [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]
    # An embedding adds the gradients of those who share a part up in one order, on a GPU too.
    shown_IH = [F.embedding(images.shown_I, level).to(inputs_TH.dtype) for level in levels_MH]
    given = {"inputs_embeds": inputs_TH.index_copy(0, images.at_I, shown_IH[0])[None]}
    if len(shown_IH) == 1:
        return given
    is_shown_T = torch.zeros_like(token_ids_T, dtype=torch.bool).index_fill(0, images.at_I, True)
    return given | {"visual_pos_masks": is_shown_T[None], "deepstack_visual_embeds": shown_IH[1:]}
