"""How many things are in an image, which the model may look at more closely: a tool returns a part of it, enlarged."""

from typing import Any

from areal_async import Policy, Prompt, ToolError
from rewards.count import count_matches

PLACEHOLDER = "<image>"
"""Stands in the rows' question for the image, which is a part of its own here."""
LEAST_SIDE = 4
"""Smallest side of a part that is cut out, in pixels."""
MOST_TIMES = 4
"""How much a part is enlarged at most."""
MAX_TURNS = 4
HINT = "Zoom in where you are not sure."


async def clevr_zoom(prompt: Prompt, policy: Policy) -> float:
    """Answer one question about an image with a magnifying glass at hand; 1.0 when the number is right."""
    (shown,) = prompt["images"]
    image = shown.open()

    def zoom(left: int, top: int, right: int, bottom: int) -> Any:
        """Look at a part of the image more closely.

        Args:
            left: where the part begins, in thousandths of the image's width.
            top: where it begins, in thousandths of the image's height.
            right: where it ends, in thousandths of the width.
            bottom: where it ends, in thousandths of the height.
        """
        return enlarged(image, (left, top, right, bottom))

    question = f"{prompt['problem'].replace(PLACEHOLDER, '').strip()} {HINT}"
    parts = [{"type": "image", "image": shown}, {"type": "text", "text": question}]
    done = await policy.act([{"role": "user", "content": parts}], [zoom], max_turns=MAX_TURNS)
    return count_matches(done.text, prompt["answer"]) if done.is_finished else 0.0


def enlarged(image: Any, box: tuple[int, int, int, int]) -> Any:
    """Return a part of an image of Pillow's, so large that its longer side is that of the whole, if at most fourfold.

    Args:
        box: left, top, right and bottom, in thousandths of the image's sides.

    Raises:
        ToolError: it is no part of the image, or too small to see anything.
    """
    left, top, right, bottom = box
    if not (0 <= left < right <= 1000 and 0 <= top < bottom <= 1000):
        raise ToolError(f"got {left}, {top}, {right}, {bottom}, need 0 <= left < right <= 1000, and top and bottom so")
    corners = [round(at * side / 1000) for at, side in zip(box, (image.width, image.height) * 2, strict=True)]
    part = image.crop(corners)
    if min(part.size) < LEAST_SIDE:
        raise ToolError(f"got a part of {part.width} x {part.height} pixels, need {LEAST_SIDE} x {LEAST_SIDE} at least")
    times = min(MOST_TIMES, max(image.size) / max(part.size))
    return part.resize([round(times * side) for side in part.size])
