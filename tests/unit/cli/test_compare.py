"""``compare`` refuses what cannot be compared in one sentence each, before anything is asked."""

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from areal_async.cli.compare.contenders import contenders, pair
from areal_async.cli.compare.verb import place_of, take_evaluated, tell, text_of
from areal_async.cli.main import VERBS, main, split_overrides
from areal_async.config.sources import dump_settings, load_settings
from areal_async.errors import UserError
from areal_async.protocol.types import Version
from areal_async.rollout.user_code.source_hashes import source_hashes
from areal_async.versions import evaluations
from areal_async.versions.comparison import opened
from areal_async.versions.evaluations import asked_of
from tests.unit.environments.harbor_tasks import make_tasks
from tests.unit.versions.test_comparison import comparison, rewarded


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory laid out like the repository with two runs that are over, and no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name in ("configs", "workflows", "model", "other", "temporary"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "workflows" / "mine.py").write_text("async def mine(prompt, policy):\n    return 1.0\n")
    for name in ("model", "other"):
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "tokenizer.json").write_text("{}")
    for name in ("rows", "others"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    common = "model: {path: ../model}\ntasks: [{workflow: ../workflows/mine.py, dataset: {path: ../rows.jsonl}}]\n"
    (tmp_path / "configs" / "mine_cpu.yaml").write_text(common + "eval: {dataset: {path: ../rows.jsonl}}\n")
    for name, dtype in (("one", "float32"), ("two", "bfloat16")):
        for version in ("1-2", "1-4"):
            (tmp_path / "runs" / name / "checkpoints" / version).mkdir(parents=True)
        words = ["--run.name", name, "--model.dtype", dtype, "--rollout.template.arguments", f"{{of: {name}}}"]
        settings = load_settings(Path("configs/mine_cpu.yaml"), words)
        (tmp_path / "runs" / name / "config.yaml").write_text(dump_settings(settings))
    return tmp_path


FILE = "workflows/mine.py"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "compare: got none of FILE.py, --run, --runs, need one: "),
        ([FILE, "--run", "one"], "compare: got FILE.py and --run of FILE.py, --run, --runs, need one: "),
        (["--run", "one", "--runs", "one,two"], "compare: got --run and --runs of "),
        (["--run", "one", "--models", "model,other"], "--models: got it with --run, which has its own; "),
        (["--runs", "one,two", "--servers", "http://a:1"], "--servers: got it with --runs, which has its own; "),
        ([FILE, "--versions", "1-2,1-4"], "--versions: got it with FILE.py, which has its own; "),
        ([FILE, "--models", "a,b", "--servers", "http://a:1"], "--models: got --servers as well, "),
        (
            [FILE, "--models", "a,b,c"],
            "--models: got a,b,c, need two with a comma between, or one that both sides have",
        ),
        ([FILE, "--models", "model,"], "--models: got model,, need two with a comma between, "),
        (["--run", "one", "--versions", "1-2,1-4", "--limit", "0"], "--limit: got 0, need at least 1\n"),
        (["--run", "one", "--versions", "1-2,1-4", "--samples", "0"], "eval.samples: got '0', need at least 1; "),
        (["--run", "one", "--at-least", "nan"], "--at-least: got nan, need a number\n"),
        (["--run", "one", "--at-least", "much"], "argument --at-least: invalid float value: 'much'; "),
        (["--run", "one", "--b", "rollout.sampling.top_k"], "--b: got rollout.sampling.top_k, need SETTING=VALUE "),
        (
            ["--run", "one", "--b", "run.seed=3"],
            "--b: got run.seed=3, need SETTING=VALUE of a setting that begins with ",
        ),
        (["--run", "one", "--b", "rollout.sampling.topk=1"], "unknown setting rollout.sampling.topk on the command "),
        (["--run", "none", "--versions", "1-2,1-4"], "--run: got none, need the name of a run in "),
        (["--run", "one", "--versions", "1-2,1-7"], "--versions: "),
        (["--run", "one", "--output", "/dev/null/x"], "--output: got /dev/null/x, need what can be written: "),
        (["--run", "one", "--versions", "1-2,1-2"], "compare: got 1-2 and the same again, need two that answer "),
        (["--run", "one", "--versions", "1-4,last"], "compare: got 1-4 and the same again, need two that answer "),
        (["--run", "one"], "compare: got 1-4 and the same again, need two that answer otherwise; "),
        (["--run", "one", "--b", "inference.num_servers=2"], "compare: got 1-4 inference.num_servers=2 and the same "),
        (["--run", "one", "--b", "tasks.0.eval.limit=3"], "--b: got other tasks or rows for the second side, "),
        (
            [FILE, "--b", "tasks.0.eval.dataset.path=others.jsonl"],
            "eval.dataset: got one beside tasks.0.eval.dataset, ",
        ),
        ([FILE, "--models", "model,./none"], "model.path: no folder ./none; "),
        ([FILE, "--models", "model,other", "--eval.dataset.path", "no.jsonl"], "eval.dataset.path: no file no.jsonl; "),
        (["workflows/no.py", "--models", "model,other"], "workflow: no file workflows/no.py; "),
    ],
)
def test_mistakes_get_one_sentence_and_leave_nothing_behind(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    assert main(["compare", *words]) == 2

    error = capsys.readouterr().err
    assert error.startswith(sentence)
    assert error.count("\n") == 1
    assert list((place / "temporary").iterdir()) == []
    assert not [*place.glob("runs/**/comparisons")]


def sides(*words: str) -> Any:
    parser = argparse.ArgumentParser()
    for name, keywords in VERBS["compare"].arguments:
        parser.add_argument(name, **keywords)
    own, overrides = split_overrides(words, VERBS["compare"])
    with ExitStack() as stack:
        return contenders(parser.parse_args(own), overrides, stack)


def test_a_temperature_tells_sides_apart_where_answers_are_sampled() -> None:
    words = ["--run", "one", "--versions", "1-2", "--b", "rollout.sampling.temperature=0.5"]

    with pytest.raises(UserError, match="a temperature counts from --samples 2 on"):
        sides(*words)
    a, b = sides(*words, "--samples", "2")
    assert (a.side.name, b.side.name) == ("1-2", "1-2 rollout.sampling.temperature=0.5")
    assert (a.side.settings, b.side.settings) == ({}, {"rollout.sampling.temperature": "0.5"})
    temperatures = [one.settings.eval_sampling_of("mine").temperature for one in (a, b)]
    assert temperatures == [1.0, 0.5]


def test_a_template_tells_sides_apart() -> None:
    a, b = sides("--run", "one", "--b", "rollout.template.arguments={of: none}")

    assert (a.settings.rollout.template.arguments, b.settings.rollout.template.arguments) == (
        {"of": "one"},
        {"of": "none"},
    )


def test_of_two_runs_only_model_and_template_are_the_seconds_own() -> None:
    a, b = sides("--runs", "one,two", "--versions", "1-2,last")

    assert [(one.side.name, one.side.run, one.side.version) for one in (a, b)] == [
        ("one/1-2", "one", "1-2"),
        ("two/1-4", "two", "1-4"),
    ]
    assert b.settings.rollout.template.arguments == {"of": "two"}
    assert (a.settings.model.dtype, b.settings.model.dtype) == ("float32", "bfloat16")
    assert b.settings.model_copy(update={"rollout": a.settings.rollout, "model": a.settings.model}) == a.settings
    assert place_of(None, b, "id") == Path("runs/two/comparisons/id").absolute()


def test_what_an_evaluation_has_got_to_the_same_questions_is_not_asked_again(place: Path) -> None:
    a, _ = sides("--run", "one", "--versions", "1-2,1-4")
    rows, run = {"mine": "rows"}, place / "runs" / "one"
    asked = asked_of(a.settings, "mine", rows="rows", code=source_hashes([a.settings.tasks[0].workflow]))
    line = {"eval_id": "1-2", "oldest": "1-2", "newest": "1-2", "workflow": "mine", "asked": asked}
    (run / "eval.jsonl").write_text(json.dumps(line) + "\n")
    evaluations.write(run, Version(1, 2), [evaluations.Answer(task="mine", row=row, reward=1.0) for row in range(3)])
    with opened(place / "c", comparison(mine=2)) as folder:
        take_evaluated(folder, "a", a, rows)

        assert [(one.asked, one.reward, one.version) for one in folder.answers] == [
            (("a", "mine", 0, 0), 1.0, "1-2"), (("a", "mine", 1, 0), 1.0, "1-2"),
        ]  # fmt: skip
        assert len(folder.left) == 2
    assert a.evaluated({"mine": "others"}) == []
    (place / "workflows" / "mine.py").write_text("async def mine(prompt, policy):\n    return 0.5\n")
    assert a.evaluated(rows) == []


def test_an_agent_that_was_changed_is_asked_again(place: Path) -> None:
    tasks = make_tasks(place / "tasks", 1)
    (place / "agents").mkdir()
    agent = place / "agents" / "mine.py"
    agent.write_text("async def mine(prompt, policy, box):\n    pass\n")
    run = place / "runs" / "one"
    words = ["--tasks.0.workflow", f"harbor:{tasks}", "--env.agent", "agents/mine.py", "--run.name", "one"]
    (place / "env.yaml").write_text("model: {path: ./model}\neval: {dataset: {path: rows.jsonl}}\n")
    settings = load_settings(place / "env.yaml", words)
    (run / "config.yaml").write_text(dump_settings(settings))
    a, _ = sides("--run", "one", "--versions", "1-2,1-4")
    asked = asked_of(a.settings, "tasks", rows="rows", code=source_hashes(["agents/mine.py"]))
    line = {"eval_id": "1-2", "oldest": "1-2", "newest": "1-2", "workflow": "tasks", "asked": asked}
    (run / "eval.jsonl").write_text(json.dumps(line) + "\n")
    evaluations.write(run, Version(1, 2), [evaluations.Answer(task="tasks", row=0, reward=1.0)])
    before = a.question
    assert len(a.evaluated({"tasks": "rows"})) == 1

    agent.write_text("async def mine(prompt, policy, box):\n    await box.run('true')\n")

    assert a.evaluated({"tasks": "rows"}) == []
    assert a.question != before


def test_settings_given_to_both_are_both_sides_and_the_second_has_its_own_beside() -> None:
    a, b = sides(FILE, "--models", "model,other", "--model.dtype", "float32", "--b", "model.dtype=bfloat16")

    assert [(one.side.name, one.settings.model.dtype) for one in (a, b)] == [
        ("model", "float32"),
        ("other model.dtype=bfloat16", "bfloat16"),
    ]
    assert place_of(None, b, "id") == Path("runs/comparisons/id")
    assert place_of("x/y", b, "id") == Path("x/y")


def test_each_server_is_a_side() -> None:
    a, b = sides(FILE, "--servers", "http://h:1,http://h:2")

    assert [(one.urls, one.side.name) for one in (a, b)] == [
        (["http://h:1"], "http://h:1"),
        (["http://h:2"], "http://h:2"),
    ]


def test_a_model_that_was_replaced_under_its_name_or_is_scored_otherwise_is_another_side(place: Path) -> None:
    def question() -> object:
        return sides(FILE, "--models", "model,other")[0].question

    before = question()
    assert question() == before
    (place / "model" / "config.json").write_text('{"other": 1}')
    after = question()
    (place / "workflows" / "mine.py").write_text("async def mine(prompt, policy):\n    return 0.5\n")

    assert before != after
    assert question() != after


@pytest.mark.parametrize(
    ("text", "both"), [(None, ("", "")), ("a", ("a", "a")), ("a,b", ("a", "b")), ("a,a", ("a", "a"))]
)
def test_one_of_what_is_given_for_both_is_both(text: str | None, both: tuple[str, str]) -> None:
    assert pair("--models", text) == both


@pytest.mark.parametrize(
    ("at_least", "status", "verdict"),
    [
        (None, 0, None),
        (0.01, 0, "accepted: 1-40, low end +0.010, at least 0.01 is asked for"),
        (0.02, 1, "rejected: 1-40, low end +0.010, at least 0.02 is asked for"),
        (-1.0, 0, "accepted: 1-40, low end +0.010, at least -1 is asked for"),
    ],
)
def test_the_status_is_by_the_low_end_of_all_rows(
    at_least: float | None, status: int, verdict: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*rewarded("a", [0] * 97 + [1, 1, None]), *rewarded("b", [1] * 9 + [0] * 91)]
    with opened(tmp_path / "c", comparison(w=100)) as folder:
        for one in given:
            folder.add(one)
        low = folder.finish().overall.low  # type: ignore[union-attr]

        assert low == pytest.approx(0.0101, abs=1e-4)
        assert tell(folder, at_least=at_least, as_json=False) == status
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("w: 1-40 +0.071 ")
        assert lines[3:] == [f"both answers to the rows that differ: {tmp_path / 'c' / 'comparison.html'}",
                             *([verdict] if verdict else [])]  # fmt: skip
        assert tell(folder, at_least=at_least, as_json=True) == status
    told = json.loads(capsys.readouterr().out)
    assert (told["overall"]["low"], told["is_accepted"]) == (low, None if at_least is None else not status)


@pytest.mark.parametrize("at_least", [None, -1.0])
def test_where_no_row_can_be_paired_nothing_is_accepted(at_least: float | None, tmp_path: Path) -> None:
    with opened(tmp_path, comparison(w=1)) as folder:
        for one in [*rewarded("a", [None]), *rewarded("b", [1])]:
            folder.add(one)
        folder.finish()

        assert tell(folder, at_least=at_least, as_json=False) == 1


def test_a_row_is_shown_column_by_column() -> None:
    assert text_of({"question": "1+1?", "n": [1, {"a": None}], "image": object()}) == (
        'question: 1+1?\nn: [1,{"a":null}]\nimage: "<object>"'
    )
