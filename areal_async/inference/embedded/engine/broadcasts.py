"""Weights that a trainer broadcasts: the groups this engine is in, and the session that an update is.

Every bucket is served as soon as it is there, so between ``begin`` and the last one the model is of two versions: who
orders an update pauses generation meanwhile, and loads a whole version from disk if the update breaks off.

Invariants: waiting for a broadcast stops neither the model thread nor the process's end; updates from wherever are
applied in the order in which they were asked for; a bucket with a tensor that does not fit is refused whole.
"""

from typing import Literal

import msgspec
import structlog
import torch

from areal_async.inference.embedded.engine.errors import RequestError, WeightsError
from areal_async.inference.embedded.engine.lifecycle import call_in_thread
from areal_async.inference.embedded.engine.service import EngineService, WeightsUpdate
from areal_async.inference.embedded.engine.weights import StagedWeights, stage_tensors
from areal_async.inference.weight_group import WeightGroup, WeightGroupError, empty_bucket, unflatten
from areal_async.protocol.types import TensorSpec

log = structlog.get_logger()

_DEADLINE_S = 1800.0
"""Deadline of every wait for the trainer, as in SGLang. A caller has a shorter one, and ends the process."""
_NO_SESSION = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
_MIXED = "Earlier buckets are served already: load a whole version from disk."


_DEFAULT_GROUP = "weight_update_group"
_Selector = Literal["target", "all"]
"""Which models are meant. SGLang also takes ``draft``; there is no draft model here."""


class JoinGroup(msgspec.Struct, kw_only=True):
    """The order to become a rank of a group, in SGLang's words, as all orders here are."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = _DEFAULT_GROUP
    backend: str = "nccl"


class LeaveGroup(msgspec.Struct):
    """The order to leave a group."""

    group_name: str = _DEFAULT_GROUP


class UpdateSession(msgspec.Struct):
    """The order to open a session."""

    selector: _Selector = "all"


class BroadcastUpdate(WeightsUpdate, kw_only=True):
    """The order to receive tensors."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = _DEFAULT_GROUP
    load_format: Literal["flattened_bucket"] | None = None
    selector: _Selector = "all"

    def specs(self) -> list[TensorSpec]:
        """Join what is listed apart.

        Raises:
            RequestError: the lists are not equally long.
        """
        counts = len(self.names), len(self.dtypes), len(self.shapes)
        if len(set(counts)) > 1:
            raise RequestError(f"names, dtypes, shapes: got {counts} of them, need as many of each")
        columns = zip(self.names, self.dtypes, self.shapes, strict=True)
        return [TensorSpec(name=name, dtype=dtype, shape=shape) for name, dtype, shape in columns]


class Broadcasts:
    """What an engine knows of its trainers' broadcasts. Each order returns SGLang's message that it was carried out."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._groups: dict[str, WeightGroup | None] = {}
        """Groups by name; None while one is being joined."""
        self._is_open = False

    async def join(self, order: JoinGroup) -> str:
        """Become a rank of a group, when all of its ranks are there.

        Raises:
            WeightsError: the name is in use, or the group did not come together.
        """
        name, failed = order.group_name, "Failed to initialize custom process group"
        if name in self._groups:
            raise WeightsError(f"{failed}: group {name}: the name is in use; choose another, or destroy that group.")
        self._groups[name] = None
        try:
            self._groups[name] = await call_in_thread(
                lambda: WeightGroup.join(
                    address=order.master_address,
                    port=order.master_port,
                    rank=order.rank_offset,
                    size=order.world_size,
                    name=name,
                    backend=order.backend,
                    deadline_s=_DEADLINE_S,
                ),
                expected=(WeightGroupError,),
            )
        except WeightGroupError as exc:
            log.warning("weight_group.refused", group=name, reason=str(exc))
            raise WeightsError(f"{failed}: {exc}.") from exc
        finally:
            if self._groups[name] is None:
                del self._groups[name]
        log.info("weight_group.joined", group=name, rank=order.rank_offset, size=order.world_size)
        return "Succeeded to initialize custom process group."

    async def leave(self, order: LeaveGroup) -> str:
        """Leave a group.

        Raises:
            WeightsError: there is none of this name.
        """
        async with self._service.administration:
            group = self._groups.get(order.group_name)
            if group is None:
                raise WeightsError("The group to be destroyed does not exist.")
            del self._groups[order.group_name]
            await call_in_thread(group.close)  # which frees its connections, and waits for them
        log.info("weight_group.left", group=order.group_name)
        return "Succeeded to destroy custom process group."

    async def begin(self, order: UpdateSession) -> str:
        """Open a session.

        Raises:
            WeightsError: one is open.
        """
        return await self._turn(True, "a weight-update session is already open; call end_weight_update() first")

    async def end(self, order: dict[str, object]) -> str:
        """Close the session.

        Raises:
            WeightsError: none is open.
        """
        return await self._turn(False, "no weight-update session is open; call begin_weight_update() first")

    async def _turn(self, is_open: bool, refusal: str) -> str:
        async with self._service.administration:
            if self._is_open is is_open:
                raise WeightsError(refusal)
            self._is_open = is_open
        return "Success"

    async def update(self, order: BroadcastUpdate) -> str:
        """Receive tensors, in one broadcast or one each, and serve them.

        Raises:
            WeightsError: they did not come, or do not fit.
            RequestError: the order names no whole tensors.
        """
        specs = order.specs()
        buckets = [specs] if order.load_format is not None else [[spec] for spec in specs]

        async def stage() -> StagedWeights:
            if not self._is_open:
                raise WeightsError(_NO_SESSION)
            return await call_in_thread(lambda: self._receive(order.group_name, buckets), expected=(WeightsError,))

        try:
            is_flushed = await self._service.update_weights(stage, order)
        except WeightsError as exc:
            log.warning("weights.refused", group=order.group_name, reason=str(exc))
            raise
        return order.outcome("Succeeded to update parameter online.", is_flushed=is_flushed)

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
