"""The versions on a trajectory's tokens: what is wrong with them, and how many tokens carry each. Pure."""

from collections.abc import Sequence as Seq

import numpy as np

from areal_async.protocol.types import NOT_SAMPLED, Sequence, Version


def count_versions(sequences: Seq[Sequence]) -> dict[int, int]:
    """Return how many sampled tokens carry each packed version; those without one are not counted."""
    counts: dict[int, int] = {}
    for columns in sequences:
        carried = columns.versions[columns.versions != NOT_SAMPLED]
        for packed, count in zip(*np.unique(carried, return_counts=True), strict=True):
            counts[int(packed)] = counts.get(int(packed), 0) + int(count)
    return counts


def find_faults(sequences: Seq[Sequence], *, oldest: str, newest: str) -> tuple[str, ...]:
    """Say where a version is missing, superfluous, or outside the range that the slot's header claims.

    What is damaged may have columns of several lengths.
    """
    faults: list[str] = []
    for number, columns in enumerate(sequences):
        lengths = {len(column) for column in (columns.token_ids, columns.loss_mask, columns.logprobs, columns.versions)}
        if len(lengths) > 1:
            faults.append(f"sequence {number}: got columns of {sorted(lengths)} entries, need one length")
            continue
        is_sampled, has_version = columns.loss_mask.astype(bool), columns.versions != NOT_SAMPLED
        for count, what in (
            (np.count_nonzero(is_sampled & ~has_version), "sampled tokens without a version"),
            (np.count_nonzero(has_version & ~is_sampled), "tokens with a version that were not sampled"),
            (np.count_nonzero(~np.isfinite(columns.logprobs[is_sampled])), "sampled tokens without a logprob"),
        ):
            if count:
                faults.append(f"sequence {number}: {count} {what}")
    carried = [Version.unpack(packed) for packed in count_versions(sequences)]
    if carried and not (Version.parse(oldest) <= min(carried) and max(carried) <= Version.parse(newest)):
        faults.append(f"versions {min(carried)} to {max(carried)}, its header says {oldest} to {newest}")
    return tuple(faults)
