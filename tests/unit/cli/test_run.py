"""``run`` chooses its settings, refuses what can be seen to be wrong, and starts nothing before that."""

import fcntl
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_async.algorithms.advantages import Sibling, advantage_rule, step_advantages
from areal_async.cli.main import main
from areal_async.cli.run import choose_config, load_run_settings, want_of_room
from areal_async.cli.starting.checks import (
    check_dataset,
    check_groups,
    check_interpreter,
    check_model,
    check_policies,
    check_workflow,
)
from areal_async.config.algorithm import PRESETS
from areal_async.config.settings import DatasetSettings
from areal_async.config.sources import load_settings
from areal_async.errors import BusError, PipelineError, UserError, leaves_of
from areal_async.launch.backends import BACKENDS
from areal_async.launch.local import LocalBackend
from areal_async.launch.run_directory import RunDirectory

WORKFLOW = "async def gsm8k(prompt, policy):\n    return 1.0\n"
ALONE = ("--rollout.group_size=1", "--rollout.min_group_size=1")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory laid out like the repository, and no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("configs", "workflows", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "workflows" / "gsm8k.py").write_text(WORKFLOW)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (tmp_path / "configs" / "gsm8k_cpu.yaml").write_text(
        "run: {name: g}\nmodel: {path: ../model}\n"
        "tasks: [{workflow: ../workflows/gsm8k.py, dataset: {path: ../rows.jsonl}}]\n"
    )
    return tmp_path


def test_settings_follow_the_workflow_and_the_machine(place: Path) -> None:
    (place / "configs" / "gsm8k.yaml").write_text("")

    assert choose_config("workflows/gsm8k.py", None, has_gpu=True) == Path("configs/gsm8k.yaml")
    assert choose_config("workflows/gsm8k.py:other", None, has_gpu=False) == Path("configs/gsm8k_cpu.yaml")
    assert choose_config("workflows/gsm8k.py", "mine.yaml", has_gpu=False) == Path("mine.yaml")


def test_missing_settings_are_refused_by_name(place: Path) -> None:
    (place / "workflows" / "coding.py").touch()
    with pytest.raises(
        UserError, match="no file configs/coding_cpu.yaml, the settings of coding where no GPU is found"
    ):
        choose_config("workflows/coding.py", None, has_gpu=False)


@pytest.mark.parametrize("file", ["workflows/gsm8k.py", "gsm8k.py:other"])
def test_settings_that_lie_in_the_project_of_a_file_elsewhere_are_told(
    file: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "gsm8k.py").write_text(WORKFLOW)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UserError, match=rf"no file configs/gsm8k_cpu.yaml, .*; it is in {place}: give the command"):
        choose_config(str(place / file), None, has_gpu=False)


def test_named_workflow_takes_the_place_of_the_only_one() -> None:
    config = Path("configs/gsm8k_cpu.yaml")

    same = load_run_settings(config, "workflows/gsm8k.py", [])
    other = load_run_settings(config, "workflows/gsm8k.py:strict", ["--run.steps", "3"])

    assert [task.name for task in same.tasks] == ["gsm8k"]
    assert [(task.name, task.dataset.path) for task in other.tasks] == [("strict", "rows.jsonl")]
    assert other.run.steps == 3


def test_named_workflow_must_be_one_of_several() -> None:
    tasks = "[{workflow: a.py, dataset: {path: x}}, {workflow: b.py, dataset: {path: x}}]"
    config = Path("configs/gsm8k_cpu.yaml")

    assert len(load_run_settings(config, "b.py", ["--tasks", tasks]).tasks) == 2
    with pytest.raises(UserError, match="got c.py, but configs/gsm8k_cpu.yaml has the tasks a.py, b.py"):
        load_run_settings(config, "c.py", ["--tasks", tasks])


