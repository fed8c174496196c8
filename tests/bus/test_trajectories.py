"""What a run's broker knows of trajectories: those that wait, whole, and those that failed, with the reason."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import structlog

from areal_async.bus import EmbeddedBroker, Role
from areal_async.cli.main import main
from areal_async.cli.trajectories import print_list
from areal_async.config.settings import ModelSettings, Settings
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.trajectory_list import TRAINED, Filters, find_stored, select, untrained
from areal_async.protocol.run_state import RunState
from areal_async.protocol.subjects import RUN_STATE
from areal_async.protocol.types import Cut, DeadLetter, Outcome, OutcomeKind
from tests.brokers import OpenRole
from tests.bus.stored import store, trajectory

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()  # a verb silences the log of its process


async def test_what_waits_and_what_failed_is_listed_with_its_reason_and_shown_whole(open_role: OpenRole) -> None:
    bus = await open_role(Role.OPERATOR)
    await bus.publish(bus.names.cuts, Cut(lineage=1, step=4))
    for kind, group in ((OutcomeKind.TRAINED, "0-1-0"), (OutcomeKind.DEAD, "0-2-0")):
        outcome = Outcome(group_id=group, kind=kind, lineage=1, reason="RewardError: no JSON", workflow="w")
        await bus.publish(bus.names.outcomes, outcome)
    await store(bus, "0-3-0", [0, 1], group_size=3, version="1-2")
    await store(bus, "0-3-0", [2], group_size=3, version="1-2", failed="KeyError: 'x'")
    letter = DeadLetter(
        stream="s", subject=bus.names.trajectories("w", "0-4-0"), sequence=1, reason="bad crc", reader="trainer"
    )
    await bus.publish(bus.names.undecodable, letter)

    found = {entry.id: entry for entry in await untrained(bus)}

    assert {name: (one.state, one.error) for name, one in found.items()} == {
        "0-2-0": ("dead", "dead: RewardError: no JSON"),
        "0-3-0.0": ("stored", ""),
        "0-3-0.1": ("stored", ""),
        "0-3-0.2": ("failed", "failed: KeyError: 'x'"),
        "0-4-0": ("undecodable", "undecodable: bad crc"),
    }
    assert found["0-3-0.1"].reward == 1.0
    assert [one.near_step for one in found.values()] == [5, 5, 5, 4, 4]
    failed = select([], found.values(), filters=Filters(error=""), sort="newest", is_reversed=False, limit=0)
    assert [one.id for one in failed] == ["0-3-0.2", "0-2-0", "0-4-0"]
    whole = await find_stored(bus, found["0-3-0.1"])
    assert whole.sequences[0].token_ids.tolist() == trajectory("0-3-0", 1).sequences[0].token_ids.tolist()
    with pytest.raises(UserError, match="it is not stored any more"):
        await find_stored(bus, found["0-3-0.1"]._replace(id="0-3-0.7", sibling=7))


@pytest.mark.parametrize("subject", ["x", "", "areal.r.trajectories.[/b]\x1b[2J.[/i]\x9b"])
async def test_a_letter_about_any_subject_is_listed(
    open_role: OpenRole, subject: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every role may write one, nodes too."""
    node, operator = await open_role(Role.NODE), await open_role(Role.OPERATOR)
    letter = DeadLetter(stream="s", subject=subject, sequence=1, reason="bad crc", reader="trainer")
    await node.publish(node.names.undecodable, letter)

    found = await untrained(operator)
    print_list(found, limit=0)

    assert [one.error for one in found] == ["undecodable: bad crc"]
    told = capsys.readouterr().out
    assert "bad crc" in told
    assert not set(told) & set("\x1b\x9b")


@pytest.mark.parametrize(
    ("state", "is_over"), [("running", False), ("stopped", False), ("failed", False), ("finished", True)]
)
async def test_what_waits_is_left_over_once_its_run_has_finished(
    open_role: OpenRole, state: str, is_over: bool
) -> None:
    bus = await open_role(Role.OPERATOR)
    await bus.put(RUN_STATE, RunState(state=state))
    await store(bus, "0-3-0", [0], group_size=2, version="1-2")
    await store(bus, "0-3-0", [1], group_size=2, version="1-2", failed="KeyError: 'x'")

    left, failed = await untrained(bus)

    assert failed.error == "failed: KeyError: 'x'"
    assert left.state == ("left" if is_over else "stored")
    assert left.error == ("left: its run finished before it was trained" if is_over else "")
    trained = left._replace(state=TRAINED, error="", step=3)
    assert select([trained], [left], filters=Filters(), sort="newest", is_reversed=False, limit=0) == [trained]


async def test_what_waits_is_exported_with_its_texts(
    settings: Settings, broker: EmbeddedBroker, open_role: OpenRole, tmp_path: Path
) -> None:
    directory, bus = RunDirectory(settings.run_directory), await open_role(Role.OPERATOR)
    directory.write_settings(settings.model_copy(update={"model": ModelSettings(path=str(tmp_path / "no-model"))}))
    directory.write_bus_url(broker.url)
    await bus.publish(bus.names.outcomes, Outcome(group_id="0-2-0", kind=OutcomeKind.STALE, lineage=1))
    await store(bus, "0-3-0", [0, 1], group_size=3, version="1-2")
    await store(bus, "0-3-0", [2], group_size=3, version="1-2", failed="KeyError: 'x'")

    with directory.locked("test"):
        for suffix in ("csv", "jsonl"):
            words = ["trajectories", "--run", str(directory.path), "--export", str(tmp_path / f"out.{suffix}")]
            assert await anyio.to_thread.run_sync(main, words) == 0

    with (tmp_path / "out.csv").open(newline="") as file:
        facts = {row["id"]: row for row in csv.DictReader(file)}
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {name: row["state"] for name, row in facts.items()} == {
        "0-2-0": "stale", "0-3-0.0": "stored", "0-3-0.1": "stored", "0-3-0.2": "failed"
    }  # fmt: skip
    texts = {line["id"]: "".join(one["text"] for one in line["sequences"]) for line in lines}
    assert [line["sequences"][0]["trained"] for line in lines if line["state"] == "stored"] == [None, None]
    for name in ("0-3-0.0", "0-3-0.1"):
        ids = trajectory("0-3-0", int(name[-1])).sequences[0].token_ids
        assert facts[name]["prompt"] + facts[name]["answer"] == texts[name] == "".join(f"<{one}>" for one in ids)
