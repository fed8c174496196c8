"""``init`` writes projects that lead nowhere but into themselves, and leaves what is there as it is."""

import re
from pathlib import Path

import pytest

from areal_async.cli.main import main
from areal_async.cli.projects import init, templates
from areal_async.cli.projects.templates import TEMPLATES
from areal_async.cli.run import check
from areal_async.config.sources import load_settings
from areal_async.protocol.subjects import RUN_NAME
from tools.wheel import PATTERNS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_project_is_whole_and_names_nothing_that_it_has_not(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["init", "a project", "--template", template]) == 0
    assert "next: cd 'a project' && " in capsys.readouterr().out
    folder = tmp_path / "a project"
    monkeypatch.chdir(folder)
    for kind in ("", "_cpu"):
        path = Path(f"configs/workflow{kind}.yaml")
        settings = load_settings(path)
        assert settings.run.name == f"a_project{kind}"
        assert settings.tasks[0].workflow == "workflow.py"
        if kind:
            check(settings)
    text = "\n".join(path.read_text() for path in folder.rglob("*") if path.suffix in (".py", ".yaml", ".md"))
    assert re.findall(r"(?:workflows|tools|tests)/\S+", text) == []
    named = set(re.findall(r"configs/\w+\.yaml", text))
    assert {name for name in named if not (folder / name).is_file()} == set()


def test_every_original_is_in_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a build takes along suffices, without the repository around it."""
    for pattern in PATTERNS:
        for path in ROOT.glob(pattern):
            (there := tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            there.symlink_to(path)
    here = {name: templates.files_of(one, "mine") for name, one in TEMPLATES.items()}
    monkeypatch.setattr(templates, "SHIPPED", tmp_path)

    assert {name: templates.files_of(one, "mine") for name, one in TEMPLATES.items()} == here
    (tmp_path / "rewards" / "math_answer.py").unlink()
    (tmp_path / "configs" / "gsm8k_cpu.yaml").unlink()
    with pytest.raises(init.UserError, match=r"no file .*gsm8k_cpu.yaml, which belongs to this installation"):
        templates.files_of(TEMPLATES["gsm8k"], "mine")


@pytest.mark.parametrize("there", ["notes.txt", "src/"])
def test_a_folder_that_has_anything_in_it_is_refused_and_left_as_it_is(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(there).mkdir() if there.endswith("/") else Path(there).touch()

    assert main(["init", "."]) == 2
    assert f"init: . has {there.strip('/')} in it, need an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [there.strip("/")]


def test_hidden_files_and_environments_are_no_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()

    assert main(["init", "."]) == 0
    assert (tmp_path / "workflow.py").is_file()
    assert main(["init", "."]) == 2, "now it is one"


def test_where_a_file_cannot_be_written_none_is_left(tmp_path: Path) -> None:
    (tmp_path / "b").touch()

    with pytest.raises(init.UserError, match="cannot write"):
        init.write(tmp_path, {"a/one.py": b"", "b/two.py": b""})
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "got no folder; name one that is to be made"),
        (("",), "got no folder; name one that is to be made"),
        (("x", "--template", "tool"), "--template: got tool; did you mean tools"),
        (("x", "--template", "chess"), "need one of gsm8k, tools, agent, environment, vision"),
        (("x", "--force"), "unknown option --force"),
        (("file",), "file is no folder"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("file").touch()

    assert main(["init", *words]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("folder", "name"), [("Mine 2.0", "mine_2_0"), ("数据", "project"), ("-x-", "x"), ("a" * 90, "a" * 44)]
)
def test_runs_are_called_as_the_folder_whatever_that_is_called(folder: str, name: str, tmp_path: Path) -> None:
    assert init.name_of(tmp_path / folder) == name
    assert RUN_NAME.fullmatch(f"{name}_cpu")
