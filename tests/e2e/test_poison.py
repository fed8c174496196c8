"""What is stored for a live run is trained, refused or given up; the run goes on, and all others are trained.

With two ranks: ``test_run.py``.
"""

import functools
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random

import anyio
import pytest

from areal_async.bus import Bus, Role, credentials_for, open_bus
from areal_async.config.sources import load_settings
from areal_async.launch.run_directory import RunDirectory
from areal_async.protocol.types import Ticket, Version
from areal_async.protocol.wire import decode
from tests.e2e.test_run import (
    Run,
    assert_accounts,
    assert_one_is_given_up,
    collect,
    continue_trainers,
    events,
    poisonous_call,
)
from tools.hostile_messages import Target, hostile_message

pytestmark = [pytest.mark.timeout(360), pytest.mark.whole_runs]

NUM_HOSTILE = 200
NUM_STEPS = 16


async def _store_hostile(run: Run, *, step: int) -> None:
    """Store hostile trajectories as a node may: for groups that nobody admitted, and some for one that is under way."""
    directory = RunDirectory(run.directory.absolute())
    settings = load_settings(directory.path / "config.yaml", use_environment=False)
    names, random = settings.names, Random(1)
    target = Target(vocab_size=512, workflow="gsm8k", fresh=[Version(1, step)], share_odd=0.0)

    def opened(role: Role) -> AbstractAsyncContextManager[Bus]:
        credentials = credentials_for(settings, directory.path, role)
        return open_bus(directory.read_bus_url(), names=names, role=role, instance="hostile", credentials=credentials)

    async with opened(Role.OPERATOR) as operator, opened(Role.NODE) as node:
        under_way = await operator.read_log(names.tickets_stream, names.all_tickets)
        ids = [decode(one.data, Ticket).group_id for one in under_way[-2:]]
        ids += [f"900-{number}-0" for number in range(NUM_HOSTILE)]
        for group_id in ids[:NUM_HOSTILE]:
            message = hostile_message(random, group_id, target)
            await node.publish(names.trajectories("gsm8k", group_id), message.payload, headers=message.headers)


def test_a_group_that_the_step_fails_with_and_hostile_trajectories_end_nothing_and_all_others_are_trained(
    tmp_path: Path,
) -> None:
    run = Run(
        tmp_path, "hostile", run__steps=NUM_STEPS, rollout__group_size=2, rollout__min_group_size=1, eval__limit=8,
        run__max_failed_groups=8, trainer__checkpoint_every_steps=NUM_STEPS, algorithm__calls=poisonous_call(tmp_path),
    )  # fmt: skip
    # It stands still while they are stored. Killed later, it refuses again what was refused, and its cuts stand.
    run.faults = "trainer.before_step:4:stop trainer.after_step:9:kill"
    with run.start() as process:
        run.wait_for_fault("trainer.before_step", process)
        anyio.run(functools.partial(_store_hostile, run, step=3))
        continue_trainers(run)
        ended = collect(process)

    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("starting trainer again") == 2, "once for the group, once as it was killed"
    assert not events(run, "trainer-0", "replay.ended")
    assert_accounts(run, num_steps=NUM_STEPS, max_staleness=2)
    assert_one_is_given_up(run, by_rank=0)
    refused = {one["reason"] for one in events(run, "trainer-0", "message.buried")}
    assert len(refused) > 20
    trained = {row["group_id"] for row in run.trained if not row["group_id"].startswith("900-")}
    assert len(trained) > NUM_STEPS * 4 - NUM_HOSTILE / 10
    assert all("not_finite" not in line and line["num_skipped"] == 0 for line in run.lines)
