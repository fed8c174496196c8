"""A run goes on as what it was started as: what it recorded, with what the command says otherwise, where it may."""

import argparse
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

from areal_async.cli.main import main
from areal_async.cli.run import choose
from areal_async.cli.starting.resuming import Chosen
from areal_async.config.kept import KEPT, why_kept
from areal_async.config.paths import with_real_paths
from areal_async.config.resumed import ASIDE, differences, refuse_kept
from areal_async.config.settings import Settings
from areal_async.config.sources import Assignment, load_settings, override_settings, resolve
from areal_async.config.tree import ANY_INDEX, annotation_at, without_none
from areal_async.environments.names import SCHEMES, Scheme
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory
from tests.unit.config.test_kept import PLACES

YAML = """
run: {name: g, steps: 5}
model: {path: ../model}
tasks: [{workflow: ../workflows/gsm8k.py, dataset: {path: ../rows.jsonl}}]
trainer: {lr: 1.0e-4}
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory laid out like the repository, with settings for one workflow."""
    monkeypatch.setitem(SCHEMES, "made", Scheme("tests.unit.environments.made"))
    monkeypatch.chdir(tmp_path)
    for name in ("configs", "workflows", "model"):
        (tmp_path / name).mkdir()
    for name in ("gsm8k", "other"):
        (tmp_path / "workflows" / f"{name}.py").write_text(f"async def {name}(prompt, policy):\n    return 1.0\n")
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (tmp_path / "configs" / "gsm8k_cpu.yaml").write_text(YAML)
    return tmp_path


def ask(*words: str, file: str | None = "workflows/gsm8k.py", config: str | None = None, fresh: bool = False) -> Chosen:
    """Return what ``run`` makes of these words."""
    return choose(argparse.Namespace(file=file, config=config, fresh=fresh), words, has_gpu=False)


def begin(*words: str, file: str | None = "workflows/gsm8k.py", config: str | None = None) -> Settings:
    """Leave what a run that begins with these words records."""
    chosen = ask(*words, file=file, config=config)
    assert chosen.start.said is not None
    chosen.directory.write_settings(chosen.settings)
    chosen.directory.write_said(chosen.start.said)
    return chosen.settings


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("workflows/gsm8k.py", []),
        ("g", []),
        (None, ["--run.name", "g"]),
        ("workflows/gsm8k.py", ["--run.name=g"]),
    ],
    ids=["the workflow", "its name alone", "its name as a setting", "both"],
)
def test_flags_at_the_start_hold_when_there_are_none_later(file: str | None, words: list[str]) -> None:
    begun = begin("--run.steps", "9", "--trainer.lr", "1e-3", "--rollout.batch_groups", "4", "--run.seed", "7")

    resumed = ask(*words, file=file)

    assert resumed.settings == begun
    assert (resumed.settings.run.steps, resumed.settings.trainer.lr) == (9, 1e-3)
    assert resumed.notices == ()


def test_what_is_said_beside_the_name_is_taken_and_nothing_else() -> None:
    begun = begin("--run.steps", "9", "--trainer.lr", "1e-3")

    resumed = ask("--trainer.lr", "1e-3", "--rollout.batch_groups", "4")

    assert [one.sentence for one in differences(begun, resumed.settings)] == ["rollout.batch_groups was 32, is 4"]
    assert resumed.start.named == {"trainer.lr", "rollout.batch_groups"}


def test_a_file_that_was_edited_is_told_of_with_how_to_take_it_and_is_not_taken(place: Path) -> None:
    begun = begin("--run.steps", "9")
    edited = YAML.replace("steps: 5", "steps: 7, seed: 3").replace("1.0e-4", "2.0e-4") + "health: {logprob_gap: 1.0}\n"
    (place / "configs" / "gsm8k_cpu.yaml").write_text(edited)

    for _ in range(2):
        resumed = ask()

        assert resumed.settings == begun
        assert resumed.notices == (
            "run g keeps run.steps 9, though configs/gsm8k_cpu.yaml says 7 now: --run.steps 7 applies it",
            "run g keeps run.seed 1, though configs/gsm8k_cpu.yaml says 3 now: it says which data the run is made of",
            "run g keeps trainer.lr 0.0001, though configs/gsm8k_cpu.yaml says 0.0002 now: --trainer.lr 0.0002 applies "
            "it",
            "run g keeps health.logprob_gap 0.1, though configs/gsm8k_cpu.yaml says 1.0 now: --health.logprob_gap 1.0 "
            "applies it",
        )
    taken = ask("--trainer.lr", "2e-4", "--run.steps=7")
    assert [notice.split()[3] for notice in taken.notices] == ["run.seed", "health.logprob_gap"]


