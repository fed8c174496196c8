"""Users begin in an empty folder with what they have installed: nothing of this repository is in reach there.

The wheel is built from a source distribution, in a copy of what git has, and installed into an environment of its own,
which finds every other package where this one's are; the copy is gone before the first command is given.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks_of, commands
from tests.unit.environments.harbor_tasks import make_tasks

pytestmark = [pytest.mark.timeout(900), pytest.mark.whole_runs]

DEADLINE_S = 400.0
SHORT = {"AREAL_ASYNC_RUN__STEPS": "1", "AREAL_ASYNC_ROLLOUT__BATCH_GROUPS": "2", "AREAL_ASYNC_EVAL__LIMIT": "8"}
TOP = {"areal_async", "areal_async-0.1.0.dist-info"}
PAGE = "areal_async/cli/README.md"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and not name.startswith(("tests/", ".")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    _build("sdist", source, folder)
    shutil.rmtree(source)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as told:
        told.extractall(folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    _build("wheel", unpacked, folder)
    shutil.rmtree(unpacked)
    (built,) = folder.glob("*.whl")
    return built


def _build(what: str, source: Path, folder: Path) -> None:
    """Do what pip does, without asking an index for setuptools."""
    code = f"import sys, setuptools.build_meta as it; it.build_{what}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment variables of a shell in which the wheel's own interpreter comes first."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    others = sysconfig.get_path("purelib")  # its *.pth, one of which leads to this repository, are not read there
    Path(sysconfig.get_path("purelib", vars={"base": str(folder)}), "others.pth").write_text(others)
    for name in ("nats-server", "bwrap"):
        if (there := Path(sys.executable).with_name(name)).exists():
            (folder / "bin" / name).symlink_to(there)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    kept["PATH"] = f"{python.parent}{os.pathsep}{kept['PATH']}"
    return kept | SHORT | {"CUDA_VISIBLE_DEVICES": "", "VIRTUAL_ENV": str(folder)}


@pytest.fixture(scope="module")
def project(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project, as the first commands of the page write one and train in it."""
    folder = tmp_path_factory.mktemp("an empty folder")
    (block,) = (one for one in blocks_of(PAGE) if one.heading == "A project of your own" and one.language == "console")
    first, *then = (command for command, _ in commands(block.body))
    _say(first, folder, environment)
    one_of_pythons = folder / "demo" / "random.py"
    one_of_pythons.write_text("raise ImportError('a module of the user')\n")
    _say(" && ".join(then), folder, environment)
    one_of_pythons.unlink()  # for who has Python start a script beside it there is no help
    return folder / "demo"


def _say(command: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, f"$ {command}\n{done.stdout}"
    return done.stdout


def test_the_wheel_holds_one_package_with_its_types_its_command_and_its_templates(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as told:
        names = set(told.namelist())
        entry = told.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()

    assert {name.partition("/")[0] for name in names} == TOP
    assert "areal-async = areal_async.__main__:command" in entry
    assert {
        "areal_async/py.typed",
        "areal_async/templates/rewards/math_answer.py",
        "areal_async/templates/configs/models/tiny/model.safetensors",
        "areal_async/templates/configs/environment_cpu.yaml",
        "areal_async/templates/workflows/terminal.py",
    } <= names
    assert not any("_sft" in name or "tiny_grader" in name for name in names), "what no project begins with"


def test_nothing_of_the_repository_is_used(project: Path, environment: dict[str, str]) -> None:
    code = (
        "import json, sys, areal_async.runs, areal_async.rollout.main, areal_async.process.interpreter as t; "
        "print(json.dumps([str(t.SHIPPED), *(getattr(m, '__file__', None) or '' for m in sys.modules.values())]))"
    )

    packaged, *files = json.loads(_say(f'python -P -c "{code}"', project, environment))

    assert packaged.startswith(environment["VIRTUAL_ENV"])
    inside = sysconfig.get_path("purelib")
    assert [file for file in files if file.startswith(f"{ROOT}/") and not file.startswith(inside)] == []
    assert [file for file in files if "areal_async" in file and not file.startswith(environment["VIRTUAL_ENV"])] == []


def test_a_project_is_trained_tried_checked_and_evaluated(project: Path, environment: dict[str, str]) -> None:
    metrics = (project / "runs" / "demo_cpu" / "metrics.jsonl").read_text().splitlines()

    assert [json.loads(line)["step"] for line in metrics] == [1]
    assert (project / "runs" / "demo_cpu" / "model" / "config.json").is_file()
    assert "2 scored, 0 failed" in _say("areal-async try workflow.py --n 2", project, environment)
    assert "0 errors" in _say("areal-async doctor workflow.py", project, environment)
    assert "8 rows scored" in _say("areal-async eval --run demo_cpu", project, environment)
    assert "areal_async 0.1.0" in _say("areal-async --version", project, environment)


def test_from_python_the_same_is_done_by_a_script_without_a_guard(project: Path, environment: dict[str, str]) -> None:
    (block,) = (one for one in blocks_of(PAGE) if one.heading == "From Python" and one.language == "python")
    (project / "script.py").write_text(block.body)

    said = _say("python script.py", project, environment).splitlines()

    assert said[-2].startswith(f"finished {project}/runs/short {project}/runs/short/model 0."), said
    accuracy, low, high = map(float, said[-1].split())
    assert low <= accuracy <= high


def test_a_projects_own_test_passes_and_its_types_hold(project: Path, environment: dict[str, str]) -> None:
    assert "1 passed" in _say("python -m pytest -q -p no:cacheprovider", project, environment)
    assert "Success: no issues found" in _say("python -m mypy .", project, environment)


@pytest.mark.parametrize(
    ("template", "command", "told"),
    [
        ("tools", "try workflow.py --n 2", "2 scored, 0 failed"),
        ("agent", "try workflow.py --n 2", "2 scored, 0 failed"),
        ("environment", "run workflow.py --run.name nim", "run nim finished"),
        ("vision", "try workflow.py --n 2", "2 scored, 0 failed"),
    ],
)
def test_every_other_template_works_at_once(
    template: str, command: str, told: str, environment: dict[str, str], tmp_path: Path
) -> None:
    _say(f"areal-async init . --template {template}", tmp_path, environment)

    assert told in _say(f"areal-async {command}", tmp_path, environment)


def test_tasks_of_harbor_are_tried_where_there_is_nothing_else(environment: dict[str, str], tmp_path: Path) -> None:
    make_tasks(tmp_path / "tasks", 2)

    assert "2 scored, 0 failed" in _say("areal-async try harbor:tasks --n 2", tmp_path, environment)


@pytest.mark.nightly
def test_a_project_learns_with_the_settings_that_it_has(environment: dict[str, str], tmp_path: Path) -> None:
    whole = {name: value for name, value in environment.items() if name not in SHORT}
    _say("areal-async init demo", tmp_path, whole)

    said = _say("areal-async run workflow.py", tmp_path / "demo", whole)

    first, *_, last = re.findall(r"^eval of version \S+ accuracy (\S+) over 256 rows$", said, re.MULTILINE)
    assert float(first) < 0.6
    assert float(last) > 0.85
