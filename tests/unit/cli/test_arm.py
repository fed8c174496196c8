"""What ``arm`` does on this host with what a run has told."""

from pathlib import Path

import pytest

from areal_async.cli.arm import remove_own


def test_the_model_of_an_arm_is_deleted_with_it(tmp_path: Path) -> None:
    own = tmp_path / "arms" / "v1_40-1-40"
    own.mkdir(parents=True)

    remove_own(tmp_path / "arms", str(own))

    assert not own.exists()
    assert own.parent.exists()


@pytest.mark.parametrize(
    "told", ["arms/../kept", "arms/..", "arms/v/..", "arms", "arms/.", "arms/v/../../kept", "kept", ""]
)
def test_nothing_else_is_deleted_whatever_a_run_tells(tmp_path: Path, told: str) -> None:
    for name in ("arms/v", "kept"):
        (tmp_path / name).mkdir(parents=True)

    remove_own(tmp_path / "arms", f"{tmp_path}/{told}")

    assert (tmp_path / "arms" / "v").exists()
    assert (tmp_path / "kept").exists()
