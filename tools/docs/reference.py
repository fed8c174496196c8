"""The reference part of the site, made from the code when the site is built: a page holds ``{reference} NAME``.

Each function returns Markdown. What it lists is what the code has; a test holds that nothing is left out or
unexplained.
"""

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, cast

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from starlette.routing import Route

from areal_async.bus.streams import consumer_configs, stream_configs
from areal_async.cli.parsing.verbs import VERBS, Verb
from areal_async.config.kept import why_kept
from areal_async.config.live import LIVE
from areal_async.config.reward_model import RewardModelSettings
from areal_async.config.settings import Settings
from areal_async.config.sft import SftSettings
from areal_async.config.tree import describe
from areal_async.inference.embedded.engine.service import EngineService
from areal_async.inference.embedded.http.bodies import admin_route
from areal_async.inference.embedded.http.routes import build_app
from areal_async.protocol import run_state, subjects, types
from areal_async.rollout.endpoint.http import APIS
from areal_async.serving.app import OWN
from areal_async.telemetry.exporters import samples
from areal_async.trainer.batch import step
from areal_async.trainer.engine.gradient_groups import GROUPS
from areal_async.trainer.engine.stats import StepStats

RUN = "some-run"
"""A run's name; the pages show ``RUN`` instead."""
OF_A_STEP = MappingProxyType(
    {
        **{
            f"grad_norm_{group}": f"Gradient norm of this part of the model: {group.replace('_', ' ')}."
            for group in GROUPS
        },
        "step": "Number of the training step, from 1.",
        "weights_version": "The version that the step made: lineage and step.",
        "behave_weight_mean": "Mean weight that corrects for what older weights or another engine sampled.",
        "behave_weight_max": "Largest of these weights.",
        "groups_all_equal": "Groups whose rewards are all equal: they teach nothing.",
        "num_updates": "Optimizer updates of the step.",
        "ratio_mean": "Mean importance ratio, as it is clipped.",
        "ratio_max": "Largest importance ratio.",
        "stale_tokens_masked": "Tokens left out of the loss because they were too old (`rollout.when_stale: mask`).",
        "uncredited_tokens": "Tokens of replies that a workflow gave no reward of their own, while it did to others.",
        "time_checkpoint_s": "Time for which a checkpoint held up the steps since the line before.",
        "logprob_gap_all_mean": "Mean |trainer - server| logprob over all trained tokens, stale and steered ones too.",
        "clip_fraction_lower": "Share of tokens whose gradient the clip took away, with a ratio under 1.",
        "clip_fraction_upper": "Share of tokens whose gradient the clip took away, with a ratio over 1.",
        **{
            f"logprob_gap_over_{edge}": f"Share of those tokens whose gap is over {edge.replace('_', '.')} nats."
            for edge in ("0_001", "0_01", "0_1", "1")
        },
    }
)
"""Meanings of those keys of ``metrics.jsonl`` that neither the exporter nor a docstring of its own explains."""
BY_NAME = MappingProxyType(
    {
        "staleness_tokens/AGE": "Trained tokens of this age.",
        "reward_at_age/AGE": "Mean reward of trajectories whose oldest token has this age.",
        "groups/WORKFLOW": "Groups of one task, where a run has several.",
        "reward/WORKFLOW": "Mean reward of one task, where a run has several.",
        "info/KEY": "What workflows put into `policy.info`, averaged over the trajectories that have it.",
        "rollout/KEY": "What every trajectory has by itself: duration, turns, sequences, tool calls and the like.",
    }
)
"""Keys with a part that depends on the run."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is shown as code."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for first, *others in rows:
        lines.append("| " + " | ".join([f"`{first}`", *map(_cell, others)]) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return text of a docstring for a table: what is not code is taken as it stands."""
    parts = text.replace("``", "`").replace("|", "\\|").split("`")
    return "`".join(
        part if number % 2 else part.replace("<", "\\<").replace("*", "\\*") for number, part in enumerate(parts)
    )


def settings() -> str:
    """Return every setting with its default, its sentence, and when it may change."""
    parts = []
    for title, kind in (("Of a run", Settings), ("Of `sft`", SftSettings), ("Of `reward-model`", RewardModelSettings)):
        parts.append(f"## {title}\n")
        sections: dict[str, list[list[str]]] = {}
        for one in describe(kind):
            row = [one.name, f"`{one.default}`" if one.default else "", one.sentence]
            sections.setdefault(one.name.partition(".")[0], []).append(
                [*row, _changes(one.name)] if kind is Settings else row
            )
        head = ["setting", "default", "what it is", *(["may change"] if kind is Settings else [])]
        for section, rows in sections.items():
            parts.append((f"### {section}\n\n" if kind is Settings else "") + table(head, rows))
    return "\n".join(parts)


