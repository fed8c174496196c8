"""Later sources win leaf by leaf; an unknown name or a wrong value is refused wherever it stands, with the remedy."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_async.config.reward_model import RewardModelSettings
from areal_async.config.settings import Settings
from areal_async.config.sft import SftSettings
from areal_async.config.sources import dump_settings, load_kind, load_settings
from areal_async.config.tree import Parts, leaves, without_none
from areal_async.errors import UserError
from areal_async.protocol.fields import MAX_STEP, is_version
from areal_async.protocol.types import Version

BASE = """
run: {name: base, steps: 5}
rollout:
tasks: [{workflow: gsm8k.py, dataset: {path: rows.jsonl}}]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return _written(tmp_path, BASE)


def _written(directory: Path, text: str) -> Path:
    path = directory / "x.yaml"
    path.write_text(text)
    return path


def _refusal(config: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_settings(config, overrides)
    return str(caught.value)


def test_environment_wins_over_file_and_command_line_over_both(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_ASYNC_RUN__STEPS", "6")
    monkeypatch.setenv("AREAL_ASYNC_RUN__SEED", "60")

    settings = load_settings(config, ["--run.seed", "70"])

    assert (settings.run.name, settings.run.steps, settings.run.seed) == ("base", 6, 70)


def test_environment_is_not_asked_for_resolved_settings(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_ASYNC_RUN__STEPS", "6")

    assert load_settings(config, use_environment=False).run.steps == 5


@pytest.mark.parametrize("words", [["--run.steps", "7"], ["--run.steps=7"], ["--run", "{steps: 7}"]])
def test_command_line_takes_values_in_either_form(config: Path, words: list[str]) -> None:
    settings = load_settings(config, words)

    assert (settings.run.name, settings.run.steps) == ("base", 7)


def test_an_index_reaches_into_a_list_and_a_list_replaces_one(config: Path) -> None:
    reached = load_settings(config, ["--tasks.0.workflow", "workflows/other.py"])
    appended = load_settings(config, ["--tasks.1", '{"workflow": "b.py", "dataset": {"path": "b"}}'])
    replaced = load_settings(config, ["--tasks", "[{workflow: b.py, dataset: {path: b}}]"])

    rows = str(config.parent / "rows.jsonl")
    assert [(task.workflow, task.dataset.path) for task in reached.tasks] == [("workflows/other.py", rows)]
    assert [task.name for task in appended.tasks] == ["gsm8k", "b"]
    assert [task.name for task in replaced.tasks] == ["b"]


def test_texts_stay_texts_and_null_is_none(config: Path) -> None:
    words = ["--run.name", "123", "--inference.context_length", "null", "--rollout.sampling.stop", "['yes', b]"]

    settings = load_settings(config, [*words, "--inference.flags=[--x, '1']", "--trainer.lr", "1e-5"])

    assert settings.run.name == "123"
    assert settings.inference.context_length is None
    assert settings.rollout.sampling.stop == ("yes", "b")
    assert settings.inference.flags == ("--x", "1")
    assert settings.trainer.lr == 1e-5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rollout: {max_stalenes: 1}", "rollout.max_stalenes in {file}; did you mean rollout.max_staleness"),
        ("rolout: {max_staleness: 1}", "rolout in {file}; did you mean rollout"),
        ("tasks: [{wrkflow: a.py}]", "tasks.0.wrkflow in {file}; did you mean tasks.0.workflow"),
    ],
)
def test_unknown_name_in_a_file_is_refused_with_the_nearest(tmp_path: Path, text: str, sentence: str) -> None:
    path = _written(tmp_path, text)

    assert _refusal(path) == f"unknown setting {sentence.format(file=path)}"


def test_unknown_name_in_the_environment_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_ASYNC_ROLLOUT__GROUP_SZE", "4")

    assert _refusal(config) == (
        "unknown setting rollout.group_sze in the environment (AREAL_ASYNC_ROLLOUT__GROUP_SZE); "
        "did you mean rollout.group_size"
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rollout.max_stalenes", "did you mean rollout.max_staleness"),
        ("algorithm.nme", "did you mean algorithm.name"),
        ("max_staleness", "did you mean rollout.max_staleness"),
        ("trainer.group_size", "did you mean rollout.group_size"),
        ("rolout.max_staleness", "did you mean rollout.max_staleness"),
        ("tasks.3.dataset.pth", "did you mean tasks.3.dataset.path"),
        ("trainer.zzz", "see run --help-settings"),
    ],
)
def test_unknown_name_on_the_command_line_is_refused(config: Path, name: str, near: str) -> None:
    assert _refusal(config, f"--{name}", "1") == f"unknown setting {name} on the command line; {near}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--run.steps=x"], "run.steps: got 'x', need a whole number; change it on the command line (--run.steps)"),
        (["--run.steps=0"], "run.steps: got '0', need at least 1; change it on the command line (--run.steps)"),
        (
            ["--trainer.lr=inf"],
            "trainer.lr: got 'inf', need a finite number; change it on the command line (--trainer.lr)",
        ),
        (
            ["--rollout.sampling.top_k=0"],
            "rollout.sampling.top_k: got 0, need -1 or at least 1 (set on the command line (--rollout.sampling.top_k))",
        ),
        (["--run=4"], "run: got 4, need a section with keys; change it on the command line (--run)"),
        (
            ["--rollout.sampling.stop", "a"],
            "rollout.sampling.stop: got 'a', need a list like [a, b]; "
            "change it on the command line (--rollout.sampling.stop)",
        ),
        (
            ["--tasks.1.workflow", "b.py"],
            "tasks.1.dataset: got nothing, need a value; set it in the configuration or with --tasks.1.dataset",
        ),
        (
            ["--tasks.4.workflow", "b.py"],
            "tasks.4.workflow on the command line (--tasks.4.workflow): got index 4, need at most 1: "
            "there are 1 before it",
        ),
        (["--run.steps"], "command line: --run.steps has no value; write --run.steps=VALUE"),
        (["--run.steps", "--run.seed"], "command line: --run.steps has no value; write --run.steps=VALUE"),
        (["steps"], "command line: got 'steps', need --section.key value"),
    ],
)
def test_wrong_value_says_what_was_got_what_is_needed_and_where(config: Path, words: list[str], sentence: str) -> None:
    assert _refusal(config, *words) == sentence


