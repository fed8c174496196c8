"""Whether trainer and servers fit onto the GPUs that they share, and what that leaves to a server.

Estimates, as in ``memory``. Where they take turns (``release``), the trainer's peak meets a server without its cache,
and the server's cache a trainer between two steps.
"""

from collections.abc import Iterator

from areal_async.config.settings import Settings
from areal_async.doctor.preflight.findings import PreflightFinding, gigabytes, good
from areal_async.doctor.preflight.inputs import check_models
from areal_async.doctor.preflight.machine import Gpu, look_at_machine
from areal_async.doctor.preflight.memory import ModelSize, bytes_of_rank
from areal_async.errors import UserError
from areal_async.inference.card_share import MARGIN, SPARE_BYTES, CardShare

CHECK = "memory of shared GPUs"


def share_of_run(settings: Settings) -> CardShare | None:
    """Return what a server of this run may take of the GPUs here; None where it shares none with the trainer.

    Raises:
        UserError: both do not fit, or the model cannot be looked at.
    """
    if settings.inference.colocate is None or not (gpus := look_at_machine().gpus):
        return None
    findings, sizes = check_models(settings)
    if "actor" not in sizes:
        raise UserError("; ".join(f"{one.saw}; {one.cure}" for one in findings if one.cure))
    return share_of(settings, gpus, sizes)[0]


def check_sharing(settings: Settings, gpus: tuple[Gpu, ...], sizes: dict[str, ModelSize]) -> Iterator[PreflightFinding]:
    """Judge the sum of both sides on each GPU, where they share them."""
    if settings.inference.colocate is None or not gpus:
        return
    share, both = share_of(settings, gpus, sizes)
    yield good(CHECK, f"{both}: a server has {share.fraction:.0%}, room for {share.cache_tokens:,} cached tokens")


def share_of(settings: Settings, gpus: tuple[Gpu, ...], sizes: dict[str, ModelSize]) -> tuple[CardShare, str]:
    """Return a server's share, and what each side takes, in words.

    Raises:
        UserError: both do not fit, with both figures.
    """
    served, trainer, size, dtype = settings.inference, settings.trainer, sizes["actor"], settings.model.dtype
    there = min(gpu.memory_bytes for gpu in gpus)
    per_token = size.cache_bytes_per_token(dtype=dtype) // served.tensor_parallel or 1
    longest = served.context_length or size.context or settings.rollout.sampling.max_new_tokens
    weights = size.weights_bytes(dtype=dtype) // served.tensor_parallel + SPARE_BYTES
    peak = bytes_of_rank(settings, sizes, offloads=trainer.cpu_offload)
    resting = peak
    if served.colocate == "release":
        between = settings.model_copy(update={"trainer": trainer.model_copy(update={"token_budget": 0})})
        resting = bytes_of_rank(between, sizes, offloads=trainer.cpu_offload)
    cache = int(there * MARGIN) - resting - weights
    both = (
        f"{gigabytes(peak)} for a rank and {gigabytes(weights)} for a server without its cache, of {gigabytes(there)} "
        f"on the smallest GPU ({gpus[0].name})"
    )
    if peak + weights > there * MARGIN:
        raise UserError(
            f"{CHECK}: got about {both}, need {MARGIN:.0%} of it at most; lower trainer.token_budget, or set "
            "trainer.activation_checkpointing or trainer.cpu_offload"
        )
    if cache < longest * per_token:
        least = f"{gigabytes(longest * per_token)} for the cache of one request of {longest:,} tokens"
        raise UserError(
            f"{CHECK}: got about {both}, which leaves {gigabytes(max(cache, 0))}, need {least}; lower "
            "inference.context_length or trainer.token_budget"
            + ("" if served.colocate == "release" else ", or set inference.colocate=release")
        )
    fraction = (cache + weights - SPARE_BYTES) / there
    return CardShare(fraction=fraction, cache_tokens=cache // per_token), both
