"""``models`` lists what is kept of all runs, and deletes of stopped ones what they do not need; the broker is real."""

import json
from collections.abc import Iterator

import anyio
import pytest
import structlog

from areal_async.bus import EmbeddedBroker, Role, declare, open_bus
from areal_async.cli.main import main
from areal_async.config.change_record import record_change
from areal_async.config.settings import Settings
from areal_async.launch.run_directory import RunDirectory
from areal_async.process.atomic_folders import LEDGER
from areal_async.protocol.events import RunOrdered
from areal_async.protocol.run_state import RunState
from areal_async.protocol.subjects import ADMITTED, CHECKPOINT, LINEAGE, RUN_STATE
from areal_async.protocol.types import Admitted, CheckpointRecord, Cut, CutKind, LineageRecord, WeightsVersion
from areal_async.versions import tags
from areal_async.versions.tags import Tag


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()  # a verb silences the log of its process


@pytest.fixture
def stopped(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that was stopped, whose newest checkpoint but one is what it goes on from."""

    async def make() -> None:
        broker = EmbeddedBroker(settings)
        await broker.start()
        try:
            key = broker.credentials(Role.OPERATOR)
            async with open_bus(broker.url, names=settings.names, role=Role.OPERATOR, credentials=key) as bus:
                await declare(bus, settings)
                await bus.put(RUN_STATE, RunState(state="stopped"))
                await bus.publish(bus.names.cuts, Cut(kind=CutKind.BEGIN, lineage=1, step=0))
                await bus.put(ADMITTED, Admitted(total=1, num_fresh=1))
                await bus.put(LINEAGE, LineageRecord(lineage=1))
                await bus.put(CHECKPOINT, CheckpointRecord(version="1-8", path="x"))
                await bus.put(bus.names.weights_key(), WeightsVersion(version="1-9", on_disk="1-7"))
            directory.write_settings(settings)
            directory.write_bus_url(broker.url)
        finally:
            await broker.aclose()

    directory = RunDirectory(settings.run_directory)
    anyio.run(make)
    for folder, steps in (("checkpoints", (2, 4, 6, 8, 10)), ("weights", (5, 7, 9, 10))):
        for step in steps:
            path = directory.path / folder / f"1-{step}"
            path.mkdir(parents=True)
            (path / LEDGER).write_text("{}")
    tags.write(directory.path, Tag(tag="champion", version="1-4"))
    monkeypatch.setenv("COLUMNS", "200")
    return directory


def _there(stopped: RunDirectory) -> set[str]:
    return {f"{path.parent.name}/{path.name}" for path in stopped.path.glob("*/1-*")}


def test_a_stopped_run_keeps_what_it_needs_and_a_dry_run_keeps_all(
    stopped: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    before, folder = _there(stopped), str(stopped.path.parent)

    assert main(["models", "--folder", folder, "--delete", "untagged"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("3 folders of 6 B would be deleted; --yes deletes them\n")
    assert _there(stopped) == before

    assert main(["models", "--folder", folder, "--delete", "untagged", "--yes"]) == 0
    assert before - _there(stopped) == {"checkpoints/1-2", "checkpoints/1-6", "weights/1-5"}
    assert capsys.readouterr().out.endswith("3 folders of 6 B deleted\n")


def test_nothing_of_a_live_run_is_deleted_nor_of_one_that_cannot_be_asked(
    stopped: RunDirectory, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    before, wanted = _there(stopped), ["models", "--folder", str(stopped.path.parent), "--delete", "untagged", "--yes"]
    with stopped.locked("test"):
        assert main(wanted) == 1
        assert main(wanted[:-1]) == 0, "who only looks has made no mistake"
    assert "test: nothing of it is deleted: it lives" in capsys.readouterr().out
    (stopped.path / "bus" / "url").unlink()

    assert main(wanted) == 1

    assert "test: nothing of it is deleted: " in capsys.readouterr().out
    assert _there(stopped) == before


def test_what_is_kept_is_a_table_or_objects(stopped: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--folder", str(stopped.path.parent)]) == 0
    table = capsys.readouterr().out
    assert main(["models", "--run", str(stopped.path), "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    row = next(line for line in table.splitlines() if "1-4" in line)
    assert row.split()[:5] == ["test", "1-4", "champion", "checkpoint", "2"]
    assert [(one["version"], one["kinds"]) for one in objects][:2] == [("1-2", ["checkpoint"]), ("1-4", ["checkpoint"])]


def test_a_narrow_screen_shortens_hashes_and_no_name(
    stopped: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tags.write(stopped.path, Tag(tag="candidate_of_the_week", version="1-8"))
    monkeypatch.setenv("COLUMNS", "80")

    assert main(["models", "--folder", str(stopped.path.parent)]) == 0

    table = capsys.readouterr().out
    assert "champion" in table
    assert "candidate_of_the_week" in table
    assert "…" not in table


def test_a_damaged_run_is_told_of_and_the_others_are_listed(
    stopped: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    other = stopped.path.parent / "other"
    other.mkdir()
    (other / "config.yaml").touch()
    (other / "tags.jsonl").write_text("{}\n")

    assert main(["models", "--folder", str(other.parent)]) == 1

    out = capsys.readouterr().out
    assert "other: " in out
    assert "line 1 is no tag" in out
    assert "champion" in out


def test_the_audit_trail_is_a_table_or_objects(stopped: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    record_change(stopped.path, RunOrdered(order="stop", by="ann", reason="lunch\x1b[2J"))

    assert main(["models", "--run", str(stopped.path), "--audit"]) == 0
    table = capsys.readouterr().out
    assert main(["models", "--run", str(stopped.path), "--audit", "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert "tag champion: none -> 1-4" in table
    assert "lunch\\x1b[2J" in table
    assert [one["what"] for one in objects] == ["tag champion: none -> 1-4", "stop"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--audit"], "--audit: got no --run, need the run whose trail it is"),
        (["--delete", "old"], "--delete: got old, need a rule (untagged: what has no tag; abandoned: "),
        (["--yes"], "--yes: got no --delete"),
        (["--delete", "untagged", "--keep-newest", "0"], "--keep-newest: got 0, need at least 1"),
        (["--folder", "nowhere"], "--folder: got nowhere, need a folder of runs"),
        (["--run", "x", "--audit", "--delete", "untagged"], "--delete: got --audit as well"),
    ],
)
def test_what_means_nothing_is_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", *words]) == 2

    assert sentence in capsys.readouterr().err