def test_a_file_that_does_not_go_with_the_run_any_more_stops_nobody(place: Path) -> None:
    begun = begin()
    (place / "configs" / "gsm8k_cpu.yaml").write_text(YAML + "rollout: {min_group_size: 9}\n")

    resumed = ask()

    assert resumed.settings == begun
    assert "has been changed, and does not go with that: rollout: min_group_size must not" in resumed.notices[0]


def test_another_file_that_is_named_is_taken(place: Path) -> None:
    begun = begin("--run.steps", "9")
    (place / "configs" / "second.yaml").write_text(YAML.replace("1.0e-4", "2.0e-4"))
    (place / "configs" / "copy.yaml").write_text(YAML)

    resumed = ask(config="configs/second.yaml")

    assert {one.name: one.after for one in differences(begun, resumed.settings)} == {
        "run.steps": 5,
        "trainer.lr": 2e-4,
    }
    assert ask(config="configs/copy.yaml").settings == begun
    assert resumed.start.said is not None
    resumed.directory.write_said(resumed.start.said)
    resumed.directory.write_settings(resumed.settings)
    assert ask(config="configs/second.yaml").settings == resumed.settings
    (place / "configs" / "third.yaml").write_text(YAML.replace("run:", "rollout: {group_size: 4}\nrun:"))
    with pytest.raises(UserError, match=r"rollout\.group_size was 8, is 4"):
        ask(config="configs/third.yaml")


def test_the_environment_is_taken_where_it_says_something_else_than_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AREAL_ASYNC_TRAINER__LR", "2e-4")
    monkeypatch.setenv("AREAL_ASYNC_RUN__STEPS", "6")
    begun = begin("--trainer.lr", "1e-3")
    assert (begun.trainer.lr, begun.run.steps) == (1e-3, 6)

    assert ask().settings == begun
    monkeypatch.setenv("AREAL_ASYNC_TRAINER__LR", "5e-4")
    assert ask().settings.trainer.lr == 5e-4
    assert ask().start.named == {"trainer.lr"}
    monkeypatch.setenv("AREAL_ASYNC_RUN__SEED", "9")
    with pytest.raises(UserError, match=r"run g: run\.seed was 1, is 9; a run that goes on keeps that: it says which"):
        ask()


def test_a_run_of_before_this_record_goes_on_with_its_settings(place: Path) -> None:
    begun = begin("--run.steps", "9")
    RunDirectory(Path("runs/g")).sources.unlink()
    recorded = yaml.safe_load((place / "runs" / "g" / "config.yaml").read_text())
    del recorded["rollout"]["curriculum"], recorded["tasks"][0]["group_size"]  # settings that were not there yet
    (place / "runs" / "g" / "config.yaml").write_text(yaml.safe_dump(recorded))

    resumed = ask(config="configs/gsm8k_cpu.yaml")

    assert resumed.settings == begun
    assert resumed.notices == (
        "run g keeps run.steps 9, though configs/gsm8k_cpu.yaml says 5 now: --run.steps 5 applies it",
    )


def test_a_run_keeps_its_workflow_however_that_is_written(place: Path) -> None:
    begin()

    assert ask(file=str(place / "workflows" / "gsm8k.py")).settings.tasks[0].workflow == "workflows/gsm8k.py"
    with pytest.raises(
        UserError, match=r"tasks\.0\.workflow was '/.*/workflows/gsm8k.py', is '/.*/workflows/other.py'"
    ):
        ask("--run.name", "g", file="workflows/other.py")


def test_a_run_is_found_where_it_is(tmp_path: Path) -> None:
    begin()
    (tmp_path / "runs").rename(tmp_path / "elsewhere")

    resumed = ask("--run.directory", str(tmp_path / "elsewhere"), "--run.name", "g", file=None)

    assert resumed.settings.run_directory.absolute() == tmp_path / "elsewhere" / "g"
    (tmp_path / "elsewhere" / "g").rename(tmp_path / "elsewhere" / "h")
    with pytest.raises(UserError, match=r"run g: run\.name was 'g'|run h: run\.name was 'g', is 'h'"):
        ask("--run.directory", str(tmp_path / "elsewhere"), "--run.name", "h", file=None)


