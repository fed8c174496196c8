"""Trace training steps of ranks whose peers are not there: every layout, at numbers of ranks that no machine here has.

    python -m tools.trace_layouts                       # the smallest model, 64 ranks
    python -m tools.trace_layouts --model 72B --row-tokens 16384 --ranks 64 1024

Each rank's engines are built and run as a trainer builds and runs them, over torch's fake process groups, whose
collectives return at once, and on a device without memory (``absent_device``): sizes are true, numbers mean nothing.
Of each dimension of the mesh the first and the last rank are traced, the last of all of them, and every stage of a
pipeline. No weight is read. The policy alone, as the table of memory has it, is held against preflight's estimate.
Models of other layouts than the policy's are left out: their ranks read what their peers say.

Invariant: ranks of one group make its collectives in one order, with one size each, and what one sends to another is
what that one receives.
"""

import argparse
import functools
import itertools
import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from areal_async.config.settings import Settings
from areal_async.protocol.types import CutSlot, Slot, SlotStatus
from areal_async.trainer.batch.payloads import BatchSlot
from areal_async.trainer.batch.step import AgreedBatch
from areal_async.trainer.engine.engines import Engines, EngineThreads
from areal_async.trainer.engine.parallel.dims import DIMENSIONS
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.threads import EngineThread
from areal_async.trainer.packing.rows import TrainRow
from areal_async.trainer.shards import ShardTrainer
from tools import absent_device
from tools.decoder_shapes import QWEN2_5, save_heads

