"""What is stored for a live run is trained, refused or given up; the run goes on, and all others are trained."""

import functools
import json
import os
import signal
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
from tests.e2e.test_run import Run, assert_accounts, collect, events, role_processes
from tools.hostile import Target, hostile_message

pytestmark = pytest.mark.timeout(360)

CALL = '''
import os
from pathlib import Path


def advantages(rows, advantages):
    """Fail with the longest trajectory that the last rank holds first; in its children too."""
    if "POISON" not in os.environ and os.environ.get("RANK", "0") == "LAST":
        try:
            Path(__file__).with_name("marked").touch(exist_ok=False)
        except FileExistsError:  # a later attempt may sample the same again
            pass
        else:
            os.environ["POISON"] = max(rows, key=lambda row: row.num_tokens).token_ids.tobytes().hex()
    if any(row.token_ids.tobytes().hex() == os.environ.get("POISON") for row in rows):
        raise ValueError("a row that no step can take")
    return advantages
'''


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_group_that_the_step_fails_with_is_given_up_and_the_others_of_its_cut_are_trained(
    num_ranks: int, tmp_path: Path
) -> None:
    call = tmp_path / "call.py"
    call.write_text(CALL.replace("LAST", str(num_ranks - 1)))
    run = Run(
        tmp_path, "poison", run__steps=3, trainer__num_ranks=num_ranks, eval__limit=8,
        algorithm__calls=json.dumps([f"{call}:advantages"]),
    )  # fmt: skip

    ended = run.finish()

    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("starting trainer again") == 1, ended.stdout
    assert_accounts(run, num_steps=3, max_staleness=2)
    (given_up,) = events(run, f"trainer-{num_ranks - 1}", "group.given_up")
    assert given_up["reason"] == "ValueError: a row that no step can take"
    assert given_up["group_id"] not in {row["group_id"] for row in run.trained}
    first = [row for row in run.trained if row["step"] == 1]
    assert len({row["group_id"] for row in first}) == 3  # of a batch of four


NUM_HOSTILE = 200


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


def test_hostile_trajectories_in_a_live_run_end_nothing_and_all_others_are_trained(tmp_path: Path) -> None:
    run = Run(
        tmp_path, "hostile", run__steps=8, rollout__group_size=2, rollout__min_group_size=1, eval__limit=8,
        run__max_failed_groups=8, trainer__checkpoint_every_steps=8,
    )  # fmt: skip
    with run.start() as process:
        run.wait_for_step(2, process)
        anyio.run(functools.partial(_store_hostile, run, step=len(run.lines)))
        run.wait_for_step(5, process)
        for pid in role_processes(run, "trainer"):  # what was refused is refused again, and its cuts stand
            os.kill(pid, signal.SIGKILL)
        ended = collect(process)

    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("starting trainer again") == 1, ended.stdout
    assert not events(run, "trainer-0", "replay.ended")
    assert_accounts(run, num_steps=8, max_staleness=2)
    refused = {one["reason"] for one in events(run, "trainer-0", "message.buried")}
    assert len(refused) > 20
    trained = {row["group_id"] for row in run.trained if not row["group_id"].startswith("900-")}
    assert len(trained) > 8 * 4 - NUM_HOSTILE / 10
    assert all("not_finite" not in line and line["num_skipped"] == 0 for line in run.lines)
