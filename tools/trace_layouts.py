"""Trace training steps of ranks whose peers are not there: every layout, at numbers of ranks that no machine here has.

    python -m tools.trace_layouts                       # 4 layers, 64 ranks
    python -m tools.trace_layouts --layers 80 --ranks 64 1024

Each rank's engines are built and run as a trainer builds and runs them, over torch's fake process groups: a collective
returns at once, and what a peer would have sent is ones. Of each dimension of the mesh the first, the middle and the
last rank are traced. Nothing that is computed means anything; that a step runs, and which collectives it makes, does.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
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

NUM_ROWS, ROW_TOKENS, VOCAB = 4, 12, 64
PPO = {"name": "ppo", "kl_coef": 0.1, "kl_in": "reward", "num_minibatches": 2}
"""A policy, a critic and a reference; two updates in a step."""
LORA = {"rank": 4}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data": ({}, PPO),
    "data, checkpointed": ({"activation_checkpointing": True}, PPO),
    "replicas": ({"replicas": 4}, PPO),
    "tensor": ({"tensor_parallel": 2}, PPO),
    "tensor, replicas": ({"tensor_parallel": 2, "replicas": 4}, PPO),
    "pipeline": ({"pipeline_parallel": 2}, PPO),
    "pipeline, interleaved": ({"pipeline_parallel": 2, "pipeline_schedule": "interleaved"}, PPO),
    "pipeline, tensor, replicas": ({"pipeline_parallel": 2, "tensor_parallel": 2, "replicas": 4}, PPO),
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


class CollectiveLog(TorchDispatchMode):
    """Notes every collective of this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[CollectiveCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective; let a receiver have ones."""
        if func.namespace == "c10d":
            self._note(func, args)
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and func.__name__.startswith("recv"):
            for tensor in args[0]:
                tensor.fill_(1)
        return result

    def _note(self, func: Any, args: Any) -> None:
        name = func.__name__.partition(".")[0]
        tensors = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
        (group,) = (
            dist.ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject) and _is_group(one)
        )
        members = tuple(dist.get_process_group_ranks(group))
        peer = members[args[2]] if name in ("send", "recv_") else None
        sizes = tuple((tuple(one.shape), str(one.dtype)) for one in tensors)
        self.calls.append(CollectiveCall(name=name, members=members, peer=peer, sizes=sizes))


def _is_group(one: Any) -> bool:
    return "ProcessGroup" in one._type().qualified_name()


@contextmanager
def _peerless_ranks(rank: int, size: int) -> Iterator[Ranks]:
    """Be one rank of so many."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        control = dist.new_group(backend="fake")
        yield Ranks(rank=rank, size=size, device=torch.device("cpu"), deadline_s=60, control=control)
    finally:
        dist.destroy_process_group()


def trace_step(settings: Settings, rank: int) -> list[CollectiveCall]:
    """Return the collectives of a whole training step of one rank, in order."""
    # One thread for all of them, as on a GPU, where one order of all calls matters.
    threads = EngineThreads(engine=EngineThread(torch.device("cpu")), has_one=True)
    log = CollectiveLog()

    async def step() -> None:
        await threads.run("actor", log.__enter__)
        try:
            await shards.run_calls(_rows(), _batch(), step=1, settings=settings)
        finally:
            await threads.run("actor", lambda: log.__exit__(None, None, None))  # type: ignore[no-untyped-call]

    with _peerless_ranks(rank, settings.trainer.num_ranks) as ranks:
        shards = ShardTrainer(settings, engines=Engines.for_run(settings, ranks), threads=threads)
        anyio.run(step)
    return log.calls


def trace(settings: Settings, ranks: Sequence[int]) -> dict[int, list[CollectiveCall]]:
    """Return ``trace_step`` of each rank, in a process of its own: torch remembers the meshes of the one before."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        calls = pool.map(functools.partial(trace_step, settings), ranks, chunksize=1)
    return dict(zip(ranks, calls, strict=True))


def ranks_to_trace(sizes: Sequence[int]) -> list[int]:
    """Return the first rank, those in the middle and at the end of each dimension beside it, and the very last."""
    places = [(0,) * len(sizes), tuple(size - 1 for size in sizes)]
    for dim, size in enumerate(sizes):
        places += [tuple(place if one == dim else 0 for one in range(len(sizes))) for place in (size // 2, size - 1)]
    return sorted({int(np.ravel_multi_index(place, tuple(sizes))) for place in places})


def disagreements(traced: dict[int, list[CollectiveCall]]) -> Iterator[str]:
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


def settings_of(layout: str, model: Path, num_ranks: int) -> Settings:
    """Return the settings of a layout over so many ranks."""
    trainer, algorithm = LAYOUTS[layout]
    common = {"num_ranks": num_ranks, "token_budget": 2 * ROW_TOKENS}
    return Settings.model_validate(
        {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "trainer": common | trainer,
            "algorithm": algorithm,
        }
    )


def save_narrow_model(directory: Path, *, num_layers: int) -> Path:
    """Write a decoder of so many layers, each a few thousand numbers wide."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = AutoConfig.for_model(
        "qwen2", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=128,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def _rows() -> list[TrainRow]:
    random = np.random.default_rng(0)
    return [
        TrainRow(
            token_ids=random.integers(0, VOCAB, ROW_TOKENS).astype(np.int32),
            loss_mask=np.arange(ROW_TOKENS) >= 4,
            behave_logprobs=np.full(ROW_TOKENS, -4.0, dtype=np.float32),
            advantage=1.0,
            current_mask=np.arange(ROW_TOKENS) >= 4,
            index=index,
        )
        for index in range(NUM_ROWS)
    ]


def _batch() -> AgreedBatch:
    slots = []
    for row in _rows():
        slot = Slot(
            sibling=row.index, sample_uid=str(row.index), status=SlotStatus.SCORED, reward=1.0,
            num_output_tokens=int(row.loss_mask.sum()), oldest="1-0", newest="1-0",
        )  # fmt: skip
        item = CutSlot(sequence=1, slot=slot)
        slots.append(BatchSlot(position=row.index, group_id="a", workflow="w", item=item))
    advantages = {row.index: np.ones(1, dtype=np.float32) for row in _rows()}
    return AgreedBatch(slots=slots, advantages=advantages, unusable=[])


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace, print a line for each layout, and return 1 where ranks disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64], help="numbers of ranks")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    given = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # no number is any good
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        model = save_narrow_model(Path(folder), num_layers=given.layers)
        for num_ranks, layout in itertools.product(given.ranks, given.layouts):
            settings = settings_of(layout, model, num_ranks)
            trainer, started = settings.trainer, time.perf_counter()
            others = trainer.pipeline_parallel, trainer.replicas, trainer.tensor_parallel
            sizes = (others[0], others[1], num_ranks // int(np.prod(others)), others[2])
            traced = trace(settings, ranks_to_trace(sizes))
            wrong = list(disagreements(traced))
            num_wrong += len(wrong)
            mesh = " x ".join(f"{name} {size}" for name, size in zip(DIMENSIONS, sizes, strict=True) if size > 1)
            what = f"{layout}: {num_ranks} ranks, {mesh}: {len(traced)} traced"
            told = f"{sum(map(len, traced.values()))} collectives, {'; '.join(wrong) or 'one order'}"
            print(f"{what}, {told} ({time.perf_counter() - started:.0f} s)", flush=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
