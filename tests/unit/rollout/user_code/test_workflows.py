"""A workflow is found by file and name, or one sentence says why not."""

import sys
import sysconfig
from pathlib import Path

import pytest

from areal_async.errors import UserError
from areal_async.rollout.user_code.workflows import load_workflow

GOOD = "async def gsm8k(prompt, policy):\n    return 1.0\n\nasync def other(prompt, policy):\n    return 0.0\n"


def write(root: Path, text: str, name: str = "gsm8k.py") -> Path:
    (root / "workflows").mkdir(exist_ok=True)
    path = root / "workflows" / name
    path.write_text(text)
    return path


def test_file_alone_means_the_coroutine_named_like_it(tmp_path: Path) -> None:
    write(tmp_path, GOOD)

    assert load_workflow("workflows/gsm8k.py", root=tmp_path).__name__ == "gsm8k"
    assert load_workflow("workflows/gsm8k.py:other", root=tmp_path).__name__ == "other"


def test_a_file_shadows_nothing_that_python_or_a_package_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "async def random(prompt, policy):\n    return 1.0\n", "random.py")

    load_workflow("workflows/random.py", root=tmp_path)

    import random

    assert hasattr(random, "randint")
    at, installed = sys.path.index(str(tmp_path)), sys.path.index(sysconfig.get_path("purelib"))
    assert sys.path.index(sysconfig.get_path("stdlib")) < at < installed
    assert sys.path[-1] == str(tmp_path / "workflows")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("async def other(prompt, policy): ...\n", "has no 'gsm8k', its coroutines are: other; write"),
        ("def gsm8k(prompt, policy): ...\n", "not async, need `async def gsm8k"),
        ("async def gsm8k(prompt): ...\n", "cannot be called as gsm8k"),
        ("import no_such_module_here\n", "importing .*ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("async def gsm8k(prompt, policy:\n", "SyntaxError"),
    ],
)
def test_what_is_no_workflow_is_named_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, text)

    with pytest.raises(UserError, match=message):
        load_workflow("workflows/gsm8k.py", root=tmp_path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"workflow workflows/nothing\.py: there is no file"):
        load_workflow("workflows/nothing.py", root=tmp_path)


def test_file_that_failed_to_import_can_be_mended_and_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, "raise RuntimeError('not yet')\n")
    with pytest.raises(UserError, match="RuntimeError: not yet"):
        load_workflow("workflows/gsm8k.py", root=tmp_path)

    path.write_text(GOOD)

    assert load_workflow("workflows/gsm8k.py", root=tmp_path).__name__ == "gsm8k"
