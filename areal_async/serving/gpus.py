"""Which GPUs the fleets of arms take, and whether a fleet more has some of its own: ``serve.replace``.

Fleets take them from the first one on; ``CUDA_VISIBLE_DEVICES`` says which one that is.
"""

from collections.abc import Sequence

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.process.host import visible_gpus


def starts_beside(settings: Settings, *, num_arms: int) -> bool:
    """Say whether servers of a new version start beside those of the old one: ``serve.replace``.

    Raises:
        UserError: there are GPUs, and not enough for the arms.
    """
    replace, need, gpus = settings.serve.replace, settings.inference.num_gpus, visible_gpus()
    if replace != "auto" or not gpus:
        return replace != "in_place"
    if len(gpus) < num_arms * need:
        raise UserError(
            f"serve: got {len(gpus)} GPUs, need {num_arms * need}, {need} for each arm; lower inference.num_servers or "
            "tensor_parallel, or set serve.replace to say that fleets share GPUs"
        )
    return len(gpus) >= (num_arms + 1) * need


def gpus_taken(settings: Settings, *, num_arms: int) -> Sequence[str]:
    """Return the GPUs that fleets are going to have, sooner or later.

    Raises:
        UserError: as ``starts_beside``.
    """
    return visible_gpus()[: _num_needed(settings, num_arms)]


def sharing(settings: Settings, *, num_arms: int) -> str:
    """Return what is to be known before fleets share GPUs, as ``serve.replace`` has been set to; empty where none do.

    Raises:
        UserError: as ``starts_beside``.
    """
    gpus, needed = visible_gpus(), _num_needed(settings, num_arms)
    if not gpus or len(gpus) >= needed:
        return ""
    return (
        f"serve.replace={settings.serve.replace}: fleets share GPUs, {len(gpus)} where they need {needed} to have "
        "their own; servers that find no memory do not start: have each take less (inference.flags)"
    )


def _num_needed(settings: Settings, num_arms: int) -> int:
    return (num_arms + starts_beside(settings, num_arms=num_arms)) * settings.inference.num_gpus
