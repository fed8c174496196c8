"""The dashboard is one that Grafana reads whole: held against the schema that its vendor publishes.

Grafana drops a field that it does not know without a word, and the panel then looks as if it had never been set.
"""

import copy
import json
import typing
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard
from pydantic import ConfigDict, TypeAdapter, ValidationError

FILE = Path(__file__).resolve().parents[4] / "configs" / "monitoring" / "grafana.json"
NUM_COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

register_default_plugins()


@pytest.fixture
def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return read


def _mistakes(dashboard: dict[str, Any]) -> list[str]:
    """Return what Grafana's own types do not know of it, and what they do not allow."""
    known = Dashboard.from_json(dashboard)
    return [*_lost(dashboard, json.loads(JSONEncoder().encode(known)), "dashboard"), *_wrong(known, "dashboard")]


def _lost(given: Any, kept: Any, path: str) -> Iterator[str]:
    """Walk what was given for what is not there any more after it was read."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in kept:
                yield from _lost(value, kept[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}: no such field"
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from _lost(one, other, f"{path}[{index}]")
    elif given != kept:
        yield f"{path}: {given!r} is read as {kept!r}"


def _wrong(known: Any, path: str) -> Iterator[str]:
    """Walk the models for values that their types do not allow: the readers do not look."""
    if isinstance(known, list):
        for index, one in enumerate(known):
            yield from _wrong(one, f"{path}[{index}]")
    elif type(known).__module__.startswith("grafana_foundation_sdk"):
        for name, hint in typing.get_type_hints(type(known)).items():
            value = getattr(known, name)
            if _is_plain(value):
                try:
                    TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
                except ValidationError as exc:
                    yield f"{path}.{name}: {exc.errors()[0]['msg']}"
            else:
                yield from _wrong(value, f"{path}.{name}")


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None)


def test_every_field_and_every_value_is_one_of_grafanas_schema(dashboard: dict[str, Any]) -> None:
    """Whatever is misspelt or stands in the wrong place is a setting that is silently not made."""
    assert _mistakes(dashboard) == []


def _misspelt(panel: dict[str, Any]) -> None:
    panel["fieldConfig"]["defaults"]["units"] = "s"


def _too_deep(panel: dict[str, Any]) -> None:
    panel["fieldConfig"] = {"defaults": panel["fieldConfig"], "overrides": []}


def _of_no_kind(panel: dict[str, Any]) -> None:
    panel["options"]["tooltip"]["mode"] = "several"


def _of_another_panel(panel: dict[str, Any]) -> None:
    panel["options"]["reduceOptions"] = {"calcs": ["lastNotNull"]}


def _query(panel: dict[str, Any]) -> None:
    panel["targets"][0]["legend"] = "{{run}}"


@pytest.mark.parametrize("spoil", [_misspelt, _too_deep, _of_no_kind, _of_another_panel, _query])
def test_the_check_sees_a_mistake(dashboard: dict[str, Any], spoil: Callable[[dict[str, Any]], None]) -> None:
    """A reader that takes anything would prove nothing."""
    spoilt = copy.deepcopy(dashboard)
    spoil(next(panel for panel in spoilt["panels"] if panel["type"] == "timeseries"))

    assert _mistakes(spoilt) != []


def test_panels_have_units_that_grafana_knows_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    """An unknown unit is shown as text behind the number; a panel below another is moved somewhere."""
    panels, known = dashboard["panels"], {value for value in vars(units).values() if isinstance(value, str)}
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert panel["fieldConfig"]["defaults"]["unit"] in known, panel["title"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= NUM_COLUMNS, panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]), panel["title"]
    for one, other in combinations(panels, 2):
        assert not _overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])


def test_it_is_imported_by_hand_and_provisioned_alike(dashboard: dict[str, Any]) -> None:
    """Its source is a variable that is filled in first, its name fixed, its number the importing Grafana's to give.

    A provisioned file is not asked for ``__inputs``: with them its panels would look for a source of that name.
    """
    variables = dashboard["templating"]["list"]
    sources = [panel["datasource"] for panel in dashboard["panels"]]
    sources += [target["datasource"] for panel in dashboard["panels"] for target in panel["targets"]]
    sources += [variable["datasource"] for variable in variables if variable["type"] == "query"]

    assert (variables[0]["name"], variables[0]["type"], variables[0]["query"]) == (
        "datasource", "datasource", "prometheus",
    )  # fmt: skip
    assert all(source == SOURCE for source in sources)
    assert dashboard["uid"] == "areal-async"
    assert dashboard.get("id") is None
    assert "__inputs" not in dashboard
    assert dashboard["schemaVersion"] >= 36
    """From where on a source is an object with its kind and uid."""


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )
