"""Each setting is one that a run keeps, with the reason, or one that a start of it may say otherwise."""

from areal_async.config.kept import KEPT, matches, may_change, why_kept
from areal_async.config.settings import Settings
from areal_async.config.tree import ANY_INDEX, ANY_NAME, annotation_at, leaves

PLACES = {".".join("*" if part in (ANY_INDEX, ANY_NAME) else part for part in parts) for parts, _ in leaves(Settings)}
"""Every setting there is."""


def test_each_setting_is_kept_or_may_change() -> None:
    """Whoever adds one decides: into ``KEPT`` with its reason, or into ``MAY_CHANGE``."""
    free = list(may_change())
    kept = {place for place in PLACES for names in KEPT.values() if any(matches(place, one) for one in names)}

    assert len(free) == len(set(free))
    assert PLACES - kept - set(free) == set(), "neither kept nor free to change"
    assert kept & set(free) == set(), "both"
    assert set(free) - PLACES == set(), "no such setting"


def test_what_is_kept_exists() -> None:
    for name in [name for names in KEPT.values() for name in names]:
        parts = [ANY_INDEX if part == "*" else part for part in name.split(".")]

        assert annotation_at(Settings, parts) is not None, name


def test_a_section_is_kept_with_what_is_in_it() -> None:
    assert why_kept("tasks.3.dataset.split") == why_kept("tasks.3.dataset") == why_kept("tasks") != ""
    assert why_kept("policies.judge") != ""
    assert why_kept("eval.dataset") == why_kept("tasks.0.eval.dataset") == why_kept("tasks.0.ratio") == ""
