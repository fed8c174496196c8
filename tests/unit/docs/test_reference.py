"""The reference of the site names, and explains, everything that others rely on."""

import re
from pathlib import Path

import pytest

from areal_async.cli.main import VERBS
from tools.docs import reference

FROZEN = (Path(__file__).parents[1] / "frozen_names.txt").read_text(encoding="utf-8").splitlines()


def frozen(kind: str) -> set[str]:
    return {line.split()[1] for line in FROZEN if line.startswith(f"{kind} ")}


def listed(text: str) -> dict[str, list[str]]:
    """Return the rows of all tables by the name in their first column."""
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", text, re.MULTILINE)
    return {name.split("{")[0]: [cell.strip() for cell in re.split(r"(?<!\\)\|", rest)] for name, rest in rows}


def test_every_setting_is_listed_with_its_default_its_sentence_and_when_it_may_change() -> None:
    rows = listed(reference.settings().partition("## Of `sft`")[0])

    assert frozen("setting") <= rows.keys()
    assert [name for name in frozen("setting") if not all(rows[name][1:])] == []
    assert rows["trainer.lr"][2] == "while the run goes on"
    assert rows["run.steps"][2] == "at a start"
    assert rows["model.path"][2].startswith("never: ")


def test_every_verb_is_listed_with_its_arguments() -> None:
    text = reference.verbs()

    assert re.findall(r"^## (\S+)$", text, re.MULTILINE) == list(VERBS)
    assert all(f"`{argument}" in text for verb in VERBS.values() for argument, _ in verb.arguments)


def test_every_metric_is_listed_with_its_meaning() -> None:
    rows = listed(reference.metrics())

    assert frozen("metric") | frozen("sample") <= rows.keys()
    assert [name for name, cells in rows.items() if not all(cells)] == []


def test_every_stream_bucket_consumer_subject_and_key_is_listed() -> None:
    text = reference.subjects_and_streams()

    rows = listed(text)
    told = {spelt.replace("areal.run", "areal.RUN").replace("AREAL_run", "AREAL_RUN") for spelt in _spelt()}

    assert {name.lower() for name in told} <= {name.lower() for name in rows}
    assert rows["AREAL_RUN_TICKETS"][2] == "prompts to try, until they were"
    assert rows["areal.RUN.tickets.WORKFLOW"][1] == "In `AREAL_RUN_TICKETS`: prompts to try, until they were."


def _spelt() -> set[str]:
    """Return how the names of a run are spelt, without its accounts and its trainers' consumers."""
    left_out = {"account", "bucket_of", "trainer_consumer"}
    return {line.split()[2] for line in FROZEN if line.startswith("name ") and line.split()[1] not in left_out}


def test_the_routes_of_server_and_endpoint_are_listed_with_what_they_need() -> None:
    rows = listed(reference.routes())

    assert rows["/generate"][1] == rows["/classify"][1] == ""
    assert rows["/pause_generation"][1] == rows["/update_weights_from_disk"][1] == "the node's secret"
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models"} <= rows.keys()


@pytest.mark.parametrize("part", reference.PARTS)
def test_each_part_has_a_page(part: str) -> None:
    page = Path(reference.__file__).with_name("reference") / f"{part}.md"

    assert f"```{{reference}} {part}\n```" in page.read_text(encoding="utf-8")
