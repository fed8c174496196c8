"""A document is strict JSON and of the shape that was asked for; a schema that is none is an error."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from areal_async.errors import RewardError
from rewards.json_schema import MOST_DEPTH, json_matches, strict_json

pytestmark = pytest.mark.anyio

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LINKED = {
    "$defs": {"list": {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}}}},
    "$ref": "#/$defs/list",
}


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ann", "age": 7}',
        'Here you are:\n```json\n{"name": "Ann", "age": 7}\n```\nDone.',
        '```\n{"name": "B"}\n```\n```\n{"name": "Ann", "age": 7}\n```',
        '  {"name": "Ann", "age": 7.0}\n',
    ],
)
async def test_a_document_of_the_shape_passes(text: str) -> None:
    assert await json_matches(text, PERSON) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"name": "Ann"}',
        '{"name": "", "age": 7}',
        '{"name": "Ann", "age": -1}',
        '{"name": "Ann", "age": true}',
        '{"name": "Ann", "age": 7, "more": 1}',
        '{"name": "Ann", "age": NaN}',
        '{"name": "Ann", "age": 1e400}',
        '{"name": "Ann", "age": Infinity}',
        '{"name": "Ann", "age": ' + "9" * 5000 + "}",
        '{"name": "Ann", "age": -1, "age": 7}',
        "{'name': 'Ann', 'age': 7}",
        '{"name": "Ann", "age": 7} {}',
        'The document is {"name": "Ann", "age": 7}',
        '[{"name": "Ann", "age": 7}]',
    ],
)
async def test_any_other_document_does_not(text: str) -> None:
    assert await json_matches(text, PERSON) == 0.0


async def test_a_document_nested_without_end_does_not_pass_a_schema_that_goes_with_it() -> None:
    def linked(depth: int) -> str:
        return '{"next": ' * depth + "{}" + "}" * depth

    assert await json_matches(linked(10), LINKED) == 1.0
    assert await json_matches(linked(MOST_DEPTH + 1), LINKED) == 0.0
    assert await json_matches(linked(100_000), LINKED) == 0.0


@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"$ref": "#/$defs/missing"}, {"minimum": "many"}],
)
async def test_a_schema_that_is_none_is_an_error(schema: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="schema: .*; give one that is complete in itself"):
        await json_matches("{}", schema)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 41])
async def test_what_is_no_number_in_json_is_none_here(text: str) -> None:
    assert await json_matches(text, {"type": "number"}) == 0.0
    assert await json_matches("9" * 40, {"type": "number"}) == 1.0


@pytest.fixture
def served() -> Iterator[tuple[str, list[str]]]:
    """Serve a schema that allows everything; yield where it is, and who has asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/schema", asked
        server.shutdown()
        thread.join()


async def test_nothing_is_fetched(served: tuple[str, list[str]]) -> None:
    address, asked = served

    with pytest.raises(RewardError, match="give one that is complete in itself"):
        await json_matches("{}", {"$ref": address})

    assert not asked


async def test_a_pattern_that_never_ends_is_killed_and_no_zero() -> None:
    with pytest.raises(RewardError, match="was killed"):
        await json_matches(json.dumps("a" * 60 + "b"), {"type": "string", "pattern": "^(a+)+$"})


def test_strict_json_reads_what_json_is() -> None:
    assert strict_json('{"a": [1, 2.5, null, true, "x"]}') == {"a": [1, 2.5, None, True, "x"]}