UPDATE_ROWS = 4
"""Of half a budget each: the gradients of one packed row are there beside all that the next one takes."""
ALONE = "policy alone"
"""The layout that the table of memory is for."""
SHARES = (0.84, 1.03)
"""What may be counted of the estimate."""
PPO = {"name": "ppo", "kl_coef": 0.1, "kl_in": "reward"}
"""A policy, a critic and a reference."""
LORA = {"rank": 4}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    ALONE: ({"activation_checkpointing": True}, {"num_minibatches": 2}),
    "data": ({}, PPO),
    "data, checkpointed": ({"activation_checkpointing": True}, PPO),
    "replicas": ({"replicas": 4}, PPO),
    "tensor": ({"tensor_parallel": 2}, PPO),
    "tensor, replicas": ({"tensor_parallel": 2, "replicas": 4}, PPO),
    "pipeline": ({"pipeline_parallel": 2}, PPO),
    "pipeline, interleaved": ({"pipeline_parallel": 2, "pipeline_schedule": "interleaved"}, PPO),
    "pipeline, tensor, replicas": ({"pipeline_parallel": 2, "tensor_parallel": 2, "replicas": 4}, PPO),
    "pipeline of four, tensor": ({"pipeline_parallel": 4, "tensor_parallel": 2}, PPO),
    "adapters": ({"lora": LORA}, {"kl_coef": 0.1}),
    "adapters, replicas": ({"lora": LORA, "replicas": 4}, {"kl_coef": 0.1}),
}
"""Name -> what ``trainer`` and ``algorithm`` say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCall:
    """One call of a rank."""

    name: str
    members: tuple[int, ...]
    """Ranks of its group."""
    peer: int | None
    """The other one, of what is sent from one rank to another."""
    sizes: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and data type of each tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """What one rank did, and the bytes of its device."""

    calls: list[CollectiveCall]
    """In order."""
    kept_bytes: int
    """After the step: optimizer states are there, gradients are not."""
    peak_bytes: int


class CollectiveLog:
    """Notes collectives."""

    def __init__(self) -> None:
        self.calls: list[CollectiveCall] = []
        self._members: dict[int, tuple[int, ...]] = {}
        """Of each group, once: there may be a thousand."""

    def note(self, func: Any, args: Any) -> None:
        """Note one, as its operator was called."""
        name = func.__name__.partition(".")[0]
        tensors = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
        (group,) = (
            dist.ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject) and _is_group(one)
        )
        if (members := self._members.get(id(group))) is None:
            members = self._members[id(group)] = tuple(dist.get_process_group_ranks(group))
        peer = members[args[2]] if name in ("send", "recv_") else None
        sizes = tuple((tuple(one.shape), str(one.dtype)) for one in tensors)
        self.calls.append(CollectiveCall(name=name, members=members, peer=peer, sizes=sizes))


def _is_group(one: Any) -> bool:
    return "ProcessGroup" in one._type().qualified_name()


@contextmanager
def _peerless_ranks(rank: int, size: int) -> Iterator[Ranks]:
    """Be one rank of so many."""
    backend = f"cpu:fake,{absent_device.NAME}:fake"
    dist.init_process_group(backend, rank=rank, world_size=size, store=FakeStore())
    try:
        control = dist.new_group(backend="fake")
        yield Ranks(rank=rank, size=size, device=torch.device(absent_device.DEVICE), deadline_s=60, control=control)
    finally:
        dist.destroy_process_group()


def trace_step(settings: Settings, rank: int) -> RankTrace:
    """Return what a whole training step of one rank does. Once in a process: torch remembers the meshes of the last."""
    absent_device.register()
    device, log = absent_device.AbsentDevice(), CollectiveLog()
    with _peerless_ranks(rank, settings.trainer.num_ranks) as ranks, absent_device.engines_on_it():
        # One thread for all of them, as on a GPU, where one order of all calls matters.
        threads = EngineThreads(engine=EngineThread(ranks.device), has_one=True)
        rows = _rows(settings.trainer.token_budget // 2, UPDATE_ROWS * settings.algorithm.num_minibatches)

        async def step() -> RankTrace:
            stack = ExitStack()
            await threads.run("actor", lambda: stack.enter_context(device.on()))
            try:
                shards = await threads.run("actor", lambda: ShardTrainer(
                    settings, engines=Engines.for_run(settings, ranks), threads=threads
                ))  # fmt: skip
                device.on_collective = log.note
                await shards.run_calls(rows, _batch(rows), step=1, settings=settings)
                return RankTrace(calls=log.calls, kept_bytes=device.num_bytes, peak_bytes=device.peak_bytes)
            finally:
                await threads.run("actor", stack.close)

        return anyio.run(step)


def trace(settings: Settings, ranks: Sequence[int]) -> dict[int, RankTrace]:
    """Return ``trace_step`` of each rank, in a process of its own, two at a time.

    Raises:
        BrokenProcessPool: one was killed, for want of memory as a rule.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, initializer=_prepare, max_tasks_per_child=1) as pool:
        traced = pool.map(functools.partial(trace_step, settings), ranks)
        return dict(zip(ranks, traced, strict=True))


def _prepare() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # no number is any good
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


def ranks_to_trace(sizes: Sequence[int]) -> list[int]:
    """Return the first rank of each stage, that at the end of each other dimension, and the last of all."""
    places = [(stage, *(0,) * (len(sizes) - 1)) for stage in range(sizes[0])]
    places.append(tuple(size - 1 for size in sizes))
    for dim, size in enumerate(sizes):
        places.append(tuple(size - 1 if one == dim else 0 for one in range(len(sizes))))
    return sorted({int(np.ravel_multi_index(place, tuple(sizes))) for place in places})


def disagreements(traced: Mapping[int, list[CollectiveCall]]) -> Iterator[str]:
    """Yield a sentence for each two ranks that would wait for each other for ever, or take each other's data amiss."""
    for (a, calls_a), (b, calls_b) in itertools.combinations(traced.items(), 2):
        groups = {call.members for call in calls_a if {a, b} <= set(call.members)}
        groups |= {call.members for call in calls_b if {a, b} <= set(call.members)}
        for members in groups:
            ours, theirs = (
                [c for c in calls if c.members == members and c.peer is None] for calls in (calls_a, calls_b)
            )
            yield from _difference(f"ranks {a} and {b} in their group of {len(members)}", ours, theirs)
        for source, sent, sink, received in ((a, calls_a, b, calls_b), (b, calls_b, a, calls_a)):
            out = [c.sizes for c in sent if c.name == "send" and c.peer == sink]
            into = [c.sizes for c in received if c.name == "recv_" and c.peer == source]
            yield from _difference(f"what rank {source} sends to rank {sink}", out, into)


