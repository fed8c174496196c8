"""The part of a model that sees, and the embeddings that it gives the language model for images.

Letters: T tokens of this forward pass, I those of them that stand for images, D embedding, K sets of embeddings of an
image: one that takes the place of its tokens, and, in Qwen3-VL, one more for each of the first layers ("deepstack").

Invariant: an image is computed once while requests have it, and again by new weights.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from areal_async.inference.embedded.engine.images import SeenImage


class VisionTower:
    """The tower of one model; belongs to the model thread."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._seen: WeakKeyDictionary[SeenImage, torch.Tensor] = WeakKeyDictionary()
        """Embeddings [K, tokens of the image, D]; of images that a request still has."""

    def inputs(
        self, ids_1T: torch.Tensor, is_image_T: torch.Tensor, images: Sequence[SeenImage]
    ) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Return what the language model takes instead of token ids.

        Args:
            is_image_T: which tokens stand for images; not the ids, of which the model may have sampled any.
            images: of the whole pass, in the order of their tokens.
        """
        self._see([image for image in dict.fromkeys(images) if image not in self._seen])
        embeds_KID = torch.cat([self._seen[image] for image in images], dim=1)
        embeds_1TD = self._model.get_input_embeddings()(ids_1T)
        embeds_1TD[0, is_image_T] = embeds_KID[0].to(embeds_1TD.dtype)
        if len(embeds_KID) == 1:
            return {"inputs_embeds": embeds_1TD}
        return {
            "inputs_embeds": embeds_1TD,
            "visual_pos_masks": is_image_T[None],
            "deepstack_visual_embeds": list(embeds_KID[1:]),
        }

    def _see(self, images: Sequence[SeenImage]) -> None:
        if not images:
            return
        pixels = torch.from_numpy(np.concatenate([image.patches for image in images])).to(self._model.device)
        grids = torch.tensor([image.grid for image in images], device=self._model.device)
        output = self._model.get_image_features(pixels, grids)
        sets = [output.pooler_output, *getattr(output, "deepstack_features", ())]
        for image, *embeds in zip(images, *sets, strict=True):
            self._seen[image] = torch.stack(embeds)

    def forget(self) -> None:
        """Compute every image anew: the weights are others, or the memory is needed."""
        self._seen.clear()
