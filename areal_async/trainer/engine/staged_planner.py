"""Saving tensors from copies: DCP plans with the tensors themselves, and writes what was copied of them before.

A module of its own, imported when the first checkpoint is written: DCP takes a while to import.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex


class StagedPlanner(DefaultSavePlanner):
    """Takes shapes and places from the tensors that are saved, and their content from copies of their shards."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        """``copies``: of this rank's part of every tensor, by its name in what is saved."""
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the content that is written for ``index``."""
        return self._copies[index.fqn]
