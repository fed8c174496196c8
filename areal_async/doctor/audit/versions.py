"""The versions on a trajectory's tokens: what is wrong with them, and how many tokens carry each. Pure."""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_async.protocol.types import NOT_SAMPLED, Version

Array = NDArray[Any]


class Columns(NamedTuple):
    """One sequence. All arrays [L], unless they are damaged."""

    token_ids: Array
    loss_mask: Array
    logprobs: Array
    versions: Array


def count_versions(sequences: Seq[Columns]) -> dict[int, int]:
    """Return how many sampled tokens carry each packed version; those without one are not counted."""
    counts: dict[int, int] = {}
    for columns in sequences:
        carried = columns.versions[columns.versions != NOT_SAMPLED]
        for packed, count in zip(*np.unique(carried, return_counts=True), strict=True):
            counts[int(packed)] = counts.get(int(packed), 0) + int(count)
    return counts


def find_faults(sequences: Seq[Columns], *, oldest: str, newest: str) -> tuple[str, ...]:
    """Say where a version is missing, superfluous, or outside the range that the slot's header claims."""
    faults: list[str] = []
    for number, columns in enumerate(sequences):
        lengths = {len(column) for column in columns}
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