def test_a_fresh_start_takes_what_the_sources_say() -> None:
    begin("--run.steps", "9", "--run.seed", "3")

    chosen = ask(fresh=True)

    assert (chosen.settings.run.steps, chosen.settings.run.seed, chosen.start.is_fresh) == (5, 1, True)


def test_a_run_is_called_by_its_workflow_where_nothing_names_it(place: Path) -> None:
    (place / "configs" / "nameless.yaml").write_text(YAML.replace("name: g, ", ""))
    (place / "workflows" / "My-Task.v2.py").write_text("async def solve(prompt, policy):\n    return 1.0\n")

    begun = begin("--run.steps", "9", config="configs/nameless.yaml", file=None)

    assert begun.run.name == "gsm8k"
    assert ask(config="configs/nameless.yaml").settings == begun, "the same run, by its workflow"
    assert ask(config="configs/nameless.yaml", file="workflows/My-Task.v2.py:solve").settings.run.name == "solve"
    assert ask(config="configs/nameless.yaml", file="workflows/My-Task.v2.py").settings.run.name == "my-task_v2"
    assert ask("--run.name", "mine", config="configs/nameless.yaml").settings.run.name == "mine"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "run: got neither a workflow nor settings; name FILE.py or an environment, --config FILE.yaml, or both"),
        (["nobody"], "run: got nobody, need the name of a run that was started in runs, or a workflow FILE.py"),
        (["--run.name", "nobody"], "run: got neither a workflow nor settings; "),
        (["--run.name", "No Body"], "run.name: got 'No Body', need 1 to 48 characters"),
        (["g", "--fresh"], "workflow: no file g; "),
        (["g", "--trainer.lrr", "1"], "unknown setting trainer.lrr on the command line; did you mean trainer.lr"),
        (["g", "--trainer.lr", "0"], "trainer.lr: got '0', need more than 0"),
        (["g", "--config", "none.yaml"], "configuration: no file none.yaml; "),
    ],
)
def test_what_cannot_be_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    begin()

    assert main(["run", *words]) == 2

    assert capsys.readouterr().err.startswith(sentence)


# every setting

