"""What a run has sampled is found by what one remembers of it, and shown token by token as it was trained."""

import csv
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from areal_async.cli.main import main
from areal_async.config.settings import ModelSettings, RunSettings, Settings
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.recorded_text import draw
from areal_async.monitor.text import json_text
from areal_async.monitor.token_views import IdDetokenizer, TokenKind, token_views
from areal_async.monitor.trajectory_export import export
from areal_async.monitor.trajectory_list import STORED, Entry, Filters, archived, entry_of, select
from areal_async.monitor.transcript import GIVEN, MASKED, shade
from areal_async.trainer.output.archive_reader import read_recorded
from tests.unit.trainer.archives import LENGTH, PROMPT, REWARDS, archive_step, trajectory


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run of three archived steps, whose broker was never started."""
    directory = RunDirectory(tmp_path / "made")
    settings = Settings(
        run=RunSettings(name="made", directory=tmp_path), model=ModelSettings(path=str(tmp_path / "no-model"))
    )
    directory.write_settings(settings)
    for step in (1, 2, 3):
        archive_step(directory.path, step)
    return directory.path


def _listed(capsys: pytest.CaptureFixture[str], run_directory: Path, *words: str) -> list[dict[str, object]]:
    assert main(["trajectories", "--run", str(run_directory), "--json", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["--step", "2"], [f"0-2-0.{sibling}" for sibling in range(4)]),
        (["--step", "2-3", "--limit", "1"], ["0-3-0.0"]),
        (["--min-reward", "2"], ["0-3-0.3", "0-2-0.3", "0-1-0.3"]),
        (["--max-reward", "0", "--step", "1"], ["0-1-0.1", "0-1-0.2"]),
        (["--version", "1-2", "--limit", "2"], ["0-3-0.0", "0-3-0.1"]),
        (["--version", "0", "--min-reward", "1"], ["0-2-0.0", "0-2-0.3", "0-1-0.0", "0-1-0.3"]),
        (["--min-tokens", "13"], []),
        (["--max-tokens", "12", "--limit", "2"], ["0-3-0.0", "0-3-0.1"]),
        (["--workflow", "other"], []),
        (["--error", ""], []),
        (["--failed"], []),
        (["--sort", "reward", "--limit", "2"], ["0-3-0.3", "0-2-0.3"]),
        (["--sort", "step", "--reverse", "--limit", "1"], ["0-1-0.0"]),
    ],
)
def test_the_archive_is_listed_newest_first_and_filtered(
    words: list[str], ids: list[str], run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [one["id"] for one in _listed(capsys, run_directory, *words)] == ids


def test_a_run_whose_broker_cannot_be_asked_still_has_its_archive(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trajectories", "--run", str(run_directory), "--limit", "1"]) == 0

    told = capsys.readouterr()
    assert "0-3-0.0" in told.out
    assert "only what was trained is listed" in told.err


def test_what_the_run_went_back_behind_is_shown_as_that(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_directory / "trajectories"
    (folder / "abandoned").mkdir()
    (folder / "step-000003-1-0.parquet").rename(folder / "abandoned" / "step-000003-1-0.parquet")

    assert main(["trajectories", "--run", str(run_directory), "--show", "0-3-0.2", "--json"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert (shown["id"], shown["state"], shown["error"]) == ("0-3-0.2", "rolled_back", "its cut was given up")


def test_of_the_newest_no_more_files_are_read_than_are_listed(run_directory: Path) -> None:
    (run_directory / "trajectories" / "step-000001-1-0.parquet").write_bytes(b"damaged")

    newest = select(
        archived(run_directory), [], filters=Filters(), sort="newest", is_reversed=False, limit=2 * len(REWARDS)
    )

    assert [one.step for one in newest] == [3] * 4 + [2] * 4


def _untrained(name: str, state: str, **fields: object) -> Entry:
    base = entry_of_first()._replace(id=name, state=state, step=None, advantage=None, near_step=2)
    return base._replace(**fields)  # type: ignore[arg-type]


def entry_of_first() -> Entry:
    return Entry(
        id="", state="", step=1, group="", sibling=0, workflow="w", reward=None, advantage=None, tokens=None,
        output_tokens=None, turns=None, oldest="", newest="", error="", truncated=None, near_step=1,
    )  # fmt: skip


WITH_A_REASON = ("dead", "undecodable", "rejected", "stale", "filtered", "abandoned")


def test_what_is_archived_and_still_stored_is_listed_once_and_errors_are_found_by_their_reason(
    run_directory: Path,
) -> None:
    others = [
        _untrained("0-3-0.0", STORED, near_step=4),
        _untrained("0-9-0.1", STORED, near_step=4),
        _untrained("0-8-0", "failed", error="failed: RewardError: no JSON"),
        *(_untrained(f"0-{7 - place}-0", state, error=state) for place, state in enumerate(WITH_A_REASON)),
    ]

    everything = select(archived(run_directory), others, filters=Filters(), sort="newest", is_reversed=False, limit=0)
    failed = select(
        archived(run_directory), others, filters=Filters(error="rewarderror"), sort="newest", is_reversed=False, limit=0
    )

    broken = select([], others, filters=Filters(failed=True), sort="newest", is_reversed=False, limit=0)

    assert [one.id for one in everything][:2] == ["0-9-0.1", "0-3-0.0"]
    assert len(everything) == 3 * len(REWARDS) + 2 + len(WITH_A_REASON)
    assert [one.id for one in failed] == ["0-8-0"]
    assert [one.state for one in broken] == ["failed", "dead", "undecodable"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--show", "0-77-0.1"], "bus/url: cannot be read; start the run first"),
        (["--sort", "size"], "--sort: got size, need one of newest, step, group, "),
        (["--step", "x"], "--step: got x, need a step like 5, or steps like 5-9"),
        (["--version", "1-x"], "--version: got 1-x, need <lineage>-<step> like 1-42, or a step alone"),
        (["--export", "/proc/no/x.jsonl"], "--export: got /proc/no/x.jsonl, need what can be written: No such file or"),
        (["--export", "/dev/null/x.csv"], "--export: got /dev/null/x.csv, need what can be written: "),
        (["--limit", "-3"], "--limit: got -3, need how many to list; 0 lists all"),
        (["--export", "x.txt"], "--export: got x.txt, need a name that ends in .jsonl, .parquet, .csv"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], says: str, run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trajectories", "--run", str(run_directory), *words]) == 2
    assert says in capsys.readouterr().err


def test_a_list_whose_reader_has_gone_ends_as_of_a_broken_pipe(run_directory: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    done = subprocess.run(
        [sys.executable, "-m", "areal_async", "trajectories", "--run", str(run_directory)], stdout=writer
    )

    os.close(writer)
    assert done.returncode == 141


def test_what_is_no_number_is_null_in_json(tmp_path: Path) -> None:
    lost = _untrained("0-8-0", "failed", error="")._replace(reward=math.nan, advantage=math.inf)
    path = tmp_path / "out.jsonl"

    export(path, [lost], {}, IdDetokenizer())

    (line,) = path.read_text().splitlines()
    read = json.loads(line, parse_constant=pytest.fail)
    assert (read["reward"], read["advantage"]) == (None, None)
    assert json.loads(json_text(lost._asdict()), parse_constant=pytest.fail)["id"] == "0-8-0"


def test_every_export_holds_what_was_asked_for(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in ("jsonl", "parquet", "csv"):
        path = run_directory / f"out.{suffix}"
        assert main(["trajectories", "--run", str(run_directory), "--step", "2", "--export", str(path)]) == 0
    said = capsys.readouterr().out

    lines = [json.loads(line) for line in (run_directory / "out.jsonl").read_text().splitlines()]
    rows = pq.read_table(run_directory / "out.parquet").to_pylist()
    with (run_directory / "out.csv").open(newline="") as file:
        facts = list(csv.DictReader(file))
    assert said.count("4 trajectories written to ") == 3
    for place, (line, row, fact) in enumerate(zip(lines, rows, facts, strict=True)):
        (wanted,) = trajectory(2, place).sequences
        for one in (line, row):
            (sequence,) = one["sequences"]
            assert sequence["token_ids"] == wanted.token_ids.tolist()
            assert sequence["trained"] == wanted.loss_mask.tolist()
            assert sequence["versions"] == [None] * PROMPT + ["1-0"] * 4 + ["1-1"] * 4
            assert sequence["text"] == "".join(f"<{one}>" for one in wanted.token_ids)
        assert (fact["id"], float(fact["reward"])) == (f"0-2-0.{place}", REWARDS[place])
        assert fact["prompt"] == "".join(f"<{one}>" for one in wanted.token_ids[:PROMPT])
        assert fact["prompt"] + fact["answer"] == sequence["text"]


def test_a_token_is_given_trained_or_masked_and_marked_where_its_version_changes(tmp_path: Path) -> None:
    archive_step(tmp_path, 2, max_staleness=0, masks_stale=True)
    (recorded, *_) = read_recorded(list(tmp_path.glob("trajectories/*")))
    (sequence,) = recorded.trajectory.sequences

    views = token_views(sequence, IdDetokenizer(), recorded.trained_mask(sequence))
    drawn = draw(entry_of(recorded), recorded.trajectory, IdDetokenizer(), recorded=recorded, with_tokens=False)

    assert [view.kind for view in views] == [TokenKind.GIVEN] * 4 + [TokenKind.MASKED] * 4 + [TokenKind.TRAINED] * 4
    assert [place for place, view in enumerate(views) if view.begins_version] == [PROMPT, PROMPT + 4]
    assert [view.version for view in views] == [""] * PROMPT + ["1-0"] * 4 + ["1-1"] * 4
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="256", highlight=False)
    texts = {view.text for view in views}
    drawn_tokens = [(one.text, str(one.style)) for one in console.render(drawn) if one.text in texts]
    own = {TokenKind.GIVEN: GIVEN, TokenKind.MASKED: MASKED}
    assert drawn_tokens == [(view.text, own.get(view.kind) or shade(view.logprob)) for view in views]
    assert len(views) == LENGTH
    text = "".join(segment.text for segment in console.render(drawn))
    assert text.index("‹1-0›") < text.index("‹1-1›")
