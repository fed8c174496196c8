"""A broadcast reaches every rank whole, and nobody waits for a rank that is gone longer than the deadline."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from types import SimpleNamespace

import pytest
import torch

from areal_async.inference.weight_group import (
    GLOO,
    NCCL,
    WeightGroup,
    WeightGroupError,
    describe,
    empty_bucket,
    flatten,
    unflatten,
)
from areal_async.protocol.types import TensorSpec

DEADLINE_S = 60.0
SHORT_S = 0.3
SENDER = """
import sys, torch
from areal_async.inference.weight_group import WeightGroup
group = WeightGroup.host(address="127.0.0.1", size=2, name="g", backend="gloo", deadline_s=20)
print(group.port, flush=True)
group.meet()
group.broadcast(torch.full((4,), 7, dtype=torch.uint8))
sys.stdin.read()
"""


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def host(*, size: int = 2, deadline_s: float = DEADLINE_S) -> WeightGroup:
    return WeightGroup.host(address="127.0.0.1", size=size, name="g", backend=GLOO, deadline_s=deadline_s)


def join(port: int, *, rank: int = 1, size: int = 2, deadline_s: float = DEADLINE_S) -> WeightGroup:
    return WeightGroup.join(
        address="127.0.0.1", port=port, rank=rank, size=size, name="g", backend=GLOO, deadline_s=deadline_s
    )


def receive(group: WeightGroup, num_bytes: int) -> torch.Tensor:
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    group.broadcast(flat)
    return flat


def met(threads: ThreadPoolExecutor, *, size: int = 2, deadline_s: float = DEADLINE_S) -> list[WeightGroup]:
    """Return every rank's end of one group."""
    first = host(size=size, deadline_s=deadline_s)
    others = [threads.submit(join, first.port, rank=rank, size=size) for rank in range(1, size)]
    first.meet()
    return [first, *(other.result() for other in others)]


def test_every_rank_receives_what_rank_0_sends(threads: ThreadPoolExecutor) -> None:
    first, *others = met(threads, size=3)
    for value in (1, 2):
        received = [threads.submit(receive, other, 1000) for other in others]
        first.broadcast(torch.full((1000,), value, dtype=torch.uint8))

        assert [bool((flat.result() == value).all()) for flat in received] == [True, True]

    for group in (first, *others):
        group.close()


def test_two_groups_of_one_process_are_apart(threads: ThreadPoolExecutor) -> None:
    one, two = met(threads), met(threads)
    one[0].close()
    received = threads.submit(receive, two[1], 8)
    two[0].broadcast(torch.ones(8, dtype=torch.uint8))

    assert received.result().sum() == 8


def test_a_peer_that_never_joins_is_waited_for_until_the_deadline() -> None:
    with closing(host(deadline_s=SHORT_S)) as group, pytest.raises(WeightGroupError, match="2 ranks did not meet"):
        group.meet()


def test_a_peer_that_does_not_receive_is_waited_for_until_the_deadline(threads: ThreadPoolExecutor) -> None:
    first, _ = met(threads, deadline_s=2.0)  # in which both also meet

    with pytest.raises(WeightGroupError, match="a broadcast of 50000000 bytes broke"):
        first.broadcast(torch.zeros(50_000_000, dtype=torch.uint8))


def test_closing_the_store_ends_the_wait_of_rank_0_itself(threads: ThreadPoolExecutor) -> None:
    group = host(size=3)
    meeting = threads.submit(group.meet)
    other = threads.submit(join, group.port, size=3)  # one of the two: neither has all peers
    with pytest.raises(TimeoutError):
        meeting.result(timeout=SHORT_S)

    group.close_store()

    for waiting in (meeting, other):
        with pytest.raises(WeightGroupError):
            waiting.result(timeout=DEADLINE_S / 2)
    group.close()


def test_closing_ends_the_wait_of_a_peer_that_joins(threads: ThreadPoolExecutor) -> None:
    first = host(size=3, deadline_s=1.0)
    waiting = threads.submit(join, first.port, size=3)
    with pytest.raises(WeightGroupError) as failure:
        first.meet()
    assert failure.value.__cause__
    assert not waiting.done()
    first.close()

    with pytest.raises(WeightGroupError, match="did not meet"):
        waiting.result(DEADLINE_S / 2)


def test_closing_ends_the_wait_of_a_peer_that_receives(threads: ThreadPoolExecutor) -> None:
    first, second = met(threads)
    waiting = threads.submit(receive, second, 8)
    first.close()

    with pytest.raises(WeightGroupError, match="a broadcast of 8 bytes broke"):
        waiting.result(DEADLINE_S / 2)


def test_a_sender_that_is_killed_ends_the_wait_too(threads: ThreadPoolExecutor) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        group = join(int(process.stdout.readline()))
        assert receive(group, 4).tolist() == [7, 7, 7, 7]
        waiting = threads.submit(receive, group, 4)
        process.kill()

        with pytest.raises(WeightGroupError, match="a broadcast of 4 bytes broke"):
            waiting.result(DEADLINE_S / 2)