def _changes(name: str) -> str:
    """Return when another value of a setting is taken."""
    pattern = ".".join("*" if part in ("0", "NAME") else part for part in name.split("."))
    if pattern in LIVE:
        return "while the run goes on"
    if why := why_kept(name):
        return f"never: {why}"
    return "at a start"


def verbs() -> str:
    """Return every verb with its arguments."""
    return "\n".join(_verb(name, verb) for name, verb in VERBS.items())


def _verb(name: str, verb: Verb) -> str:
    rows = [
        [" ".join([argument, *_metavar(argument, keywords)]), str(keywords.get("help", ""))]
        for argument, keywords in verb.arguments
    ]
    told = f"{verb.sentence[0].upper()}{verb.sentence[1:]}."
    more = "\nAny setting may follow as `--section.key value`.\n" if verb.takes_settings else ""
    return f"## {name}\n\n{told}\n\n{table(['argument', 'what it is'], rows) if rows else ''}{more}"


def _metavar(argument: str, keywords: Any) -> list[str]:
    return [str(keywords["metavar"])] if argument.startswith("--") and "metavar" in keywords else []


def metrics() -> str:
    """Return every number that a run tells: of a step, and of each role."""
    roles = {
        "controller": samples.CONTROLLER,
        "arm": samples.ARM,
        "node": samples.NODE,
        "server": samples.SERVER,
        "trainer": samples.TRAINER,
        "serve": samples.SERVE,
    }
    parts = [
        "## metrics.jsonl\n\nOne object for each training step; `/metrics` has the same as `areal_step_...`.\n",
        table(["key", "what it is"], [[name, meaning] for name, meaning in step_metrics().items()]),
        table(["key", "what it is"], [[name, meaning] for name, meaning in BY_NAME.items()]),
        "## Prometheus\n\nWith `metrics.prometheus` each process serves these at `/metrics`.\n",
    ]
    for role, told in roles.items():
        rows = [[one.name + _labels(one), samples.kind_of(one.name), one.help] for one in told]
        parts.append(f"### {role}\n\n" + table(["metric", "kind", "what it is"], rows))
    return "\n".join(parts)


def _labels(one: samples.Field) -> str:
    return "{" + ", ".join(f"{name}={value}" for name, value in one.labels.items()) + "}" if one.labels else ""


def step_metrics() -> dict[str, str]:
    """Return the fixed keys of a line of ``metrics.jsonl``, each with its meaning; empty where none is told."""
    told = attribute_docs(StepStats)
    return {
        name: OF_A_STEP.get(name) or samples.STEP.get(name) or told.get(name, "").replace("\n", " ")
        for name in sorted(
            {
                *(field.name for field in fields(StepStats)),
                *_dict_keys(step.batch_metrics),
                *_dict_keys(step.metrics_line),
            }
        )
    }


