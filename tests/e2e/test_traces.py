"""What became of one prompt is one trace at a collector: across three processes, and across a node that is killed."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.collector import Collector, Seen, collecting
from tests.e2e.test_run import Run, collect, role_processes, wait_until

pytestmark = [pytest.mark.timeout(420), pytest.mark.whole_runs]

# Until its node is killed, each group's second sibling stands still after its first answer; the first one is stored.
WORKFLOW = """
import asyncio
from pathlib import Path

KILLED = Path(__file__).with_name("killed")


async def halting(prompt, policy):
    reply = await policy.chat([{"role": "user", "content": prompt["question"]}])
    if not KILLED.exists() and policy.reply_ids[0].split(".")[1] == "1":
        await asyncio.sleep(3600)
    return float(len(reply.token_ids) % 2)
"""
CONTROLLER, NODE, TRAINER = "areal-controller", "areal-node", "areal-trainer"


def test_a_groups_trace_goes_from_its_admission_to_its_step_whatever_is_killed(tmp_path: Path) -> None:
    workflow = tmp_path / "halting.py"
    workflow.write_text(WORKFLOW)
    with collecting() as collector:
        run = Run(
            tmp_path, "traced", run__steps=2, eval__limit=2, rollout__group_size=2, rollout__min_group_size=2,
            rollout__batch_groups=2, rollout__max_staleness=1, rollout__sampling__max_new_tokens=8,
            metrics__traces=collector.url,
        )  # fmt: skip
        with run.start(workflow=str(workflow)) as process:
            wait_until(lambda: _are_halved(collector) or process.poll() is not None, "half of four groups")
            (tmp_path / "killed").touch()
            for pid in role_processes(run, "node"):
                os.kill(pid, signal.SIGKILL)
            ended = collect(process)
    assert ended.returncode == 0, ended.stdout
    assert "traces." not in ended.stdout, "nothing was lost, and nobody warned of it"

    traces = [Trace(spans) for spans in collector.traces().values()]
    groups = [one for one in traces if one.first.name == "admit halting"]
    steps = {one.first.name: one for one in traces if one.first.name.startswith("step ")}
    rows = [one for one in traces if one.first.name == "ask halting"]
    assert len(groups) + len(steps) + len(rows) == len(traces)
    assert set(steps) == {"step 1", "step 2"}
    assert len({one.first.attributes["areal.group_id"] for one in groups}) == len(groups), "one trace for each group"
    trained = [one for one in groups if one.has("train in step")]
    assert len(trained) == 4
    for group in trained:
        _check_group(group, steps)
    for step in steps.values():
        _check_step(step, trained)
    asked = [(one.first.attributes["areal.eval_id"], one.first.attributes["areal.eval.index"]) for one in rows]
    assert sorted(asked) == [("1-0", 0), ("1-0", 1), ("1-2", 0), ("1-2", 1)]
    for row in rows:
        _check_row(row)


class Trace:
    """The spans of one trace."""

    def __init__(self, spans: Sequence[Seen]) -> None:
        self.spans = sorted(spans, key=lambda span: span.start_ns)
        (self.first,) = [span for span in spans if not span.parent]
        self.by_id = {span.id: span for span in spans}
        assert len(self.by_id) == len(spans), "no span twice"

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name.startswith(name)]

    def has(self, name: str) -> bool:
        return bool(self.named(name))

    def above(self, span: Seen) -> str:
        """Return the name of a span's parent; empty where that was never sent."""
        return self.by_id[span.parent].name if span.parent in self.by_id else ""


def _are_halved(collector: Collector) -> bool:
    """Say whether of four groups one slot is stored, and the answer that the other one has had is known."""
    names = [[span.name.split()[0] for span in spans] for spans in collector.traces().values()]
    return sum("publish" in one and one.count("text_completion") == 2 for one in names) == 4


def _check_group(group: Trace, steps: dict[str, Trace]) -> None:
    assert {span.service for span in group.spans} == {CONTROLLER, NODE, TRAINER}
    assert (group.first.service, group.first.kind) == (CONTROLLER, 4)
    first, second = group.named("lease")
    assert [one.attributes["areal.ticket.num_delivered"] for one in (first, second)] == [1, 2]
    assert second.end_ns - second.start_ns > 20e9, "it waited out the lease of the node that was killed"

    episodes = group.named("invoke_workflow")
    assert [(one.attributes["areal.siblings"], one.parent) for one in episodes] == [
        (["0"], first.id),
        (["1"], second.id),
    ]
    assert [dict(one.events)["gen_ai.evaluation.result"]["gen_ai.evaluation.score.label"] for one in episodes] == [
        "scored"
    ] * 2
    completions = group.named("text_completion")
    lost = [one for one in completions if one.parent not in group.by_id]
    assert len(lost) == 1, "the killed node's sibling, whose own span had not ended"
    assert [one.parent for one in completions if one not in lost] == [one.id for one in episodes]
    assert [group.above(one) for one in group.named("publish")] == [first.name, second.name]
    for one in completions:
        assert one.kind == 3
        assert one.attributes["areal.server_id"] == "0-0"
        assert one.attributes["areal.weights.versions"] in (["1-0"], ["1-1"], ["1-0", "1-1"])
        assert 1 <= one.attributes["gen_ai.usage.output_tokens"] <= 8

    (awaited,), (train,), (settled,) = (group.named(name) for name in ("await cut", "train in step", "settle"))
    for one in (first, second, awaited, train, settled):
        assert one.parent == group.first.id
    assert [one.service for one in (awaited, train, settled)] == [TRAINER] * 3
    assert settled.attributes["areal.outcome"] == "trained"
    step = steps[train.name.removeprefix("train in ")]
    assert train.links == [(step.first.trace, step.first.id)]
    assert group.first.start_ns < second.end_ns <= awaited.end_ns <= train.start_ns <= settled.start_ns


def _check_step(step: Trace, trained: Sequence[Trace]) -> None:
    of_step = [one.first for one in trained if one.named("train in")[0].links[0][0] == step.first.trace]
    assert sorted(step.first.links) == sorted((one.trace, one.id) for one in of_step)
    assert len(of_step) == 2
    names = {span.name: span for span in step.spans}
    for name in ("cut", "fetch", "await data", "train", "publish weights", "swap"):
        assert names[name].parent == step.first.id, name
    assert names["train_actor"].parent == names["train"].id
    assert names["swap"].service == NODE
    assert {one.service for one in step.spans if one.name != "swap"} == {TRAINER}


def _check_row(row: Trace) -> None:
    names = ("lease", "invoke_workflow", "publish", "await result")
    (lease,), (episode,), (published,), (awaited,) = (row.named(name) for name in names)
    assert [one.service for one in (row.first, lease, episode, published, awaited)] == [
        CONTROLLER, NODE, NODE, NODE, CONTROLLER,
    ]  # fmt: skip
    assert (lease.parent, awaited.parent) == (row.first.id,) * 2
    assert (episode.parent, published.parent) == (lease.id,) * 2
    (completion,) = [one for one in row.named("text_completion") if one.parent == episode.id]
    assert completion.attributes["gen_ai.request.temperature"] == 0.0
    assert dict(episode.events)["gen_ai.evaluation.result"]["gen_ai.evaluation.score.label"] == "scored"
