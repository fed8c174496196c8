"""What lies beside a workflow imports, in every process, and never as another folder's module of that name."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_async import user_files
from areal_async.errors import UserError
from areal_async.rollout.user_code.source_hashes import differing, source_hashes
from areal_async.rollout.user_code.source_location import UserCode
from areal_async.rollout.user_code.workflows import load_workflow
from areal_async.user_files import import_named

SCORES = "from areal_async import reward\nfrom .units import UNIT\n\n@reward\ndef half(x):\n    return x * UNIT\n"
PLAY = "import beside\nfrom {}.scores import half\n\nasync def play(prompt, policy):\n    return await half(3)\n"


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test imports is forgotten after it."""
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_files, "_own_folders", [])
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


def _write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.anyio
async def test_modules_and_packages_beside_a_workflow_are_found_and_their_rewards_in_workers_too(
    tmp_path: Path,
) -> None:
    package = f"scorers_{tmp_path.name}"  # a worker outlives this test, and keeps what it has imported
    folder = _write(tmp_path / "mine", play=PLAY.format(package), beside="NAME = 'x'\n")
    _write(folder / package, scores=SCORES, units="UNIT = 0.5\n")

    play = load_workflow(f"{folder}/play.py")

    assert await play(None, None) == 1.5  # type: ignore[arg-type]


@pytest.mark.parametrize("lazily", [False, True])
def test_a_module_of_the_same_name_in_two_folders_is_told_and_never_mixed(tmp_path: Path, lazily: bool) -> None:
    body = "async def {}(prompt, policy):\n    return 1.0\n"
    within = "def later():\n    import through\n" if lazily else "import through\n"
    for name in ("first", "second"):
        _write(
            tmp_path / name,
            beside=f"NAME = '{name}'\n",
            through="import beside\n",
            **{name: within + body.format(name)},
        )
    _write(tmp_path / "third", beside="", third=body.format("third"))
    if lazily:
        (tmp_path / "first" / "first.py").write_text("import beside\n" + body.format("first"))

    assert load_workflow(f"{tmp_path}/first/first.py")
    assert load_workflow(f"{tmp_path}/third/third.py")
    wrong = rf"second.py: imports (beside|through), got the one in {tmp_path}/first, which .* need {tmp_path}/second/"
    with pytest.raises(UserError, match=wrong):
        load_workflow(f"{tmp_path}/second/second.py")


def test_a_file_that_ends_the_program_as_it_is_imported_is_told_by_its_name(tmp_path: Path) -> None:
    folder = _write(tmp_path, script="import sys\n\nasync def script(prompt, policy): ...\n\nsys.exit(4)\n")

    with pytest.raises(
        UserError, match=r"^workflow .*script.py: importing .*: it calls sys.exit\(4\) as it is imported"
    ):
        load_workflow(f"{folder}/script.py")


def test_the_root_goes_before_a_files_own_folder(tmp_path: Path) -> None:
    _write(tmp_path, common="NAME = 'root'\n")
    _write(tmp_path / "a", common="NAME = 'a'\n", play="import common\nasync def play(p, q): return common.NAME\n")

    play = load_workflow("a/play.py", root=tmp_path)

    assert play.__globals__["common"].NAME == "root"  # type: ignore[attr-defined]


def test_a_step_finds_what_is_beside_its_call(tmp_path: Path) -> None:
    folder = _write(tmp_path / "calls", clip="from bounds_beside import TOP\ndef advantages(rows): return TOP\n")
    _write(folder, bounds_beside="TOP = 3.0\n", broken="raise KeyError('no')\n")

    module, name = import_named(f"{folder}/clip.py:advantages", what="algorithm.calls")

    assert getattr(module, name)([]) == 3.0
    with pytest.raises(UserError, match=r"^algorithm.calls: importing .*broken.py: KeyError: 'no'$"):
        import_named(f"{folder}/broken.py:advantages", what="algorithm.calls")


def test_what_is_beside_a_workflow_is_hashed_with_it_and_its_lines_are_the_users(tmp_path: Path) -> None:
    root, folder = tmp_path / "root", tmp_path / "elsewhere"
    _write(root)
    _write(folder, play="import beside\n", beside="import deeper.down\n", deeper__in__down="", other="")

    before = source_hashes([f"{folder}/play.py"], root=root)
    (folder / "deeper" / "down.py").write_text("changed = True\n")

    assert [Path(name).name for name in before] == ["beside.py", "down.py", "play.py"]
    assert differing(before, source_hashes([f"{folder}/play.py"], root=root)) == [f"{folder}/deeper/down.py"]
    assert UserCode(folder / "play.py", root=root).owns(str(folder / "deeper" / "down.py"))


@pytest.mark.parametrize("is_in_project", [True, False])
def test_a_module_that_is_not_found_is_told_with_the_folder_to_start_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_project: bool
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    _write(project / "flows", play="from marks.half import half\n")
    if is_in_project:
        _write(project / "marks", __init__="", half="half = 0.5\n")
    monkeypatch.chdir(elsewhere)

    with pytest.raises(UserError) as caught:
        import_named(f"{project}/flows/play.py", what="workflow")

    advice = f"start in {project}, which has it" if is_in_project else "install it, or start in the folder that has it"
    assert str(caught.value).endswith(
        f"No module named 'marks', neither installed, nor in {elsewhere}, nor beside the file; {advice}"
    )


def test_what_lies_in_the_root_goes_before_what_is_installed_and_behind_pythons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(_write(tmp_path / "a project", this="", shared="NAME = 'mine'\n"))
    monkeypatch.syspath_prepend(_write(tmp_path / "installed", shared="NAME = 'installed'\n"))
    monkeypatch.delitem(sys.modules, "this", raising=False)
    body = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    import this\nimport shared\n"
    _write(Path.cwd(), play=body + "\nasync def play(prompt, policy):\n    return shared.NAME, this.__file__\n")

    play = load_workflow("play.py")

    name, file = asyncio.run(play(None, None))  # type: ignore[arg-type, misc]
    assert name == "mine"
    assert not Path(file).is_relative_to(tmp_path)


def test_processes_of_ours_do_not_take_a_users_module_for_pythons(tmp_path: Path) -> None:
    """``-m`` of the command line, and what it starts."""
    _write(tmp_path, argparse="raise ImportError", random="raise ImportError", secrets="raise ImportError")
    code = "import runpy, sys; from areal_async.process.interpreter import module_command as of; print(of('x')[1:])"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    said = [
        subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        for words in (["-m", "areal_async", "try", "--help"], ["-P", "-c", code])
    ]

    assert [one.returncode for one in said] == [0, 0], said
    assert said[0].stdout.startswith("usage: python -m areal_async try")
    assert said[1].stdout.strip() == "['-P', '-m', 'x']"
