"""A version's folder, and its checkpoint, stay while it is served, whoever cleans up meanwhile."""

from pathlib import Path

import anyio
import pytest

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory
from areal_async.process.atomic_folders import LEDGER, keep_newest
from areal_async.serving.folders import LEASE, OneModel, RunVersions

pytestmark = pytest.mark.anyio


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run whose models are exported already."""
    RunDirectory(tmp_path).write_settings(Settings())
    for step in (1, 2, 3):
        for folder, name in (("checkpoints", LEDGER), ("served/models", LEASE)):
            (tmp_path / folder / f"1-{step}").mkdir(parents=True)
            (tmp_path / folder / f"1-{step}" / name).write_text("{}")
    return tmp_path


def versions(run: Path) -> RunVersions:
    return RunVersions(run, run / "served" / "models", str)


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("1-*"))


async def test_what_is_served_stays_and_of_the_others_the_newest_does(run: Path) -> None:
    async with versions(run).held("1-1") as folder:
        assert folder == run / "served" / "models" / "1-1"
        async with versions(run).held("1-2"):
            keep_newest(run / "checkpoints", 1, lease=LEDGER)
            assert there(run / "checkpoints") == ["1-1", "1-2", "1-3"]
        assert there(run / "served" / "models") == ["1-1", "1-3"]
        keep_newest(run / "checkpoints", 1, lease=LEDGER)
        assert there(run / "checkpoints") == ["1-1", "1-3"]

    assert there(run / "served" / "models") == ["1-3"]
    keep_newest(run / "checkpoints", 1, lease=LEDGER)
    assert there(run / "checkpoints") == ["1-3"]


async def test_what_was_left_behind_goes_at_the_next_start(run: Path) -> None:
    """Who is ended while the servers of an old version drain removes nothing."""
    async with versions(run).held("1-1"):
        await versions(run).tidy()

        assert there(run / "served" / "models") == ["1-1", "1-3"]


async def test_of_two_who_serve_a_version_both_have_it_to_their_ends(run: Path) -> None:
    async with versions(run).held("1-1"):
        async with versions(run).held("1-1"):
            pass
        assert "1-1" in there(run / "served" / "models")


async def test_who_begins_waits_for_who_cleans_up(run: Path) -> None:
    begun = anyio.Event()

    async def hold() -> None:
        async with versions(run).held("1-1"):
            begun.set()

    async with anyio.create_task_group() as tasks:
        async with versions(run)._locked():
            tasks.start_soon(hold)
            await anyio.sleep(0.3)
            assert not begun.is_set()


async def test_what_cannot_be_deleted_stops_nobody(run: Path) -> None:
    models = run / "served" / "models"
    async with versions(run).held("1-2"):
        (models / "lock").unlink()
        (models / "lock").mkdir()

    assert "1-1" in there(models)


async def test_what_is_no_checkpoint_is_told_in_the_words_of_export(run: Path) -> None:
    with pytest.raises(UserError, match=r"version 1-9: cannot be exported: .* has no checkpoint 1-9, need one of 1-1"):
        async with versions(run).held("1-9"):
            pass

    assert there(run / "served" / "models") == ["1-1", "1-2", "1-3"]


async def test_a_model_without_a_run_is_where_it_is(tmp_path: Path) -> None:
    model = OneModel(str(tmp_path), "tiny")

    async with model.held(model.resolve("anything")) as folder:
        assert (folder, model.resolve("anything")) == (tmp_path, "tiny")