def test_settings_without_a_task_are_refused(place: Path) -> None:
    (place / "empty.yaml").write_text("")

    with pytest.raises(UserError, match="tasks: got none, need at least one"):
        load_run_settings(Path("empty.yaml"), None, [])


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (None, "workflow: no file workflows/w.py; "),
        ("async def w(:", "workflow: workflows/w.py is not Python: "),
        ("def w(prompt, policy): ...", "w in workflows/w.py is a plain function, need a coroutine; write async def w"),
        ("async def solve(p, q): ...", "no coroutine w in workflows/w.py, got solve; name one as workflows/w.py:solve"),
        ("", "no coroutine w in workflows/w.py, got none; write async def w(prompt, policy)"),
    ],
)
def test_workflow_that_is_not_there_is_refused(place: Path, code: str | None, sentence: str) -> None:
    if code is not None:
        (place / "workflows" / "w.py").write_text(code)

    with pytest.raises(UserError) as caught:
        check_workflow("workflows/w.py")

    assert sentence in str(caught.value)


@pytest.mark.parametrize("code", ["async def w(p, q): ...", "from solvers import w", "w = make()"])
def test_workflow_that_may_be_there_passes(place: Path, code: str) -> None:
    (place / "workflows" / "w.py").write_text(code)

    check_workflow("workflows/w.py")
    check_workflow("workflows/gsm8k.py:gsm8k")


def test_workflow_and_policies_that_miss_each_other_are_refused(place: Path) -> None:
    spec, other = "workflows/w.py", "workflows/v.py"
    (place / spec).write_text("async def w(prompt, policy, judge, *, rival=None): ...")
    (place / other).write_text("async def v(prompt, policy): ...")

    check_policies([spec, other], ["judge", "rival"])
    check_policies([spec], ["judge"])
    with pytest.raises(UserError, match="workflow w: takes the policy 'judge', the settings have none"):
        check_policies([spec], [])
    with pytest.raises(UserError, match="policies.critic: no workflow of this run takes it"):
        check_policies([spec, other], ["judge", "critic"])


@pytest.mark.parametrize("code", ["from duels import w", "@timed\nasync def w(prompt, policy): ..."])
def test_policies_of_a_workflow_that_shows_only_when_it_runs_pass(place: Path, code: str) -> None:
    (place / "workflows" / "w.py").write_text(code)

    check_policies(["workflows/w.py"], ["judge"])


@pytest.mark.parametrize("path", ["no.jsonl", "./no", "/no/where", "data/no/where"])
def test_data_set_that_should_be_here_is_refused(path: str) -> None:
    with pytest.raises(UserError, match="eval.dataset.path: no file"):
        check_dataset(DatasetSettings(path=path), "eval.dataset")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model and one data set that the hub gave once; it cannot be reached now."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for folder, file in (("models--org--small", "config.json"), ("datasets--org--sums", "README.md")):
        there = tmp_path / "hub" / folder
        (there / "snapshots" / "1a").mkdir(parents=True)
        (there / "snapshots" / "1a" / file).write_text("{}")
        (there / "refs").mkdir()
        (there / "refs" / "main").write_text("1a")


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize("path", ["org/sums", "rows.jsonl"])
def test_data_set_that_is_here_or_on_the_hub_passes(path: str) -> None:
    check_dataset(DatasetSettings(path=path), "eval.dataset")


@pytest.mark.usefixtures("hub_cache")
@pytest.mark.parametrize("setting", ["model.path", "tasks.0.dataset.path"])
def test_a_name_that_nobody_knows_is_told_before_anything_starts(
    place: Path, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "workflows/gsm8k.py", "--config", "configs/gsm8k_cpu.yaml"]
    assert main([*words, f"--{setting}", "org/smal"]) == 2

    told = capsys.readouterr().err
    assert told.startswith(f"{setting}: org/smal is neither on this disk nor to be had from the Hugging Face hub (")
    assert len(told.splitlines()) == 1
    assert not (place / "runs").exists()


@pytest.mark.usefixtures("hub_cache")
def test_model_that_should_be_here_is_refused(place: Path) -> None:
    (place / "empty").mkdir()

    with pytest.raises(UserError, match="model.path: no folder configs/models/no"):
        check_model("configs/models/no")
    with pytest.raises(UserError, match="model.path: no config.json in empty"):
        check_model("empty")
    check_model("model")
    check_model("org/small")


