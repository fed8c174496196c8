"""The control: the counting workflow with noise in the place of each image.

A run with it must stay at chance; if it did not, something else than the image would tell the number.

    python -m areal_async run tools/blind_clevr_count.py --config configs/clevr_count_cpu.yaml --run.name blind
"""

import numpy as np
import PIL.Image
from msgspec.structs import replace

from areal_async import Policy, Prompt
from workflows.clevr_count import clevr_count


async def blind_clevr_count(prompt: Prompt, policy: Policy) -> float:
    """Count the things in one image without having seen it; all siblings are shown the same noise."""
    image = prompt["images"][0]
    pixels = np.random.default_rng(prompt.index).integers(0, 256, (image.height, image.width, 3), dtype=np.uint8)
    return await clevr_count(replace(prompt, row={**prompt.row, "images": [PIL.Image.fromarray(pixels)]}), policy)
