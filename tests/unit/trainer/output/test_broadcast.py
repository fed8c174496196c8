"""A broadcast brings servers exactly the weights trained; whoever leaves or joins, the trainer goes on, and soon."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from areal_async.inference.weight_group import GLOO
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import UpdateGroup
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.output.broadcast import Broadcaster, address_towards
from tests.unit.trainer.models import engine_of, random_rows
from tests.unit.trainer.receivers import DEADLINE_S, Receiver, are_equal, state_of

BUCKET_BYTES = 5_000
SHORT_S = 0.2

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def broadcaster() -> Iterator[Broadcaster]:
    broadcaster = Broadcaster(prefix="test-1", address="127.0.0.1", backend=GLOO, deadline_s=DEADLINE_S)
    yield broadcaster
    broadcaster.close()


@pytest.fixture
def receivers() -> Iterator[dict[str, Receiver]]:
    receivers = {server_id: Receiver(server_id) for server_id in ("0-0", "0-1")}
    yield receivers
    for receiver in receivers.values():
        receiver.leave()


@pytest.fixture(scope="module")
def engine(model: Path, ranks: Ranks) -> FsdpEngine:
    return engine_of(model, ranks, dtype="bfloat16")


def opened(broadcaster: Broadcaster, *states: ServerState, revision: int = 1) -> UpdateGroup:
    group = broadcaster.open([(state, revision) for state in states])
    assert group is not None
    return group


def test_every_server_gets_the_same_bits_over_several_buckets_and_versions(
    broadcaster: Broadcaster, receivers: dict[str, Receiver], engine: FsdpEngine
) -> None:
    buckets = engine.plan_buckets(max_bytes=BUCKET_BYTES)
    assert len(buckets) > 2
    names = []
    for version in (1, 2):
        group = opened(broadcaster, *map(state_of, receivers))
        names.append(group.name)
        for receiver in receivers.values():
            receiver.receive(group, buckets)

        sent = engine.gather_weights(buckets, send=broadcaster.send)

        for receiver in receivers.values():
            assert are_equal(receiver.finish(), sent)
        engine.train_step(random_rows(4), step=version, total_steps=2)
    assert names == ["test-1-1", "test-1-1"], "a group is kept while its members stay"
    assert group.ranks == {"0-0": 1, "0-1": 2}


def test_a_gpu_without_room_for_a_bucket_costs_the_broadcast_and_nothing_else(
    broadcaster: Broadcaster, receivers: dict[str, Receiver], engine: FsdpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside a step, where versions are broadcast from their files."""
    buckets, num_placed = engine.plan_buckets(max_bytes=BUCKET_BYTES), 0

    def placed(flat: Tensor) -> Tensor:
        nonlocal num_placed
        num_placed += 1
        if num_placed > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return flat

    monkeypatch.setattr(broadcaster, "_placed", placed)
    receivers["0-0"].receive(opened(broadcaster, state_of("0-0")), buckets)

    sent = engine.gather_weights(buckets, send=broadcaster.send)

    assert sent.keys() > receivers["0-0"].finish().keys()
    assert not broadcaster.has_group
    assert broadcaster.open([(state_of("0-0"), 1)]) is None, "it is not asked again before it speaks up"


def test_a_member_that_dies_after_the_first_bucket_costs_the_broadcast_and_nothing_else(
    broadcaster: Broadcaster, receivers: dict[str, Receiver], engine: FsdpEngine
) -> None:
    buckets = engine.plan_buckets(max_bytes=BUCKET_BYTES)
    group = opened(broadcaster, *map(state_of, receivers))
    receivers["0-0"].receive(group, buckets)
    receivers["0-1"].receive(group, buckets, gone_after=1)

    sent = engine.gather_weights(buckets, send=broadcaster.send)

    assert sent.keys() == {spec.name for bucket in buckets for spec in bucket}
    assert not broadcaster.has_group
    for receiver in receivers.values():
        receiver.finish()
    group = opened(broadcaster, state_of("0-0"), state_of("0-1", reason="ended"), revision=2)
    assert (group.name, group.ranks) == ("test-1-2", {"0-0": 1})
    receivers["0-0"].receive(group, buckets)
    sent = engine.gather_weights(buckets, send=broadcaster.send)
    assert are_equal(receivers["0-0"].finish(), sent)


