"""Who gets which GPUs."""

from areal_async.errors import UserError


def share_gpus(
    gpus: tuple[str, ...], *, num_inference: int, num_trainer: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the GPUs of the node and those of the trainer: apart where there are enough, else both see all.

    Raises:
        UserError: there are fewer GPUs than either side needs for itself.
    """
    if not gpus:
        return (), ()
    if num_trainer > len(gpus):
        raise UserError(
            f"trainer.num_ranks: got {num_trainer}, need at most {len(gpus)}, one per GPU; "
            "lower it, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    if num_inference > len(gpus):
        raise UserError(
            "inference.num_servers x inference.tensor_parallel, and those of frozen policies: "
            f"got {num_inference} GPUs, need at most {len(gpus)}; "
            "lower one of them, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    if num_inference + num_trainer > len(gpus):
        return gpus, gpus
    return gpus[:num_inference], gpus[num_inference : num_inference + num_trainer]
