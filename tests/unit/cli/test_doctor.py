"""What the doctor prints: verdicts for people with the first ids and their number, everything for machines."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from areal_async.cli.main import main
from areal_async.doctor.audit.report import Diagnosis, Violation, ViolationKind, rule
from areal_async.doctor.audit.screen import MAX_SHOWN, show
from areal_async.errors import UserError
from areal_async.launch.run_directory import find_run


def diagnosis(*, num_lost: int) -> Diagnosis:
    findings = [Violation(ViolationKind.LOST, f"0-{index}-0.0.n", "gone") for index in range(num_lost)]
    return Diagnosis(
        run="r",
        is_live=False,
        is_finished=False,
        checkpoint="1-4",
        groups={"admitted": 3},
        slots={"lost": num_lost},
        notes=["a note"],
        rulings=[
            rule("P1", "durable", "9 trajectories", findings=findings),
            rule("P7", "covered", "3 prompts", findings=[], missing=["the data"]),
        ],
    )


def shown(one: Diagnosis) -> str:
    console = Console(file=io.StringIO(), width=100)
    show(one, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_first_ids_are_printed_and_the_number_of_all() -> None:
    text = shown(diagnosis(num_lost=MAX_SHOWN + 3))

    assert "P1 is refuted by 23:" in text
    assert f"0-{MAX_SHOWN - 1}-0.0.n: gone" in text
    assert f"0-{MAX_SHOWN}-0.0.n" not in text
    assert "and 3 more; --json lists them all" in text
    assert "P7 lacks for a proof: the data" in text
    assert "note: a note" in text


def test_json_has_every_id() -> None:
    plain = json.loads(json.dumps(diagnosis(num_lost=23).as_json()))

    assert plain["is_clean"] is False
    assert [len(one["findings"]) for one in plain["rulings"]] == [23, 0]
    assert [one["verdict"] for one in plain["rulings"]] == ["refuted", "not decidable"]


def test_what_is_not_decidable_is_clean() -> None:
    assert diagnosis(num_lost=0).is_clean


def test_a_run_is_found_by_name_among_the_runs_here_or_by_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path / "runs" / "one", tmp_path / "elsewhere"):
        path.mkdir(parents=True)
        (path / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)

    assert find_run("one").path == tmp_path / "runs" / "one"
    assert find_run("elsewhere").path == tmp_path / "elsewhere"
    for name in ("two", "runs/one/config.yaml"):
        with pytest.raises(UserError, match=f"got {name}, need the name of a run in runs, or a run's directory"):
            find_run(name)


def test_a_run_that_is_not_there_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--run", "no-such-run"]) == 2
    assert capsys.readouterr().err.startswith("--run: got no-such-run, need ")


def test_the_graph_of_a_step_is_drawn_from_settings_alone(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--graph", "configs/gsm8k_cpu.yaml", "--algorithm.name", "ppo"])

    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines[0] == "flowchart TD"
    assert '  train_critic["train_critic<br/>train critic"]' in lines
    assert "  gae -- advantages --> train_actor" in lines


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "got neither a run nor settings; name FILE.py, --run NAME or --graph FILE.yaml"),
        (["--run", "r", "--algorithm.name", "ppo"], "got --algorithm.name with --run"),
    ],
)
def test_a_doctor_without_a_patient_says_so(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == UserError.exit_code
    assert sentence in capsys.readouterr().err