def _dict_keys(function: Callable[..., Any]) -> Iterator[str]:
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def attribute_docs(kind: type) -> dict[str, str]:
    """Return the docstrings that stand below the attributes of a class, in its body or where they are first set."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    bodies = [cast(ast.ClassDef, tree).body]
    bodies += [one.body for one in bodies[0] if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    return {
        ast.unparse(before.target).removeprefix("self."): inspect.cleandoc(after.value.value).partition("\n\n")[0]
        for body in bodies
        for before, after in itertools.pairwise(body)
        if isinstance(before, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
    }


def subjects_and_streams() -> str:
    """Return the names of a run at its broker: streams, consumers, subjects, keys, and the records behind the keys."""
    run = _settings()
    streams = [
        [_shown(one["name"]), one["retention"], _subjects(one["subjects"]), one["description"]]
        for one in stream_configs(run)
        if not one["name"].startswith("KV_")
    ]
    buckets = [
        [_shown(one["name"].removeprefix("KV_")), one["description"]]
        for one in stream_configs(run)
        if one["name"].startswith("KV_")
    ]
    consumers = [[one["durable_name"], f"`{_shown(stream)}`"] for stream, one in consumer_configs(run)]
    return "\n".join(
        [
            "## Streams\n\n" + table(["stream", "keeps", "subjects", "what it holds"], streams),
            "## Buckets\n\n" + table(["bucket", "what it holds"], buckets),
            "## Consumers\n\nA lineage of the trainer has one of its own, `trainer-LINEAGE`, of the trajectories.\n\n"
            + table(["consumer", "stream"], consumers),
            "## Subjects and keys\n\n" + table(["name", "in the code", "what it is"], _names()),
            "## Records\n\n" + table(["record", "fields", "what it is"], _records()),
        ]
    )


def _subjects(names: Sequence[str]) -> str:
    own = [name for name in names if name.startswith("areal.")]
    return _code(map(_shown, own)) + (", and what the broker tells of these streams" if len(own) < len(names) else "")


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _shown(name: str) -> str:
    return name.replace(RUN, "RUN")


def _names() -> Iterator[list[str]]:
    """Yield every subject and key with its meaning, or with that of the stream that it is in."""
    told = attribute_docs(subjects.Names)
    for name, member in inspect.getmembers(subjects.Names(RUN)):
        if name.startswith("_") or name.endswith(("stream", "consumer", "bucket", "account", "bucket_of", "run")):
            continue
        spelt = member
        if inspect.ismethod(member):
            parts = [one.upper() for one in inspect.signature(member).parameters]
            spelt = member(*("THING.WHAT" if one == "KIND" else one for one in parts))
        meaning = told.get(name, "") if spelt is member else inspect.getdoc(member) or ""
        yield [_shown(spelt), f"`Names.{name}`", " ".join(meaning.split()) or _of_its_stream(spelt)]


def _of_its_stream(subject: str) -> str:
    for one in stream_configs(_settings()):
        if any(subject.startswith(wanted.removesuffix(">")) for wanted in one["subjects"]):
            return f"In `{_shown(one['name'])}`: {one['description']}."
    return ""


@functools.cache
def _settings() -> Settings:
    return Settings.model_validate({"run": {"name": RUN}})


def _records() -> Iterator[list[str]]:
    for module in (types, run_state):
        for name, kind in vars(module).items():
            if inspect.isclass(kind) and kind.__module__ == module.__name__ and hasattr(kind, "__struct_fields__"):
                summary = (inspect.getdoc(kind) or "").partition("\n\n")[0]
                yield [name, _code(kind.__struct_fields__), " ".join(summary.split())]


def routes() -> str:
    """Return the routes of an embedded server, of a node's endpoint for agents, and of ``serve``."""
    service = object.__new__(EngineService)  # nobody asks it anything: it needs neither a model nor a loop
    rows = []
    for route in build_app(service).routes:
        assert isinstance(route, Route)
        is_guarded = getattr(route.endpoint, "__qualname__", "").startswith(f"{admin_route.__name__}.")
        methods = ", ".join(sorted((route.methods or set()) - {"HEAD"}))
        rows.append([route.path, methods, "the node's secret" if is_guarded else ""])
    apis = [[f"/v1/{path}", "POST", api.name] for path, api in APIS.items()]
    own = [[f"/v1/{path}", *about] for path, about in OWN.items()]
    models = [["/v1/models", "GET", "the model"], ["/v1/models/NAME", "GET", "the model"]]
    return "\n".join(
        [
            "## An embedded server\n\nPaths, methods, fields and statuses are SGLang's.\n\n"
            + table(["path", "methods", "needs"], rows),
            "## A node's endpoint for agents\n\nBelow `policy.base_url`, which has the trajectory's own part of the "
            "path, with `/v1` and without.\n\n" + table(["path", "method", "API"], [*apis, *models]),
            "## `serve`\n\nWith `/v1` and without; all need a key but `health`.\n\n"
            + table(["path", "method", "API"], [*apis, *own]),
        ]
    )


PARTS: MappingProxyType[str, Callable[[], str]] = MappingProxyType(
    {"settings": settings, "verbs": verbs, "metrics": metrics, "subjects": subjects_and_streams, "routes": routes}
)


class Reference(SphinxDirective):
    """Puts one of ``PARTS`` in its place."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return its nodes, sections included."""
        return self.parse_text_to_nodes(PARTS[self.arguments[0]](), allow_section_headings=True)


def setup(site: Sphinx) -> dict[str, bool]:
    """Add the directive."""
    site.add_directive("reference", Reference)
    return {"parallel_read_safe": True}
