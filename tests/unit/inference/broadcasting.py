"""The other end of a broadcast, for the tests of both servers: a trainer, and the orders of a supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file

from areal_async.inference.weight_group import GLOO, WeightGroup, describe, flatten
from areal_async.protocol.types import TensorSpec
from tests.unit.inference.embedded_engine import Server

DEADLINE_S = 30.0
BUCKET_TENSORS = 9

Tensors = dict[str, torch.Tensor]


class Trainer:
    """Rank 0 of a group with one server, and the orders that the server needs."""

    def __init__(
        self, server: Server, name: str, *, backend: str = GLOO, device: torch.device | str = "cpu",
        deadline_s: float = DEADLINE_S,
    ) -> None:  # fmt: skip
        self.server = server
        self._backend, self._device = backend, device
        self.group = WeightGroup.host(address="127.0.0.1", size=2, name=name, backend=backend, deadline_s=deadline_s)
        self._threads = ThreadPoolExecutor()

    def post(self, route: str, **fields: object) -> Future[httpx.Response]:
        return self._threads.submit(self.server.post, route, **fields)

    def order_join(self) -> Future[httpx.Response]:
        place = {"master_address": "127.0.0.1", "master_port": self.group.port, "rank_offset": 1, "world_size": 2}
        return self.post("/init_weights_update_group", group_name=self.group.name, backend=self._backend, **place)

    def join(self) -> None:
        answer = self.order_join()
        self.group.meet()
        assert_success(answer.result())

    def order_bucket(self, specs: Sequence[TensorSpec], **fields: object) -> Future[httpx.Response]:
        columns = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [spec.shape for spec in specs],
        }
        fields = {"group_name": self.group.name, "load_format": "flattened_bucket", **columns, **fields}
        return self.post("/update_weights_from_distributed", **fields)

    def send_bucket(self, tensors: Tensors, **fields: object) -> httpx.Response:
        answer = self.order_bucket([describe(name, tensor) for name, tensor in tensors.items()], **fields)
        self.group.broadcast(flatten(tensors.values()).to(self._device))
        return answer.result()

    def send(self, model: Path, version: str, *, flush_cache: bool = True) -> None:
        """Update the server in several buckets, the last of which carries the version."""
        items = list(load_file(model / "model.safetensors").items())
        buckets = [dict(items[start : start + BUCKET_TENSORS]) for start in range(0, len(items), BUCKET_TENSORS)]
        assert len(buckets) > 2
        assert_success(self.server.post("/begin_weight_update"))
        for bucket in buckets[:-1]:
            assert_success(self.send_bucket(bucket, flush_cache=False))
        assert_success(self.send_bucket(buckets[-1], flush_cache=flush_cache, weight_version=version))
        assert_success(self.server.post("/end_weight_update"))

    def close(self) -> None:
        self.group.close()
        self._threads.shutdown()
        self.server.post("/end_weight_update")
        self.server.post("/destroy_weights_update_group", group_name=self.group.name)


def assert_success(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text
    assert answer.json()["success"] is True
