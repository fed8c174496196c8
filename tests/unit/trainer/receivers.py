"""Servers of a broadcast, played by threads."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from areal_async.inference.weight_group import WeightGroup, WeightGroupError, empty_bucket, unflatten
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import TensorSpec, UpdateGroup

DEADLINE_S = 60.0


def state_of(
    server_id: str,
    *,
    version: str = "1-0",
    incarnation: str = "first",
    reason: str = "",
    unreadable: str = "",
    missed: str = "",
    wants_weights: bool = False,
) -> ServerState:
    """Return what a server says of itself; fenced when there is a reason."""
    return ServerState(
        server_id=server_id,
        node_id="0",
        url="",
        version="" if reason else version,
        incarnation=incarnation,
        fenced=bool(reason),
        reason=reason,
        unreadable=unreadable,
        missed=missed,
        wants_weights=wants_weights,
    )


class Receiver:
    """A member of update groups: it joins a group when that is new to it, and receives bucket after bucket."""

    def __init__(self, server_id: str) -> None:
        self.server_id = server_id
        self.tensors: dict[str, Tensor] = {}
        self._group: WeightGroup | None = None
        self._name = ""
        self._thread: threading.Thread | None = None

    def receive(self, group: UpdateGroup, buckets: Sequence[Sequence[TensorSpec]], *, gone_after: int = 99) -> None:
        """Start to receive; after ``gone_after`` buckets it is gone, with its connections."""
        self._thread = threading.Thread(target=self._receive, args=(group, buckets, gone_after))
        self._thread.start()

    def finish(self) -> dict[str, Tensor]:
        """Return what came, once nothing more will."""
        assert self._thread is not None
        self._thread.join(2 * DEADLINE_S)
        assert not self._thread.is_alive(), f"{self.server_id} hangs"
        return self.tensors

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()

    def _receive(self, group: UpdateGroup, buckets: Sequence[Sequence[TensorSpec]], gone_after: int) -> None:
        self.tensors = {}
        try:
            if group.name != self._name:
                self.leave()
                self._group, self._name = self._join(group), group.name
            assert self._group is not None
            for bucket in buckets[:gone_after]:
                flat = empty_bucket(bucket)
                self._group.broadcast(flat)
                self.tensors.update(unflatten(flat, bucket))
        except WeightGroupError:
            self.leave()
        if gone_after < len(buckets):
            self.leave()

    def _join(self, group: UpdateGroup) -> WeightGroup:
        return WeightGroup.join(
            address=group.address,
            port=group.port,
            rank=group.ranks[self.server_id],
            size=group.size,
            name=group.name,
            backend=group.backend,
            deadline_s=DEADLINE_S,
        )


def are_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Say whether the same tensors have the same bits."""
    return left.keys() == right.keys() and all(
        torch.equal(value.view(torch.uint8), right[name].view(torch.uint8)) for name, value in left.items()
    )
