"""The hashes by which two hosts see that they run the same workflows cover what these import, and no more."""

from pathlib import Path

import pytest

from areal_async.config.sources import load_settings
from areal_async.process.interpreter import SHIPPED
from areal_async.rollout.user_code.source_hashes import code_of_tasks, differing, source_hashes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "workflows/sums.py": "import os, numpy, areal_async\nfrom rewards.number import last\n",
        "rewards/__init__.py": "",
        "rewards/number.py": "def last(text):\n    from . import units\n    from rewards import missing\n",
        "rewards/units.py": "from rewards.number import last\n",
        "rewards/other.py": "",
        "site-packages/numpy.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_workflows_hashes_cover_all_it_imports_from_the_repository(root: Path) -> None:
    assert list(source_hashes(["workflows/sums.py:adds"], root=root)) == [
        "rewards/__init__.py",
        "rewards/number.py",
        "rewards/units.py",
        "workflows/sums.py",
    ]


def test_a_change_of_a_reward_far_behind_an_import_is_seen_and_one_of_another_file_is_not(root: Path) -> None:
    before = source_hashes(["workflows/sums.py"], root=root)
    (root / "rewards" / "other.py").write_text("changed = True\n")
    assert not differing(before, source_hashes(["workflows/sums.py"], root=root))

    (root / "rewards" / "units.py").write_text("changed = True\n")
    (root / "rewards" / "__init__.py").unlink()

    assert differing(before, source_hashes(["workflows/sums.py"], root=root)) == [
        "rewards/__init__.py",
        "rewards/units.py",
    ]


def test_what_an_environment_plays_with_is_code_of_its_task(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent of Harbor's tasks is the user's, or the one that ships; of a package nothing is hashed."""
    monkeypatch.chdir(root)
    words = ["--tasks.0.workflow", "harbor:tasks", "--tasks.1.workflow", "openenv:http://a"]
    assert code_of_tasks(load_settings(None, words)) == [str(SHIPPED / "workflows/terminal.py")]

    settings = load_settings(None, [*words, "--tasks.0.env.agent", "workflows/sums.py:adds"])
    before = source_hashes(code_of_tasks(settings))
    (root / "rewards" / "units.py").write_text("changed = True\n")

    assert "workflows/sums.py" in before
    assert differing(before, source_hashes(code_of_tasks(settings))) == ["rewards/units.py"]
    assert not source_hashes(code_of_tasks(settings, settings.tasks[1:]))


def test_what_is_no_python_or_is_not_there_is_hashed_or_left_to_others_to_refuse(root: Path) -> None:
    (root / "workflows" / "sums.py").write_bytes(b"def \xff\0(")

    assert list(source_hashes(["workflows/sums.py", "workflows/none.py"], root=root)) == ["workflows/sums.py"]


def test_a_file_outside_the_root_goes_by_its_whole_path(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "mine.py"
    elsewhere.write_text("from rewards.units import last\n")

    assert str(elsewhere) in source_hashes([str(elsewhere)], root=root)
    assert "rewards/units.py" in source_hashes([str(elsewhere)], root=root)