def test_model_without_a_tokenizer_is_refused_before_anything_starts(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "model" / "tokenizer.json").unlink()
    (place / "model" / "special_tokens_map.json").write_text("{}")

    assert main(["run", "workflows/gsm8k.py", "--config", "configs/gsm8k_cpu.yaml"]) == 2
    assert capsys.readouterr().err.startswith("model.path: no tokenizer in ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["workflows/gsm8k.py", "--model.path", "./no"], "model.path: no folder ./no; "),
        (["workflows/gsm8k.py", "--tasks.0.dataset.path", "no.csv"], "tasks.0.dataset.path: no file no.csv; "),
        (["workflows/no.py", "--config", "configs/gsm8k_cpu.yaml"], "workflow: no file workflows/no.py; "),
        (["workflows/no.py:name"], "workflow: no file workflows/no.py; "),
        (
            ["workflows/gsm8k.py", "--bus.host", "0.0.0.0"],
            "bus.host: got '0.0.0.0', need an IPv4 address or a name of ",
        ),
        (
            ["workflows/gsm8k.py", "--metrics.prometheus", "true", "--metrics.prometheus_host", "192.0.2.1"],
            "metrics.prometheus_host: got 192.0.2.1, need an address of this host",
        ),
        (["workflows/gsm8k.py", "--policies.judge.path", "./no"], "policies.judge: no workflow of this run takes it"),
        (
            ["workflows/gsm8k.py", *ALONE],
            "rollout.group_size: got 1 with algorithm.name=grpo, advantage_baseline=group, need at least 2; ",
        ),
        (
            ["workflows/gsm8k.py", "--tasks.0.group_size=1", "--tasks.0.min_group_size=1"],
            "tasks.0.group_size: got 1 with algorithm.name=grpo, ",
        ),
        (["workflows/gsm8k.py", "--rollout.sampling.top_k=5"], "rollout.sampling: got top_k=5; its tokens cannot be "),
    ],
)
def test_refused_run_leaves_nothing_behind(
    place: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words, "--fresh"]) == 2

    assert capsys.readouterr().err.startswith(sentence)
    assert not (place / "runs").exists()


@pytest.mark.parametrize("name", PRESETS)
def test_an_algorithm_that_compares_answers_is_refused_groups_of_one(place: Path, name: str) -> None:
    """By what it does with them: alone, each advantage it makes is 0."""
    settings = load_settings(place / "configs" / "gsm8k_cpu.yaml", [f"--algorithm.name={name}", *ALONE])
    advantages = step_advantages([[Sibling(reward=1.0)], [Sibling(reward=0.0)]], advantage_rule(settings))
    is_taught = name == "ppo" or any(values.any() for values in advantages)

    assert is_taught == (name in ("reinforce_pp", "ppo"))
    if is_taught:
        check_groups(settings)
    else:
        with pytest.raises(UserError, match=f"rollout.group_size: got 1 with algorithm.name={name}, "):
            check_groups(settings)


@pytest.mark.parametrize(
    "words",
    [
        ["--algorithm.credit=process"],
        ["--algorithm.calls=[calls.py:advantages]"],
        ["--tasks.0.group_size=2"],
    ],
)
def test_groups_of_one_that_may_teach_are_taken(place: Path, words: list[str]) -> None:
    """Where the steps of one answer are compared, a call of the user's makes the advantages, or no task has them."""
    check_groups(load_settings(place / "configs" / "gsm8k_cpu.yaml", [*words, *ALONE]))


@pytest.mark.parametrize("name", PRESETS)
def test_what_does_not_train_takes_groups_of_one(place: Path, name: str) -> None:
    words = [f"--algorithm.name={name}", *ALONE]

    assert load_run_settings(Path("configs/gsm8k_cpu.yaml"), None, words).rollout.group_size == 1


def test_the_look_before_a_run_refuses_groups_of_one_as_the_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "workflows/gsm8k.py", *ALONE]) == 2

    assert capsys.readouterr().err.startswith("rollout.group_size: got 1 with algorithm.name=grpo, ")


class _Two(LocalBackend):
    """An allocation of two hosts."""

    hosts = ("here", "there")