def test_a_new_server_a_restarted_one_and_a_larger_one_make_a_new_group(broadcaster: Broadcaster) -> None:
    first = opened(broadcaster, state_of("0-0"))
    joined = opened(broadcaster, state_of("0-0"), state_of("0-1"), revision=2)
    restarted = opened(broadcaster, state_of("0-0", incarnation="second"), state_of("0-1"), revision=3)
    large = ServerState(server_id="1-0", node_id="1", url="", version="1-0", num_ranks=4)
    beside = opened(broadcaster, state_of("0-0", incarnation="second"), state_of("0-1"), large, revision=4)
    last = opened(broadcaster, large, state_of("2-0"), revision=5)

    assert [one.name for one in (first, joined, restarted, beside)] == [f"test-1-{n}" for n in (1, 2, 3, 4)]
    assert restarted.incarnations == {"0-0": "second", "0-1": "first"}
    assert (beside.size, beside.ranks["1-0"]) == (7, 3)
    assert (last.size, last.ranks) == (6, {"1-0": 1, "2-0": 5})


def test_fenced_servers_and_those_without_weights_are_not_waited_for(broadcaster: Broadcaster) -> None:
    assert broadcaster.open([(state_of("0-0", reason="starting"), 1), (state_of("0-1", version=""), 1)]) is None
    broadcaster.send(torch.zeros(4, dtype=torch.uint8))


def test_a_server_that_waits_for_weights_takes_part_and_is_lost_when_it_does_so_no_more(
    broadcaster: Broadcaster,
) -> None:
    waiting = state_of("0-0", reason="starting", wants_weights=True)
    group = opened(broadcaster, waiting)

    assert (group.ranks, group.incarnations) == ({"0-0": 1}, {"0-0": "first"})
    assert not broadcaster.find_lost({"0-0": waiting})
    assert not broadcaster.find_lost({"0-0": state_of("0-0", version="1-1")})
    assert broadcaster.find_lost({"0-0": state_of("0-0", reason="starting")}) == "server 0-0: starting"


def test_a_server_that_missed_a_broadcast_is_asked_again_but_never_beside_others(broadcaster: Broadcaster) -> None:
    missed = [
        state_of(name, incarnation="second", missed="test-1-1: nobody at 10.0.0.1:7000") for name in ("0-0", "0-1")
    ]
    well = state_of("1-0", missed="test-0-9: of a trainer that is gone")
    opened(broadcaster, state_of("0-0"), state_of("0-1"), well)
    assert "0-0" in broadcaster.find_lost({"0-0": missed[0], "0-1": state_of("0-1"), "1-0": well}), "none waits for it"
    broadcaster.give_up("0-0 was started anew or is gone")

    beside = broadcaster.open([(missed[0], 2), (missed[1], 3), (well, 4)])
    alone = [broadcaster.open(pairs) for pairs in ([(missed[0], 2), (missed[1], 3)], [(missed[0], 5), (missed[1], 3)])]

    assert [group and group.ranks for group in (beside, *alone)] == [{"1-0": 1}, {"0-0": 1}, {"0-1": 1}]


def test_a_member_that_never_joins_is_given_up_at_once_when_it_is_known_to_be_lost(broadcaster: Broadcaster) -> None:
    opened(broadcaster, state_of("0-0"))
    assert not broadcaster.find_lost({"0-0": state_of("0-0", version="1-5")})
    lost = broadcaster.find_lost({"0-0": state_of("0-0", reason="ended with status -9")})
    assert lost == "server 0-0: ended with status -9"
    assert "0-0" in broadcaster.find_lost({"0-0": state_of("0-0", incarnation="second")})
    assert "0-0" in broadcaster.find_lost({})
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(broadcaster.send, torch.zeros(4, dtype=torch.uint8))
        with pytest.raises(TimeoutError):
            sending.result(timeout=SHORT_S)

        broadcaster.give_up(lost)

        sending.result(timeout=DEADLINE_S / 2)
    assert not broadcaster.has_group


def test_who_held_up_a_broadcast_is_asked_again_only_when_it_says_something_new() -> None:
    broadcaster = Broadcaster(prefix="test-1", address="127.0.0.1", backend=GLOO, deadline_s=SHORT_S)
    opened(broadcaster, state_of("0-0"))
    broadcaster.send(torch.zeros(4, dtype=torch.uint8))  # nobody joins: its node is gone, and its last word stands

    assert broadcaster.open([(state_of("0-0"), 1)]) is None
    assert opened(broadcaster, state_of("0-0"), state_of("0-1")).ranks == {"0-1": 1}
    assert opened(broadcaster, state_of("0-0"), revision=2).ranks == {"0-0": 1}
    broadcaster.close()


@pytest.mark.parametrize("url", ["nats://127.0.0.1:4222", "tls://localhost"])
def test_a_broker_on_this_host_is_reached_from_the_loopback_address(url: str) -> None:
    assert address_towards(url) in ("127.0.0.1", "::1")
