"""Fine-tunings in the process group of the tests."""

from contextlib import nullcontext

import pytest

from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.tuning import loop


@pytest.fixture(autouse=True)
def one_group(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the function under test use the process group that all tests share."""
    monkeypatch.setattr(loop, "joined_ranks", lambda **_: nullcontext(ranks))