def test_wrong_value_names_the_source_that_set_it_last(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_file = _refusal(_written(config.parent, "run: {steps: many, seed: q}"))
    monkeypatch.setenv("AREAL_ASYNC_RUN__STEPS", "0")
    in_environment = _refusal(config, "--run.seed", "1")

    assert in_file.endswith(f"change it in {config} (also wrong: run.seed)")
    assert in_environment.endswith("change it in the environment (AREAL_ASYNC_RUN__STEPS)")


def test_contradiction_keeps_the_sentence_of_the_settings(config: Path) -> None:
    refusal = _refusal(config, "--rollout.group_size", "2")

    assert refusal.startswith("rollout: min_group_size must not exceed group_size, got min_group_size=4, group_size=2")
    assert refusal.endswith("(set on the command line (--rollout.group_size))")


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["--algorithm.overlong_cache=2000", "--run.steps=3"], "(--algorithm.overlong_cache))"),
        (["--trainer.keep_best=accuracy", "--run.steps=3"], "(--trainer.keep_best))"),
        (["--rollout.group_size=2", "--rollout.batch_groups=3"], "(--rollout.group_size))"),
        (["--rollout.min_group_size=9", "--rollout.group_size=8", "--run.steps=3"], "(--rollout.group_size))"),
    ],
)
def test_contradiction_names_the_source_of_a_setting_it_is_about(config: Path, words: list[str], end: str) -> None:
    assert _refusal(config, *words).endswith(end)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("a: [", "not YAML"),
        ("- a", "got a list, need sections like 'run:' at the top"),
        ("a: \xff", "cannot be read"),
        ("a: 2020-13-45", "not YAML"),
        ("[" * 1000, "got a value in more than 64 others"),
    ],
)
def test_file_that_holds_no_settings_is_refused(tmp_path: Path, text: str, end: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode("latin-1"))

    refusal = _refusal(path)

    assert refusal.startswith(f"{path}: ")
    assert end in refusal
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "run: {}\ntrainer:\n  lr: 1.e-3\ntrainer:\n  eps: 1.e-6",
            "line 4: got trainer again, need it once; merge it with that of line 2",
        ),
        ("run:\n  name: a\n  name: b", "line 3: got name again, need it once; merge it with that of line 2"),
        ("run: {}\n1: 2", "line 2: got the key 1, need a name; write it as text, or leave it out"),
        ("null: 3", "line 1: got the key None, need a name; write it as text, or leave it out"),
        ("run: {on: 3}", "line 1: got the key True, need a name; write it as text, or leave it out"),
        ("run:\n  seed: " + "[" * 900, "line 2: got a value in more than 64 others; need fewer brackets"),
    ],
)
def test_keys_that_would_be_lost_are_refused_with_their_line(tmp_path: Path, text: str, sentence: str) -> None:
    path = _written(tmp_path, text)

    assert _refusal(path) == f"{path}: {sentence}"