def _difference(what: str, ours: Sequence[object], theirs: Sequence[object]) -> Iterator[str]:
    for number, (one, other) in enumerate(itertools.zip_longest(ours, theirs)):
        if one != other:
            yield f"{what}: number {number} is {one} on one side, {other} on the other"
            return


def settings_of(layout: str, model: Path, num_ranks: int, *, token_budget: int) -> Settings:
    """Return the settings of a layout over so many ranks."""
    trainer, algorithm = LAYOUTS[layout]
    common = {"num_ranks": num_ranks, "token_budget": token_budget}
    return Settings.model_validate(
        {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "trainer": common | trainer,
            "algorithm": algorithm,
        }
    )


def _rows(num_tokens: int, num_rows: int) -> list[TrainRow]:
    return [
        TrainRow(
            token_ids=np.zeros(num_tokens, dtype=np.int32),
            loss_mask=np.arange(num_tokens) >= 4,
            behave_logprobs=np.full(num_tokens, -4.0, dtype=np.float32),
            advantage=1.0,
            current_mask=np.arange(num_tokens) >= 4,
            index=index,
        )
        for index in range(num_rows)
    ]


def _batch(rows: Sequence[TrainRow]) -> AgreedBatch:
    slots = []
    for row in rows:
        slot = Slot(
            sibling=row.index, sample_uid=str(row.index), status=SlotStatus.SCORED, reward=1.0,
            num_output_tokens=int(row.loss_mask.sum()), oldest="1-0", newest="1-0",
        )  # fmt: skip
        item = CutSlot(sequence=1, slot=slot)
        slots.append(BatchSlot(position=row.index, group_id="a", workflow="w", item=item))
    advantages = {row.index: np.ones(1, dtype=np.float32) for row in rows}
    return AgreedBatch(slots=slots, advantages=advantages, unusable=[])


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace, print a line for each layout, and return 1 where ranks disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.5B", choices=QWEN2_5)
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64], help="numbers of ranks")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    given = parser.parse_args(arguments)
    _prepare()
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        shape = QWEN2_5[given.model]
        shape = shape._replace(layers=given.layers or shape.layers)
        model = save_heads(shape, Path(folder))
        for num_ranks, layout in itertools.product(given.ranks, given.layouts):
            settings = settings_of(layout, model, num_ranks, token_budget=given.row_tokens)
            trainer, started = settings.trainer, time.perf_counter()
            others = trainer.pipeline_parallel, trainer.replicas, trainer.tensor_parallel
            sizes = (others[0], others[1], num_ranks // int(np.prod(others)), others[2])
            traced = trace(settings, ranks_to_trace(sizes))
            wrong = list(disagreements({rank: one.calls for rank, one in traced.items()}))
            mesh = " x ".join(f"{name} {size}" for name, size in zip(DIMENSIONS, sizes, strict=True) if size > 1)
            what = f"{layout}: {num_ranks} ranks, {mesh}: {len(traced)} traced"
            told = f"{sum(len(one.calls) for one in traced.values())} collectives, {'; '.join(wrong) or 'one order'}"
            kept, peak = (max(getattr(one, name) for one in traced.values()) for name in ("kept_bytes", "peak_bytes"))
            told += f", {kept / 1e9:.1f} GB kept, {peak / 1e9:.1f} GB at the peak"
            if layout == ALONE:
                share = peak / shape.size.trainer_bytes(trainer, dtype=settings.model.dtype)
                told += f", {share:.0%} of the estimate"
                num_wrong += not SHARES[0] <= share <= SHARES[1]
            num_wrong += len(wrong)
            print(f"{what}, {told} ({time.perf_counter() - started:.0f} s)", flush=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
