"""The control: the counting workflow with its rewards dealt out to the wrong trajectories (`tools/shuffled_gsm8k.py`).

python -m areal_async run tools/shuffled_clevr_count.py --config configs/clevr_count_cpu.yaml --run.name control
"""

from areal_async import Policy, Prompt
from tools.shuffled_gsm8k import somebody_elses
from workflows.clevr_count import clevr_count


async def shuffled_clevr_count(prompt: Prompt, policy: Policy) -> float:
    """Count the things in one image; return somebody else's reward."""
    return somebody_elses(await clevr_count(prompt, policy))
