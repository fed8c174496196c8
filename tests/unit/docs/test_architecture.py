"""The walk of ``areal_async/README.md`` goes through what is there, and its folders are the package's."""

import re
from functools import reduce
from importlib import import_module
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "areal_async"
TEXT = (PACKAGE / "README.md").read_text(encoding="utf-8")
MIN_STATIONS = 20


def test_every_name_of_the_walk_is_there() -> None:
    walk = TEXT.partition("<!-- walk -->")[2].partition("<!-- end of walk -->")[0]
    stations = re.findall(r"`([a-z_.]+):([A-Za-z_.]+)`", walk)

    for module, qualname in stations:
        reduce(getattr, qualname.split("."), import_module(f"areal_async.{module}"))

    assert len(stations) >= MIN_STATIONS


def test_every_folder_of_the_package_is_told_of() -> None:
    told = re.findall(r"^\| \[?`([a-z_]+)/`", TEXT, re.MULTILINE)

    folders = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]

    assert sorted(told) == sorted(folders)