@pytest.mark.parametrize(
    ("words", "address", "cure"),
    [
        (["--bus.host", "127.0.0.2"], "127.0.0.2", "leave bus.host out, or set it to an address of this host that "),
        (["--bus.url", "nats://localhost:9"], "localhost", "set bus.url to an address of the broker's host that "),
    ],
)
def test_a_loopback_is_refused_where_other_hosts_are_to_find_the_broker(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    address: str,
    cure: str,
) -> None:
    """Before a run of that name is removed."""
    monkeypatch.setitem(BACKENDS, "local", lambda _: _Two())

    assert main(["run", "workflows/gsm8k.py", *words, "--fresh"]) == 2

    assert capsys.readouterr().err == (
        f"bus: the broker's address {address} is the loopback, where there find themselves; {cure}they reach\n"
    )
    assert not (place / "runs").exists()


def test_run_that_is_alive_or_changed_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory(Path("runs/g"))
    directory.write_settings(load_run_settings(Path("configs/gsm8k_cpu.yaml"), None, []))

    with directory.locked("g"):
        assert main(["run", "workflows/gsm8k.py", "--fresh"]) == 2
    assert "run g: already running in process" in capsys.readouterr().err
    assert main(["run", "workflows/gsm8k.py", "--run.seed", "5"]) == 2
    assert "run g: run.seed was 1, is 5; " in capsys.readouterr().err
    assert directory.read_settings().run.seed == 1


def test_a_resume_waits_for_one_who_looks_into_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(Path("runs/g"))
    directory.write_settings(load_run_settings(Path("configs/gsm8k_cpu.yaml"), None, []))
    take = fcntl.flock

    with ExitStack() as visitor:
        visitor.enter_context(directory.locked("g", is_visit=True))

        def leave_when_in_the_way(file: int, operation: int) -> None:
            try:
                take(file, operation)
            except BlockingIOError:
                visitor.close()
                raise

        monkeypatch.setattr("fcntl.flock", leave_when_in_the_way)

        assert main(["run", "workflows/gsm8k.py", "--run.seed", "5"]) == 2

    assert "run g: run.seed was 1, is 5; " in capsys.readouterr().err


def test_a_resume_whose_broker_does_not_start_leaves_the_settings_as_they_were(place: Path) -> None:
    """What its record would say of a changed mix is not known yet."""
    directory = RunDirectory(Path("runs/g"))
    directory.write_settings(load_run_settings(Path("configs/gsm8k_cpu.yaml"), None, []))

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["run", "workflows/gsm8k.py", "--tasks.0.ratio", "3", "--bus.port", str(port)]) != 0

    assert directory.read_settings().tasks[0].ratio == 1.0


def test_a_first_start_whose_broker_does_not_start_leaves_the_name_free(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for seed in ("1", "2"):  # another run each time, of which nothing is to go on
            assert main(["run", "workflows/gsm8k.py", "--run.seed", seed, "--bus.port", str(port)]) == 2
            assert capsys.readouterr().err.startswith(f"bus.port: port {port} of 127.0.0.1 is taken; ")
            assert list((place / "runs").iterdir()) == []


def test_servers_interpreter_that_is_not_there_is_refused_with_the_remedy(place: Path) -> None:
    check_interpreter(None)
    check_interpreter(Path(sys.executable))
    with pytest.raises(UserError, match=r"inference\.python: no program nowhere/bin/python; .*setup_sglang"):
        check_interpreter(Path("nowhere/bin/python"))


@pytest.mark.parametrize(
    ("raised", "free_bytes", "is_told"),
    [
        (BusError("no success within 60 s"), 0, True),
        (ExceptionGroup("", [PipelineError("died 6 times"), OSError(28, "No space left on device")]), 1 << 20, True),
        (BusError("no success within 60 s"), 1 << 30, False),
        (UserError("dataset: got none"), 0, False),
        (ExceptionGroup("", [KeyError("a bug")]), 0, False),
    ],
)
def test_a_run_that_fails_on_a_full_disk_names_the_disk(
    raised: Exception, free_bytes: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free_bytes))

    told = want_of_room(raised, "full", Path("/runs/full"))

    assert (told is not None) == is_told
    if told is not None:
        assert str(told).startswith("run full: no space left on the disk of /runs/full: got ")
        assert str(told).endswith(f"(what failed first: {leaves_of(raised)[0]})")
