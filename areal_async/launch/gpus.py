"""Who gets which GPUs."""

from areal_async.errors import UserError


def share_gpus(
    gpus: tuple[str, ...], *, num_inference: int, num_trainer: int, colocates: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the GPUs of the node and those of the trainer: apart, or the first ones for both where it ``colocates``.

    Raises:
        UserError: there are fewer GPUs than they need.
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
    if colocates:
        return gpus[:num_inference], gpus[:num_trainer]
    if num_inference + num_trainer > len(gpus):
        raise UserError(
            f"inference.colocate: got none, with {num_inference} GPUs for servers and {num_trainer} for the trainer, "
            f"of which there are {len(gpus)}, need {num_inference + num_trainer}; set it to release or split to have "
            "both on the same GPUs, or lower inference.num_servers or trainer.num_ranks"
        )
    return gpus[:num_inference], gpus[num_inference : num_inference + num_trainer]
