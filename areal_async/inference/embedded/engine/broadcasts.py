"""Weights that a trainer broadcasts: the groups this engine is in, and the session that an update is.

Every bucket is served as soon as it is there, so between ``begin`` and the last one the model is of two versions: who
orders an update pauses generation meanwhile, and loads a whole version from disk if the update breaks off.

Invariants: waiting for a broadcast stops neither the model thread nor the process's end; updates from wherever are
applied in the order in which they were asked for; a bucket with a tensor that does not fit is refused whole.
"""

from __future__ import annotations

import structlog
import torch

from areal_async.inference.embedded.engine.errors import WeightsError
from areal_async.inference.embedded.engine.lifecycle import call_in_thread
from areal_async.inference.embedded.engine.service import EngineService, UpdateResult
from areal_async.inference.embedded.engine.weights import StagedWeights, stage_tensors
from areal_async.inference.weight_group import WeightGroup, WeightGroupError, empty_bucket, unflatten
from areal_async.protocol.types import TensorSpec

log = structlog.get_logger()

_DEADLINE_S = 1800.0
"""Deadline of every wait for the trainer, as in SGLang. A caller has a shorter one, and ends the process."""
_NO_SESSION = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
_MIXED = "Earlier buckets are served already: load a whole version from disk."


class Broadcasts:
    """What an engine knows of its trainers' broadcasts."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._groups: dict[str, WeightGroup | None] = {}
        """Groups by name; None while one is being joined."""
        self._is_open = False

    async def join(self, name: str, *, address: str, port: int, rank: int, size: int, backend: str) -> None:
        """Become a rank of a group, when all of its ranks are there.

        Raises:
            WeightsError: the name is in use, or the group did not come together.
        """
        if name in self._groups:
            raise WeightsError(f"group {name}: the name is in use; choose another, or destroy that group")
        self._groups[name] = None
        try:
            self._groups[name] = await call_in_thread(
                lambda: WeightGroup.join(
                    address=address,
                    port=port,
                    rank=rank,
                    size=size,
                    name=name,
                    backend=backend,
                    deadline_s=_DEADLINE_S,
                ),
                expected=(WeightGroupError,),
            )
        except WeightGroupError as exc:
            log.warning("weight_group.refused", group=name, reason=str(exc))
            raise WeightsError(str(exc)) from exc
        finally:
            if self._groups[name] is None:
                del self._groups[name]
        log.info("weight_group.joined", group=name, rank=rank, size=size)

    async def leave(self, name: str) -> bool:
        """Leave a group; return whether there was one."""
        async with self._service.administration:
            group = self._groups.get(name)
            if group is None:
                return False
            del self._groups[name]
            await call_in_thread(group.close)  # which frees its connections, and waits for them
        log.info("weight_group.left", group=name)
        return True

    async def begin(self) -> bool:
        """Open a session; return False when one is open."""
        async with self._service.administration:
            was_open, self._is_open = self._is_open, True
            return not was_open

    async def end(self) -> bool:
        """Close the session; return False when none is open."""
        async with self._service.administration:
            was_open, self._is_open = self._is_open, False
            return was_open

    async def update(
        self,
        group_name: str,
        specs: list[TensorSpec],
        *,
        is_flattened: bool,
        weight_version: str | None,
        flush_cache: bool,
        abort_all_requests: bool,
    ) -> UpdateResult:
        """Receive tensors, in one broadcast or one each, and serve them."""
        buckets = [specs] if is_flattened else [[spec] for spec in specs]

        async def stage() -> StagedWeights:
            if not self._is_open:
                raise WeightsError(_NO_SESSION)
            return await call_in_thread(lambda: self._receive(group_name, buckets), expected=(WeightsError,))

        try:
            return await self._service.update_weights(
                stage,
                weight_version,
                flush_cache=flush_cache,
                abort_all_requests=abort_all_requests,
                done="Succeeded to update parameter online.",
            )
        except WeightsError as exc:
            log.warning("weights.refused", group=group_name, reason=str(exc))
            return UpdateResult(False, str(exc))

    def _receive(self, group_name: str, buckets: list[list[TensorSpec]]) -> StagedWeights:
        tensors: list[tuple[str, torch.Tensor]] = []
        try:
            group = self._groups.get(group_name)
            if group is None:
                raise WeightGroupError(f"got group {group_name!r}, need one of {sorted(self._groups)}; join it first")
            for specs in buckets:
                flat = empty_bucket(specs, self._service.runner.device)
                group.broadcast(flat)
                tensors += unflatten(flat, specs)
        except (WeightGroupError, ValueError) as exc:
            raise WeightsError(f"Failed to receive weights: {exc}") from exc
        try:
            return stage_tensors(self._service.runner.model, tensors)
        except WeightsError as exc:
            raise WeightsError(f"Failed to update parameter online: {exc}. {_MIXED}") from exc