@pytest.mark.parametrize("text", ["run: &a {name: *a}", "run: &a [*a]", "run: &a {name: x, more: {b: *a}}"])
def test_a_file_that_holds_itself_is_refused(tmp_path: Path, text: str) -> None:
    refusal = _refusal(_written(tmp_path, text))

    assert "not YAML: found unconstructable recursive node" in refusal
    assert "\n" not in refusal


def test_a_key_given_twice_in_a_section_on_the_command_line_is_refused(config: Path) -> None:
    assert _refusal(config, "--run", "{steps: 7, steps: 8}").startswith(
        "run on the command line (--run): line 1: got steps again"
    )


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        ("run: 3", ["--run.steps=7"], "run: got 3, need a section with keys"),
        ("run: [1, 2]", ["--run.steps=7"], "run: got [1, 2], need a section with keys"),
        ("run: 3", ["--run", "{steps: 7}"], "run: got 3, need a section with keys"),
        ("policies: {judge: 3}", ["--policies.judge.path=m"], "policies.judge: got 3, need a section with keys"),
        ("eval: {dataset: [a]}", ["--eval.dataset.path=m"], "eval.dataset: got ['a'], need a section with keys"),
        ("inference: {flags: a}", ["--inference.flags.0=b"], "inference.flags: got 'a', need a list like [a, b]"),
        (
            "tasks: [3]",
            ["--tasks.0.workflow=b.py", "--tasks.0.dataset.path=b"],
            "tasks.0: got 3, need a section with keys",
        ),
    ],
)
def test_what_stands_in_a_sections_place_is_not_replaced_by_a_key(
    tmp_path: Path, text: str, words: list[str], sentence: str
) -> None:
    path = _written(tmp_path, text)

    assert _refusal(path, *words) == f"{sentence}; change it in {path}"


def test_a_section_with_nothing_under_it_takes_keys(tmp_path: Path) -> None:
    path = _written(tmp_path, "run:\neval: {dataset: null}\npolicies:\n")

    settings = load_settings(path, ["--run.steps=7", "--eval.dataset.path=m", "--policies.judge.path=m"])

    assert (settings.run.steps, settings.eval.dataset is not None, [*settings.policies]) == (7, True, ["judge"])


def test_anchors_and_merged_keys_are_taken(tmp_path: Path) -> None:
    """A key beside ``<<`` is written once: it goes before the merged one."""
    path = _written(tmp_path, "run: &a {name: x, steps: 3}\neval: {limit: &n 9}\nrollout: {batch_groups: *n}")
    (tmp_path / "m").mkdir()
    merged = _written(tmp_path / "m", "run: {<<: {name: x, steps: 3}, steps: 4}")

    assert load_settings(path).rollout.batch_groups == 9
    assert (load_settings(merged).run.name, load_settings(merged).run.steps) == ("x", 4)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    assert _refusal(tmp_path / "no.yaml").startswith("configuration: no file ")


def test_dumped_settings_load_as_themselves(config: Path, tmp_path: Path) -> None:
    settings = load_settings(
        config, ["--rollout.sampling.stop", "[a]", "--bus.credentials", "keys/x", "--trainer.lr=3e-7"]
    )

    assert load_settings(_written(tmp_path, dump_settings(settings)), use_environment=False) == settings


