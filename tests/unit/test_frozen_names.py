"""Names that others rely on do not change unseen: of subjects, keys, records, settings, verbs, metrics, fault points.

Whoever means to change one edits ``frozen_names.txt``, and says so in the changelog. Written anew by
``python -m tests.unit.test_frozen_names``.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from enum import StrEnum
from pathlib import Path

import msgspec

from areal_async.cli.parsing.verbs import VERBS
from areal_async.config.settings import Settings
from areal_async.config.tree import describe
from areal_async.protocol import arms, evaluations, events, publish_log, run_state, types, wire
from areal_async.protocol.subjects import Names
from areal_async.telemetry.exporters import samples
from areal_async.trainer.batch import step
from areal_async.trainer.engine.stats import StepStats
from areal_async.versions import comparison

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("frozen_names.txt")
REACHED = re.compile(r"\breach\(\"([a-z_.]+)\"\)|\bfailpoint\(\"([a-z_.]+)\"\)")


def _names() -> Iterator[str]:
    """Yield what a run is called, with each argument's own name where it takes one."""
    names = Names("run")
    for name, member in inspect.getmembers(names):
        if isinstance(member, str) and not name.startswith("_") and name != "run":
            yield f"name {name} {member}"
        elif inspect.ismethod(member) and not name.startswith("_"):
            sample = {"kind": "thing.what", "lineage": 3}
            yield f"name {name} {member(*(sample.get(one, one) for one in inspect.signature(member).parameters))}"
    for name, value in vars(inspect.getmodule(Names)).items():
        if name.isupper() and isinstance(value, str):
            yield f"key {value}"


def _records() -> Iterator[str]:
    """Yield each record that is sent or kept, with its fields as they are encoded."""
    for module in (types, evaluations, arms, run_state, wire, publish_log, events, comparison):
        for kind in vars(module).values():
            if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__:
                tag = kind.__struct_config__.tag
                name = kind.__name__.lstrip("_") if tag is None else str(tag)
                yield " ".join(["record", name, *(one.encode_name for one in msgspec.structs.fields(kind))])
    for kind in vars(types).values():
        if inspect.isclass(kind) and issubclass(kind, StrEnum) and kind is not StrEnum:
            yield " ".join(["values", kind.__name__, *(one.value for one in kind)])


def _metrics() -> Iterator[str]:
    for fields_of in vars(samples).values():
        if isinstance(fields_of, tuple):
            yield from (f"sample {one.name} {one.key}" for one in fields_of if isinstance(one, samples.Field))
    yield from (f"metric {field.name}" for field in fields(StepStats))
    for function in (step.batch_metrics, step.metrics_line):
        for node in ast.walk(ast.parse(inspect.getsource(function))):
            if isinstance(node, ast.Dict):
                yield from (f"metric {key.value}" for key in node.keys if isinstance(key, ast.Constant))


def _all() -> list[str]:
    points = {
        next(filter(None, found))
        for path in (ROOT / "areal_async").rglob("*.py")
        for found in REACHED.findall(path.read_text(encoding="utf-8"))
    }
    return sorted(
        {
            *_names(),
            *_records(),
            *_metrics(),
            *(f"point {point}" for point in points),
            *(f"verb {verb} {' '.join(name for name, _ in of.arguments)}" for verb, of in VERBS.items()),
            *(f"setting {one.name}" for one in describe(Settings)),
        }
    )


def test_names_that_others_rely_on_are_as_they_were() -> None:
    frozen = FILE.read_text(encoding="utf-8").splitlines()

    found = _all()

    assert not set(frozen) - set(found), "gone, or called otherwise now"
    assert found == frozen, "new ones are to be frozen too"


if __name__ == "__main__":
    FILE.write_text("\n".join(_all()) + "\n", encoding="utf-8")
