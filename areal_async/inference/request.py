"""What a completion asks of a server, in SGLang's words, and how much of it a new stream can go on from. Pure.

A server that is sent what another one has said takes it for a prompt. It looks for no stop string in it, counts no
penalty over it and begins a grammar behind it. Invariant: an answer that took several streams is one that a single
stream could have given.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from areal_async.config.policy import GRAMMARS
from areal_async.errors import GenerationError
from areal_async.protocol.types import ImageRef
from areal_async.vision.images import Image
from areal_async.vision.rows import collapse
from areal_async.vision.spec import VisionSpec

NO_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
BESIDE = "top_logprobs_num"
"""Field of a request that SGLang has beside the sampling parameters."""


def is_steered(params: Mapping[str, Any]) -> bool:
    """Say whether tokens are drawn from another distribution than the model's own at their temperature.

    The logprobs that a server reports are of that other one then. (What ``top_p``, ``top_k`` and ``min_p`` cut away
    is in no server's logprobs: ``SamplingSettings.truncation``.)
    """
    return (
        _has_grammar(params) or _has_penalty(params) or bool(params.get("logit_bias") or params.get("min_new_tokens"))
    )


def num_held_back(params: Mapping[str, Any]) -> int:
    """Return how many of the newest tokens a new stream has to say again, at the most.

    All of them where what comes next depends on all: a grammar, a penalty, a seed. Those that may be the beginning of a
    stop string where there is one: a token writes at least one byte.
    """
    if _has_grammar(params) or _has_penalty(params) or params.get("sampling_seed") is not None:
        return int(params["max_new_tokens"])
    stop = params.get("stop") or ()
    return max((len(text.encode()) - 1 for text in ([stop] if isinstance(stop, str) else stop)), default=0)


def request_fields(params: Mapping[str, Any], *, num_kept: int) -> dict[str, Any]:
    """Return what a stream is asked for that goes on from ``num_kept`` tokens."""
    sampling = {name: value for name, value in params.items() if name != BESIDE}
    sampling["max_new_tokens"] = params["max_new_tokens"] - num_kept
    if "min_new_tokens" in params:
        sampling["min_new_tokens"] = min(max(0, params["min_new_tokens"] - num_kept), sampling["max_new_tokens"])
    fields: dict[str, Any] = {"sampling_params": sampling}
    if params.get(BESIDE):
        fields[BESIDE] = params[BESIDE]
    return fields


def collapsed_ids(prompt_ids: list[int], num_images: int, vision: VisionSpec | None) -> list[int]:
    """Return a prompt as servers take it: one placeholder for each image.

    SGLang 0.5.23 waits for ever for placeholders without images, and ends a request about images with status 500 where
    there is one of a video too or, for Qwen2.5-VL, where the last token is the mark that stands before an image.

    Args:
        vision: of a model that sees; ``None`` for one that reads text alone.

    Raises:
        GenerationError: its images are more or fewer than its placeholders, or it has such a token beside them.
    """
    if vision is None or (not num_images and vision.image_token_id not in prompt_ids):
        if num_images:
            raise GenerationError(f"prompt: got {num_images} images for a model that sees none, need text alone")
        return prompt_ids
    try:
        sent_ids = collapse(prompt_ids, vision)
    except ValueError as exc:
        raise GenerationError(f"prompt: {exc}") from exc
    num_placeholders = sent_ids.count(vision.image_token_id)
    if num_placeholders != num_images:
        raise GenerationError(
            f"prompt: got {num_images} images and placeholders for {num_placeholders} (token {vision.image_token_id}), "
            "need one for each; give images as parts of messages"
        )
    if vision.video_token_id in sent_ids or sent_ids[-1] == vision.vision_start_token_id:
        raise GenerationError(
            f"prompt: got the placeholder of a video (token {vision.video_token_id}) beside images, or the mark before "
            f"an image ({vision.vision_start_token_id}) at the end, need neither; take them out of the text"
        )
    return sent_ids


def ref_of(image: Image) -> ImageRef:
    """Return what a turn has of an image that it saw."""
    return ImageRef(sha256=image.sha256, num_bytes=len(image.data), width=image.width, height=image.height)


def image_data(images: Sequence[Image]) -> msgspec.Raw:
    """Return what a request has of its images, in JSON: their bytes as they are, in ``data:`` URLs."""
    urls = [f"data:image/png;base64,{b64encode(image.data).decode()}" for image in images]
    return msgspec.Raw(msgspec.json.encode(urls))


def check_token_ids(params: Mapping[str, Any], vocab_size: int) -> None:
    """Refuse token ids that no server may be sent, as one outside the vocabulary ends a real SGLang process.

    Raises:
        GenerationError: there is one.
    """
    for name in ("logit_bias", "stop_token_ids"):
        foreign = [id for id in params.get(name) or () if not 0 <= int(id) < vocab_size]
        if foreign:
            raise GenerationError(
                f"{name}: refused: got token id {foreign[0]}, need 0 to {vocab_size - 1}: "
                f"the model's vocabulary has {vocab_size}"
            )


def _has_grammar(params: Mapping[str, Any]) -> bool:
    return any(params.get(name) for name in GRAMMARS)


def _has_penalty(params: Mapping[str, Any]) -> bool:
    return any(params.get(name, neutral) != neutral for name, neutral in NO_PENALTIES.items())
