"""The garbage collector leaves alone what is imported, and what was alive when the node started."""

import gc
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_async.process.gc_pauses import importing, spare_pauses


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_is_alive_at_the_start_is_never_looked_at_again() -> None:
    gc.set_threshold(700, 10, 10)  # an earlier test may have started a node in this process

    spare_pauses()

    assert gc.get_freeze_count() > 0
    assert gc.get_threshold() > (700, 10, 10)


def test_nothing_is_collected_while_modules_are_imported_and_what_they_made_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full_of_lists.py").write_text("lists = [[] for _ in range(100_000)]")
    monkeypatch.syspath_prepend(tmp_path)
    gc.unfreeze()
    collections: list[str] = []
    gc.callbacks.append(on_collection := lambda phase, info: collections.append(phase))
    try:
        with importing():
            with importing():
                kept = importlib.import_module("full_of_lists")
            assert not gc.isenabled(), "the outer one goes on"
        during = list(collections)
    finally:
        gc.callbacks.remove(on_collection)
        del sys.modules["full_of_lists"]

    assert during == []
    assert gc.get_freeze_count() > len(kept.lists)
    assert gc.isenabled()


def test_where_all_is_imported_already_nothing_is_set_aside() -> None:
    gc.unfreeze()

    with importing():
        importlib.import_module("gc")

    assert gc.get_freeze_count() == 0


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError), importing():
        importlib.import_module("no_such_module")

    assert gc.isenabled()


def test_a_verb_is_imported_without_a_look() -> None:
    code = (
        "import gc; from areal_async.cli.main import main; frozen = []; "
        "gc.callbacks.append(lambda phase, _: frozen.append(gc.get_freeze_count())); "
        "main(['status', '--run', 'nowhere']); print(gc.get_freeze_count(), frozen.count(0))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    num_frozen, num_before = map(int, done.stdout.split())
    assert num_frozen > 50_000, "what was imported"
    assert num_before < 40, "and not the hundreds of looks that an import takes"


def test_what_was_imported_is_taken_apart_at_the_end() -> None:
    """Libraries in C++ tell of every object that is not."""
    code = (
        "import gc, types\nfrom areal_async.process.gc_pauses import importing\n"
        "class Told:\n    def __init__(self): self.me = self\n    def __del__(self): print('taken apart')\n"
        "with importing():\n    import csv\n    csv.kept = types.SimpleNamespace(told=Told())\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "taken apart\n"