def test_a_group_may_be_closed_twice_and_is_of_no_use_afterwards() -> None:
    group = host()
    group.close()
    group.close()

    with pytest.raises(WeightGroupError, match="need a group that met"):
        group.broadcast(torch.zeros(1, dtype=torch.uint8))


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(WeightGroupError, match="cannot listen at 192.0.2.1"):
        WeightGroup.host(address="192.0.2.1", size=2, name="g", backend=GLOO, deadline_s=1.0)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(WeightGroupError, match="got backend 'mpi', need gloo or nccl"):
        WeightGroup.host(address="127.0.0.1", size=2, name="g", backend="mpi", deadline_s=1.0)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="torch is built with NCCL")
def test_nccl_is_refused_where_there_is_none() -> None:
    with pytest.raises(WeightGroupError, match="which this torch is built without; use gloo"):
        WeightGroup.join(address="127.0.0.1", port=1, rank=1, size=2, name="g", backend=NCCL, deadline_s=1.0)


def test_a_bucket_comes_back_as_it_was() -> None:
    tensors = {
        "wide": torch.randn(3, 4),
        "strided": torch.randn(6, 2).t(),
        "scalar": torch.tensor(2.5),
        "narrow": torch.randn(5, 1).bfloat16(),
        "empty": torch.zeros(0, 7, dtype=torch.bfloat16),
        "bytes": torch.arange(3, dtype=torch.uint8),
    }
    specs = [describe(name, tensor) for name, tensor in tensors.items()]
    flat = empty_bucket(specs)
    flat.copy_(flatten(tensors.values()))

    for (name, tensor), spec in zip(unflatten(flat, specs), specs, strict=True):
        assert spec == TensorSpec(name=name, dtype=spec.dtype, shape=list(tensors[name].shape))
        assert torch.equal(tensor, tensors[name])
        assert tensor.dtype == tensors[name].dtype


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TensorSpec(name="a", dtype="float32", shape=[1]), "got a of float32 at byte 2, need a multiple of 4"),
        (TensorSpec(name="a", dtype="uint8", shape=[-1]), "need no negative dimension"),
        (TensorSpec(name="a", dtype="float", shape=[1]), "got a of float at byte 2"),
        (TensorSpec(name="a", dtype="nn", shape=[1]), "got type 'nn' for a, need one of torch's"),
    ],
)
def test_a_bucket_that_cannot_be_is_refused(spec: TensorSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        empty_bucket([TensorSpec(name="first", dtype="bfloat16", shape=[1]), spec])


def test_a_bucket_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="got 3 bytes, need 2"):
        unflatten(torch.zeros(3, dtype=torch.uint8), [TensorSpec(name="a", dtype="bfloat16", shape=[1])])


class Nccl:
    """What torch's group of nccl's is called with; on a GPU alone there is a real one."""

    Options = SimpleNamespace
    environment: list[str | None]

    def __init__(self, *_: object) -> None:
        self.environment.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))

    def broadcast(self, *_: object) -> object:
        """Wait for peers that do not come, as it does for those that are gone."""
        return threading.Event().wait()

    def abort(self) -> None:
        self.environment.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> WeightGroup:
    """Rank 0 of a group of nccl's, not met yet."""
    monkeypatch.setattr(Nccl, "environment", [], raising=False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    return WeightGroup.host(address="127.0.0.1", size=2, name="g", backend=NCCL, deadline_s=5.0)


@pytest.mark.parametrize("before", [None, "0"])
def test_a_group_of_nccl_has_no_watchdog_and_those_made_later_have_theirs(
    before: str | None, nccl: WeightGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's watchdog would end the trainer with the first server that goes in the middle of a broadcast."""
    if before is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)

    with closing(nccl):
        nccl.meet()

    assert Nccl.environment == ["1", before]


def test_rank_0_waits_in_nccl_no_longer_than_its_group_is_open(
    nccl: WeightGroup, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer sees that a server is lost, and its step waits no longer for it."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    with closing(nccl):
        nccl.meet()
        broadcast = threads.submit(nccl.broadcast, torch.zeros(1))
        nccl.close_store()

        with pytest.raises(WeightGroupError, match="nccl: the group is closed"):
            broadcast.result()


def test_nccl_goes_by_the_stream_of_who_broadcasts(nccl: WeightGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called in a thread of its own, which would have it wait for all that training has queued."""
    entered: list[object] = []
    done = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: threading.get_ident())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(entered.append(stream)))
    monkeypatch.setattr(Nccl, "broadcast", lambda *_: done)

    with closing(nccl):
        nccl.meet()
        nccl.broadcast(torch.zeros(1))

    assert entered == [threading.get_ident()]