JUDGED = {"policies": {"judge": {"path": "judge", "sampling": {"top_p": 0.5}}}}
RECORDED: dict[str, Any] = {
    "run": {"name": "g"},
    "tasks": [
        {
            "workflow": "a.py",
            "dataset": {"path": "rows.jsonl"},
            "min_group_size": 4,
            "eval": {"dataset": {"path": "held.jsonl"}},
        }
    ],
    "trainer": {"num_ranks": 4},
    "bus": {"url": "nats://here:4222"},
}
"""A run in which most settings have an effect."""
BESIDE: dict[str, dict[str, Any]] = {
    "eval.dataset": {
        "tasks": [{"workflow": "a.py", "dataset": {"path": "rows.jsonl"}}],
        "eval": {"dataset": {"path": "x"}},
    },
    "policies": JUDGED,
    "policies.*.kind": {"policies": {"judge": {"path": "judge"}}},
    "arms": {"arms": {"old": {"path": "old"}}},
    "gate": {"eval": {"samples": 4}},
    "trainer.elastic": {"trainer": {"num_ranks": 2, "num_hosts": 2, "replicas": 2}},
    "launch.num_hosts": {"launch": {"backend": "ray"}},
    "trainer.critic": {"algorithm": {"name": "ppo"}},
    "trainer.reference": {"algorithm": {"kl_coef": 0.1}},
    "model.critic": {"algorithm": {"name": "ppo"}},
    "model.reference": {"algorithm": {"kl_coef": 0.1}},
    "env": {"tasks": [{"workflow": "made:a"}]},
    "tasks.*.env": {"tasks": [{"workflow": "made:a"}]},
    "algorithm.tau_pos": {"algorithm": {"name": "sapo"}},
    "algorithm.tau_neg": {"algorithm": {"name": "sapo"}},
    "algorithm.divergence": {"algorithm": {"name": "dppo"}},
    "algorithm.m2_threshold": {"algorithm": {"name": "m2po"}},
    "algorithm.behave_weight_floor": {"algorithm": {"name": "icepop"}},
    "algorithm.aggregation_constant": {"algorithm": {"name": "dr_grpo"}},
    "algorithm.kl_in": {"algorithm": {"kl_coef": 0.1}},
    "algorithm.kl_estimator": {"algorithm": {"kl_coef": 0.1}},
    "algorithm.overlong": {"algorithm": {"overlong_cache": 8}},
    "algorithm.gamma": {"algorithm": {"credit": "turns"}},
    "algorithm.gae_lambda": {"algorithm": {"name": "ppo"}},
    "algorithm.value_clip": {"algorithm": {"name": "ppo"}},
}
"""What is recorded beside, for the settings that begin so to have an effect."""
OTHERWISE: dict[str, Any] = {
    "launch.remote_command": "other {host}",
    "env": {"x": 1}, "tasks.*.env": {"x": 1}, "eval.dataset.env": {"x": 1}, "tasks.*.dataset.env": {"x": 1},
    "tasks.*.eval.dataset.env": {"x": 1}, "eval.dataset.environment": "made:b", "tasks.*.dataset.environment": "made:b",
    "tasks.*.eval.dataset.environment": "made:b",
    "tasks.*.workflow": "b.py", "tasks.*.dataset.seeds": [0, 5], "eval.dataset.seeds": [0, 5],
    "tasks.*.eval.dataset.seeds": [0, 5], "tasks.*.min_group_size": 3, "rollout.min_group_size": 3,
    "rollout.sampling.top_k": 16, "rollout.max_trajectory_bytes": 4 << 20, "rollout.template.arguments": {"x": 1},
    "policies.*.template.arguments": {"x": 1}, "inference.bucket_bytes": 1 << 20, "inference.disk_every": 1,
    "algorithm.loss": "importance", "algorithm.decoupled": True, "algorithm.dual_clip": 3.0, "algorithm.name": "dapo",
    "algorithm.advantage_std": "none", "trainer.betas": [0.8, 0.9], "trainer.keep_best": "reward",
    "metrics.prometheus_host": "192.0.2.1", "metrics.traces": "file", "bus.url": "nats://there:4222",
    "bus.http_port": 8222, "bus.replicas": 3,
}  # fmt: skip
"""Another value of settings of which none that fits follows from their type."""
SOURCES = {"python": "rows.py", "seeds": [0, 4], "environment": "made:a", "env": None}
"""Of a data set, besides a path."""
STAYS = (*ASIDE, "trainer.engine")
"""The last knows one value."""


def _recorded(name: str) -> Settings:
    beside = next((BESIDE[prefix] for prefix in sorted(BESIDE, key=len, reverse=True) if name.startswith(prefix)), {})
    data = copy.deepcopy(RECORDED | beside)
    section, _, setting = name.rpartition(".")
    if setting in SOURCES and section.endswith("dataset"):
        place: Any = data
        for part in section.replace("*", "0").split(".")[:-1]:
            place = place[int(part)] if isinstance(place, list) else place[part]
        place["dataset"] = {setting: SOURCES[setting]} if setting != "env" else {"environment": "made:a"}
    return Settings.model_validate(data)


def _now(settings: Settings, name: str) -> tuple[str, Any]:
    """Return a setting's own name in a run, and what it is there; None for what is not given."""
    place = name.replace("tasks.*", "tasks.0").replace("policies.*", "policies.judge").replace("arms.*", "arms.old")
    value: Any = settings.model_dump(mode="json")
    for part in place.split("."):
        value = value[int(part)] if isinstance(value, list) else (value or {}).get(part)
    return place, value


def _seen(name: str, value: Any) -> Any:
    """Return a value as it is told: paths are absolute, and not those that may be hub names."""
    return with_real_paths(value, _type(name))


def _otherwise(name: str, value: Any) -> Any:
    """Return another value of a setting: what its type, or what it has, makes one of."""
    kind = without_none(_type(name))
    if name in OTHERWISE:
        return OTHERWISE[name]
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value * 0.5 or 0.5
    if isinstance(value, int):
        return value + 1
    plain = {int: 2 if name.endswith(("parallel", "replicas")) else 16, float: 0.5, bool: True}
    return ["other"] if get_origin(kind) is tuple else plain.get(kind, "other")


