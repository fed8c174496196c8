"""What an installation offers: a cheap package whose names can be listed, its types, and a command."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import areal_async
from areal_async.cli.main import VERBS, main

ROOT = Path(__file__).parents[2]


def test_dir_shows_every_public_name_before_any_of_them_is_loaded() -> None:
    code = "import sys, areal_async as a; print(set(a.__all__) <= {*dir(a)}, 'areal_async.api' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["True", "False"]
    assert all(getattr(areal_async, name) is not None for name in areal_async.__all__)


def test_types_are_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    shipped = project["tool"]["setuptools"]["package-data"]["areal_async"]
    package = ROOT / "areal_async"
    found = {str(path.relative_to(package)) for pattern in shipped for path in package.glob(pattern)}
    report = [path for path in (package / "monitor" / "report").iterdir() if path.suffix not in (".py", "")]
    assert found >= {"py.typed", *(str(path.relative_to(package)) for path in report)}


@pytest.mark.parametrize(
    ("called", "named"),
    [
        ("/usr/bin/areal-async", "areal-async"),
        ("areal-async.exe", "areal-async"),
        ("/x/areal_async/__main__.py", "python -m areal_async"),
    ],
)
def test_the_installed_command_is_the_door_and_names_itself(
    called: str, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, function = project["project"]["scripts"]["areal-async"].partition(":")
    monkeypatch.setattr(sys, "argv", [called, "--help"])

    assert getattr(importlib.import_module(module), function)() == 0
    assert capsys.readouterr().out.startswith(f"usage: {named} VERB")
    for verb in VERBS:
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: {named} {verb} [-h]")


def test_the_client_of_the_broker_takes_no_websockets_along() -> None:
    """They would be a fifth of what a verb takes to start; who wants their library can still have it."""
    code = (
        "import sys, areal_async.bus; print('nats.aio.client' in sys.modules, 'aiohttp' in sys.modules)\n"
        "import aiohttp; print(aiohttp.ClientSession.__name__)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said.split() == ["True", "False", "ClientSession"]


@pytest.mark.parametrize("module", ["cli.run", "controller.main", "trainer.main"])
def test_a_process_that_asks_and_serves_nothing_over_http_imports_no_library_for_it(module: str) -> None:
    """A fifth of what the launcher takes to start, and nothing starts before it has."""
    code = f"import sys, areal_async.{module}; print({{'aiohttp', 'httpx', 'uvicorn'}} & sys.modules.keys())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said.strip() == "set()"
