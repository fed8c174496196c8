"""Put a reward together from parts, each with its weight, and tell what every part was worth.

    parts = {
        "right": (1.0, final_number_matches(reply.text, prompt["answer"])),
        "short": (0.2, overlong_penalty(len(reply.token_ids), limit=1024, slack=256)),
    }
    return await weighted(parts, info=info)

Parts run beside each other. One that fails fails the whole, as the error that it is; the others are then cancelled.
"""

import inspect
import math
import numbers
from collections.abc import Awaitable, Mapping, MutableMapping

import anyio

from areal_async.errors import RewardError, leaves_of

Part = float | Awaitable[float]


async def weighted(parts: Mapping[str, tuple[float, Part]], *, info: MutableMapping[str, float] | None = None) -> float:
    """Return the sum of weight times value over all parts.

    Args:
        parts: name -> (weight, value or what to await for it).
        info: gets ``reward_<name>``, the value before its weight, for every part.

    Raises:
        RewardError: a part failed, or came to no finite number.
        ValueError: there is no part, or a weight is no finite number.
    """
    if not parts or not all(math.isfinite(weight) for weight, _ in parts.values()):
        for _, part in parts.values():
            _forget(part)
        raise ValueError(f"parts: got {list(parts)}, need at least one, each with a finite weight")
    values: dict[str, float] = {}

    async def find(name: str, part: Part) -> None:
        value = await part if inspect.isawaitable(part) else part
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise RewardError(f"reward part {name}: got {value!r:.100}, need a finite number")
        values[name] = float(value)

    try:
        async with anyio.create_task_group() as tasks:
            for name, (_, part) in parts.items():
                tasks.start_soon(find, name, part)
    except ExceptionGroup as errors:
        raise leaves_of(errors)[0] from errors
    if info is not None:
        info.update({f"reward_{name}": values[name] for name in parts})
    return math.fsum(weight * values[name] for name, (weight, _) in parts.items())


def _forget(part: Part) -> None:
    if inspect.iscoroutine(part):
        part.close()