def test_other_kinds_of_settings_come_from_the_same_sources(tmp_path: Path) -> None:
    path = _written(tmp_path, "dataset: {path: rows.jsonl}")

    settings = load_kind(SftSettings, path, ["--trainer.lr", "2e-4"])

    assert isinstance(settings, SftSettings)
    assert settings.trainer.lr == 2e-4
    with pytest.raises(UserError, match="unknown setting rollout.group_size on the command line"):
        load_kind(SftSettings, path, ["--rollout.group_size", "2"])


NUMBERS = [
    (kind, parts, number)
    for kind in (Settings, SftSettings, RewardModelSettings)
    for parts, owner in leaves(kind)
    if (number := without_none(owner.model_fields[parts[-1]].annotation)) in (int, float)
]
REQUIRED = {
    kind: [
        f"--{'.'.join(parts)}=x"
        for parts, owner in leaves(kind)
        if owner.model_fields[parts[-1]].is_required() or (parts[-2:] == ("dataset", "path") and "eval" not in parts)
    ]
    for kind in (Settings, SftSettings, RewardModelSettings)
}


@pytest.mark.parametrize("value", [10**30, -(10**30)])
def test_no_whole_number_is_beyond_64_bits(tmp_path: Path, value: int) -> None:
    """Whichever it is, from a file or from the command line: what comes after cannot hold it."""
    for kind, parts, number in NUMBERS:
        if number is int:
            for config, words in ((_nested(tmp_path, parts, value), []), (None, [f"--{'.'.join(parts)}={value}"])):
                with pytest.raises(UserError) as caught:
                    load_kind(kind, config, [*REQUIRED[kind], *words])
                sentence = (
                    rf"{re.escape('.'.join(parts))}: got '?{value}'?, need at (?:most|least) (-?\d+); change it .*"
                )
                need = re.fullmatch(sentence, str(caught.value))
                assert need is not None, caught.value
                assert -(1 << 63) <= int(need[1]) < 1 << 63


def test_a_number_too_long_to_be_read_is_refused_as_one(tmp_path: Path) -> None:
    for kind, parts, number in NUMBERS:
        name = re.escape(".".join(parts))
        need = "a whole number from -9223372036854775808 to" if number is int else "a finite number"
        with pytest.raises(UserError, match=rf"^{name}: got '9+, need {need}"):
            load_kind(kind, None, [*REQUIRED[kind], f"--{'.'.join(parts)}={'9' * 5000}"])
        need = "at most" if number is int else "a number"
        with pytest.raises(UserError, match=rf"^{name}: got 9+, need {need}"):
            load_kind(kind, _nested(tmp_path, parts, int("9" * 400)), REQUIRED[kind])


@pytest.mark.parametrize("value", [(1 << 63) - 1, -(1 << 63)])
def test_a_whole_number_of_64_bits_is_taken(value: int) -> None:
    assert load_settings(None, [f"--run.seed={value}"]).run.seed == value


def test_no_step_is_beyond_what_a_version_holds() -> None:
    """It could not be published: the step of a version has so many digits."""
    counting = [(kind, parts) for kind, parts, _ in NUMBERS if parts[-1].endswith(("steps", "staleness"))]
    assert is_version(str(Version(1, MAX_STEP)))
    assert not is_version(str(Version(1, MAX_STEP + 1)))
    assert (Settings, ("run", "steps")) in counting
    assert load_settings(None, [f"--run.steps={MAX_STEP}"]).run.steps == MAX_STEP
    for kind, parts in counting:
        name, most = ".".join(parts), 1000 if parts[-1] == "equal_rewards_steps" else MAX_STEP
        sentence = rf"{re.escape(name)}: got '?{most + 1}'?, need at most {most}; change it .*"
        with pytest.raises(UserError, match=rf"\A{sentence}\Z"):
            load_kind(kind, None, [*REQUIRED[kind], f"--{name}={most + 1}"])


def _nested(folder: Path, parts: Parts, value: int) -> Path:
    nested: Any = value
    for part in reversed(parts):
        nested = [nested] if part.isdecimal() else {part: nested}
    return _written(folder, yaml.safe_dump(nested))


def test_no_file_means_defaults() -> None:
    assert load_settings(None, use_environment=False) == Settings()