def _type(name: str) -> Any:
    return annotation_at(Settings, [ANY_INDEX if part == "*" else part for part in name.split(".")])


def _resumed(recorded: Settings, words: Sequence[str]) -> Settings:
    """As ``resume``, without the files, which take longer than all the rest."""
    now = override_settings(recorded, words)
    refuse_kept(recorded, now)
    return now


def test_each_setting_that_may_change_does_so_alone() -> None:
    kept = {place for place in PLACES if why_kept(place)}
    for name in sorted(PLACES - kept - set(STAYS)):
        recorded = _recorded(name)
        place, value = _now(recorded, name)
        wanted = _otherwise(name, value)
        assert wanted != value, name

        now = _resumed(recorded, [f"--{place}", wanted if isinstance(wanted, str) else json.dumps(wanted)])

        changed = differences(recorded, now)
        after = _seen(name, wanted)
        if isinstance(wanted, dict):  # of a mapping whose keys are the user's each one is told
            ((key, after),) = wanted.items()
            place = f"{place}.{key}"
        assert [(one.name, one.after) for one in changed] == [(place, after)], (name, changed)


def test_each_setting_that_a_run_keeps_is_refused_with_its_reason() -> None:
    for name in sorted(place for place in PLACES if why_kept(place) and place != "run.name"):
        recorded = _recorded(name)
        place, value = _now(recorded, name)
        wanted = _otherwise(name, value)
        assert wanted != value, name

        with pytest.raises(UserError) as refusal:
            _resumed(recorded, [f"--{place}", wanted if isinstance(wanted, str) else json.dumps(wanted)])

        said = str(refusal.value)
        assert said.startswith("run g: "), (name, said)
        if isinstance(wanted, dict):  # of a mapping whose keys are the user's each one is told
            ((key, wanted),) = wanted.items()
            place, value = f"{place}.{key}", None
        told = f"{place} was {_seen(name, value)!r:.100}, is {_seen(name, wanted)!r:.100}"
        assert told in said, said
        assert f"; a run that goes on keeps that: {why_kept(name)}; put back what was, choose another" in said, said


@pytest.mark.parametrize(
    ("beside", "words", "sentence"),
    [
        ({}, ["--rollout.min_group_size", "5"], ""),
        ({}, ["--tasks.0.min_group_size", "5"], "groups of a were trained with fewer siblings"),
        (
            {"algorithm": {"name": "dapo"}},
            ["--rollout.sampling.max_new_tokens", "8"],
            "takes off from answers near the",
        ),
        ({"algorithm": {"kl_coef": 0.1}}, ["--algorithm.kl_coef", "0"], ""),
        ({"algorithm": {"kl_coef": 0.1, "kl_in": "reward"}}, ["--algorithm.kl_coef", "0"], "rewards became advantages"),
        ({"bus": {"url": "embedded"}}, ["--bus.url", "nats://a:1"], "all that it knows lies in that broker"),
        ({}, ["--bus.url", "embedded"], "all that it knows lies in that broker"),
        ({}, ["--tasks", "[]"], "it says which data the run is made of"),
    ],
)
def test_what_may_change_may_not_do_so_in_every_way(beside: dict[str, Any], words: list[str], sentence: str) -> None:
    recorded = Settings.model_validate(RECORDED | beside)
    if not sentence:
        assert len(differences(recorded, _resumed(recorded, words))) == 1
        return
    with pytest.raises(UserError, match=sentence):
        _resumed(recorded, words)


def test_reasons_are_told_apart() -> None:
    assert all(why_kept(name) == why for why, names in KEPT.items() for name in names)


def test_what_a_section_holds_is_said_of_each_setting() -> None:
    sections = Assignment(parts=("tasks",), value=[{"ratio": 2, "dataset": {"path": "x"}}], rank=1, origin="")

    assert {one.name: one.value for one in sections.split()} == {"tasks.0.ratio": 2, "tasks.0.dataset.path": "x"}
    base = {"run": {"name": "a"}}
    named = Assignment(parts=("run", "name"), value="b", rank=3, origin="")
    assert resolve(base, [named], Settings).run.name == "b"
    assert base == {"run": {"name": "a"}}
    assert load_settings(None, ["--run.name", "b"], use_environment=False).run.name == "b"
