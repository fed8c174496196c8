"""What a real engine sampled at any temperature is trained at that one: on its own policy every ratio stays 1."""

from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import numpy as np
import pytest
from msgspec.structs import replace

from areal_async.config.settings import InferenceSettings, ModelSettings, SamplingSettings, Settings, TrainerSettings
from areal_async.inference.client import InferenceClient
from areal_async.inference.pool import ServerPool
from areal_async.protocol.types import Cut, Ticket, Trajectory, Version
from areal_async.protocol.wire import decode_headers, decode_trajectory, encode_message
from areal_async.rollout.policy.policy import RecordingPolicy
from areal_async.rollout.policy.text import load_codec
from areal_async.rollout.rewards.reply_rewards import Scores
from areal_async.rollout.slots import SlotSpec, fill_slot
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import ReferenceEngine
from areal_async.trainer.engine.stats import StepStats
from areal_async.trainer.packing.rows import REFERENCE, with_columns
from areal_async.trainer.shards import build_rows
from tests.unit.inference.embedded_engine import Server, restored
from tests.unit.trainer.models import engine_of

pytestmark = pytest.mark.timeout(300)

SAMPLINGS = ({}, {"temperature": 0.5}, {"temperature": 1.7}, {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.6})
"""Of the turns of one conversation, which goes on from each."""


@pytest.fixture(scope="module")
def folder(models: list[Path]) -> Path:
    """What the session's engine serves."""
    return models[0]


@pytest.fixture
def sampled(embedded_server: Server, folder: Path) -> Trajectory:
    """Return a trajectory as the trainer receives it."""
    with restored(embedded_server, folder):
        policy = anyio.run(_converse, str(embedded_server.http.base_url).rstrip("/"), folder)
    place = SlotSpec(
        workflow="w", sibling=0, sample_uid="u", ticket_version="0-0", max_bytes=1 << 20, max_sequence_tokens=500
    )
    sent = fill_slot(policy, Scores(reward=1.0), place, duration_s=0.0)
    payload, headers, _ = encode_message(
        [sent], Ticket(row={}, group_id="0-0-0", workflow="w", version="0-0", group_size=1)
    )
    (slot,) = decode_headers(headers, sequence=1, num_bytes=len(payload)).slots
    return decode_trajectory(payload, slot)


async def _converse(url: str, folder: Path) -> RecordingPolicy:
    pool = ServerPool(["s0"], deadline_s=60)
    pool.admit(pool.servers["s0"], url=url, version="0-0")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            InferenceClient(pool, InferenceSettings(), max_streams=4, vocab_size=1 << 20)
        )
        given = SamplingSettings(max_new_tokens=12, ignore_eos=True, temperature=1.2)
        policy = RecordingPolicy(client, load_codec(str(folder)), given, name="u")
        said = [5, 6, 7]
        for sampling in SAMPLINGS:
            said += (await policy.complete(said, **sampling)).token_ids
            said += [9]
        return policy


def _trained(folder: Path, ranks: Ranks, trajectory: Trajectory) -> StepStats:
    rows, _ = build_rows(
        {0: trajectory},
        advantages={0: np.ones(1, dtype=np.float32)},
        cut=Cut(lineage=0, step=1),
        start=Version(0, 0),
        temperature=1.2,
    )
    model, trainer = ModelSettings(path=str(folder), dtype="float32"), TrainerSettings(token_budget=512)
    said = ReferenceEngine(Settings(model=model, trainer=trainer), ranks).base_logprobs(rows)
    rows = with_columns(rows, {REFERENCE: [one.numpy() for one in said]})
    engine = engine_of(folder, ranks, token_budget=512, algorithm={"kl_coef": 0.1})
    return engine.train_step(rows, step=1, total_steps=1, columns=(REFERENCE,))


def test_every_ratio_is_one_whatever_the_temperature_of_each_turn(
    folder: Path, ranks: Ranks, sampled: Trajectory
) -> None:
    (sequence,) = sampled.sequences
    assert sequence.temperatures is not None
    assert set(sequence.temperatures[sequence.loss_mask].tolist()) == set(
        np.float32([1.2, 0.5, 1.7, 0.0, 0.8]).tolist()
    )

    stats = _trained(folder, ranks, sampled)
    at_one = _trained(folder, ranks, replace(sampled, sequences=[replace(sequence, temperatures=None)]))

    assert stats.num_current_tokens == 12 * len(SAMPLINGS)
    print(f"gap mean {stats.logprob_gap_mean:.1e}, max {stats.logprob_gap_max:.1e}")
    assert stats.logprob_gap_max < 1e-4
    assert stats.ratio_max_deviation < 1e-4
    assert at_one.logprob_gap_max > 0.1, "the test would see it"
    assert stats.kl_mean == pytest.approx(0.0, abs=1e-8)
