"""Rank 0's side of the groups over which weights are broadcast to inference servers.

A group is made for one set of servers and kept while they stay the same. Invariants: no broadcast raises, and none
holds up the trainer longer than its deadline: a group that breaks is closed, what is left of its transfer is skipped,
and the servers are left to the copy on disk.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import structlog
import torch
from torch import Tensor

from areal_async.inference.weight_group import NCCL, WeightGroup, WeightGroupError
from areal_async.process import host
from areal_async.process.failpoints import failpoint
from areal_async.process.host import LOOPBACK
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import UpdateGroup

NATS_PORT = 4222

log = structlog.get_logger()


class _Member(NamedTuple):
    incarnation: str
    num_ranks: int


class Broadcaster:
    """Makes the group, sends over it, and gives it up. ``send`` may run in another thread than the rest."""

    def __init__(self, *, prefix: str, address: str, backend: str, deadline_s: float) -> None:
        """``prefix``: what the names of its groups begin with, unique to this trainer."""
        self._prefix = prefix
        self._address = address
        self._backend = backend
        self.deadline_s = deadline_s
        self._num_groups = 0
        self._members: dict[str, _Member] = {}
        self._revisions: dict[str, int] = {}
        self._shunned: dict[str, int] = {}
        """Members of a group that broke -> the revision of their state then: they must speak up to be asked again."""
        self._description: UpdateGroup | None = None
        self._lock = threading.Lock()
        self._group: WeightGroup | None = None
        self._has_met = False
        self._ends_at = 0.0

    @property
    def has_group(self) -> bool:
        """Whether what is sent arrives anywhere."""
        return self._group is not None

    def open(self, servers: Iterable[tuple[ServerState, int]]) -> UpdateGroup | None:
        """Begin a transfer: return the group of all servers that can take a version, None where there are none.

        That is who serves, and who waits for weights that it can load. One that has missed a broadcast of this
        trainer could have the next one missed by all, so it is asked when no other is, and alone.

        Args:
            servers: their states, with the revisions of these.
        """
        able = [
            (state, revision)
            for state, revision in servers
            if _is_present(state) and self._shunned.get(state.server_id) != revision
        ]
        wanted = [one for one in able if not self._has_missed(one[0])]
        wanted = wanted or sorted(able, key=lambda one: one[1])[:1]  # who has not spoken for the longest
        members = {
            state.server_id: _Member(state.incarnation, state.num_ranks)
            for state, _ in sorted(wanted, key=lambda one: one[0].server_id)
        }
        self._ends_at = time.monotonic() + self.deadline_s
        self._revisions = {state.server_id: revision for state, revision in wanted}
        if members != self._members or not self.has_group:
            self.close()
            self._members = members
            self._description = self._host() if members else None
        return self._description

    def send(self, flat: Tensor) -> None:
        """Broadcast one bucket; the first of a group waits for its members. Returns at once without a group.

        Args:
            flat: on any device; beside a step there may be no room for it on the GPU, which breaks the broadcast.
        """
        group = self._group
        if group is None:
            return
        try:
            if not self._has_met:
                group.meet()
                self._has_met = True
            if time.monotonic() > self._ends_at:
                raise WeightGroupError(f"weight group {group.name}: not through within {self.deadline_s:g} s")
            group.broadcast(self._placed(flat))
            failpoint("trainer.during_broadcast")
        except (WeightGroupError, torch.OutOfMemoryError) as exc:
            self.give_up(str(exc))
        if self._group is None:
            group.close()

    def find_lost(self, servers: Mapping[str, ServerState]) -> str:
        """Say which members have left since the transfer began, and why; empty while all are there."""
        for server_id, member in self._members.items():
            now = servers.get(server_id)
            if now is None or now.incarnation != member.incarnation or not _is_present(now):
                reason = now.reason if now is not None and now.fenced else "it was started anew or is gone"
                return f"server {server_id}: {reason}"
        return ""

    def give_up(self, reason: str) -> None:
        """Use the group no more, from any thread and at once; a member that says nothing new is not asked again."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.close_store()
            self._shunned |= self._revisions
            log.warning("broadcast.failed", members=sorted(self._members), reason=reason)

    def close(self) -> None:
        """Leave the group. While nothing is sent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _placed(self, flat: Tensor) -> Tensor:
        return flat.cuda() if self._backend == NCCL else flat

    def _has_missed(self, state: ServerState) -> bool:
        return state.missed.startswith(f"{self._prefix}-")

    def _host(self) -> UpdateGroup | None:
        self._num_groups += 1
        ranks: dict[str, int] = {}
        size = 1
        for server_id, member in self._members.items():
            ranks[server_id] = size
            size += member.num_ranks
        name = f"{self._prefix}-{self._num_groups}"
        try:
            group = WeightGroup.host(
                address=self._address, size=size, name=name, backend=self._backend, deadline_s=self.deadline_s
            )
        except (WeightGroupError, torch.OutOfMemoryError) as exc:
            log.warning("broadcast.failed", members=sorted(ranks), reason=str(exc))
            return None
        self._has_met = False
        self._group = group
        log.info("broadcast.group_made", group=name, members=sorted(ranks), size=size)
        return UpdateGroup(
            name=name, address=self._address, port=group.port, backend=self._backend, size=size, ranks=ranks,
            incarnations={server_id: member.incarnation for server_id, member in self._members.items()},
        )  # fmt: skip


def _is_present(state: ServerState) -> bool:
    return state.wants_weights or bool(state.version and not state.fenced)


def address_towards(url: str) -> str:
    """Return the address of this host under which others who reach ``url`` can reach it."""
    parts = urlsplit(url)
    return host.address_towards(parts.hostname or LOOPBACK, parts.port or NATS_PORT)
