"""One run whose rows are every way in which user code can go wrong: it ends with exit 0, and each is recorded."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_run import Run, said_by

pytestmark = [pytest.mark.timeout(420), pytest.mark.whole_runs]

NUM_GOOD = 16
WORKFLOW = """
import asyncio, math, sys, threading, time

from areal_async import Reject
from areal_async.api import ToolCall
from areal_async.rollout.tools.run import Toolbox
from tests.unit.rollout import sample_rewards


class Panic(BaseException):
    pass


def recurse(depth):
    return recurse(depth + 1)


async def swallow():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass


async def leave():
    sys.exit(3)


def tool_raises(): raise Panic("in a tool")
def tool_exits(): sys.exit(4)
def tool_sleeps(): time.sleep(120)
async def tool_swallows(): await swallow()
async def tool_cancels(): asyncio.current_task().cancel(); await asyncio.sleep(0)


async def nonsense(prompt, policy):
    kind = prompt["kind"]
    reply = await policy.chat([{"role": "user", "content": prompt["question"]}])
    if kind.startswith("reward "):
        return await sample_rewards.nonsense(kind.removeprefix("reward "))
    if kind.startswith("tool_"):
        call = ToolCall(id="call00001", name=kind, arguments={})
        (result,) = await Toolbox([globals()[kind]], timeout_s=1.0).run([call])
        raise ValueError("told the model: " + result.text)
    match kind:
        case "raises": raise ValueError("on purpose")
        case "panics": raise Panic("in Rust")
        case "exits": sys.exit(3)
        case "interrupts": raise KeyboardInterrupt
        case "raises a group": raise BaseExceptionGroup("all", [KeyboardInterrupt(), ValueError("x")])
        case "recurses": recurse(0)
        case "hangs": await asyncio.sleep(3600)
        case "swallows": await swallow()
        case "cancels itself": asyncio.current_task().cancel(); await asyncio.sleep(0)
        case "stops the loop": asyncio.get_running_loop().stop()
        case "exits in a task": await asyncio.create_task(leave())
        case "none": return None
        case "nan": return math.nan
        case "text": return "1.0"
        case "1e400": return 1e400
        case "10**5000": return 10**5000
        case "large": return ["x" * 100] * 10**6
        case "half": raise ValueError("\\ud800")
        case "info": policy.info = {"x": "much"}
        case "leaks":
            for _ in range(3):
                asyncio.create_task(swallow())
            asyncio.create_task(policy.chat([{"role": "user", "content": "late"}]))
            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
            prompt.row.clear()
            await asyncio.sleep(0)
    return float(len(reply.token_ids) % 2)
"""
CAUSES = {
    "raises": "workflow nonsense: ValueError: on purpose",
    "panics": "workflow nonsense: Panic: in Rust",
    "exits": "workflow nonsense: called sys.exit(3)",
    "interrupts": "workflow nonsense: KeyboardInterrupt",
    "raises a group": "workflow nonsense: KeyboardInterrupt (and 1 more error)",
    "recurses": "workflow nonsense: RecursionError",
    "hangs": "workflow nonsense: ran past rollout.episode_deadline_s = 12 s",
    "swallows": "workflow nonsense: ran past rollout.episode_deadline_s = 12 s",
    "cancels itself": "workflow nonsense: let a CancelledError escape",
    "stops the loop": "workflow nonsense: called loop.stop()",
    "exits in a task": "workflow nonsense: called sys.exit(3)",
    "none": "workflow nonsense: returned None, need a float",
    "nan": "workflow nonsense: returned nan, need a finite number",
    "text": "workflow nonsense: returned '1.0', need a float",
    "1e400": "workflow nonsense: returned inf, need a finite number",
    "10**5000": "need a finite number",
    "large": "workflow nonsense: returned ['xxx",
    "half": "workflow nonsense: ValueError: ?",
    "info": "workflow nonsense: got policy.info['x'] 'much', need a number",
    "reward kill": "reward nonsense: its worker died with status -9",
    "reward leave": "reward nonsense: its worker died with status 7",
    "reward exit": "reward nonsense: raised: called sys.exit(3)",
    "reward none": "reward nonsense: returned None",
    "reward nan": "reward nonsense: returned nan",
    "reward 1e400": "reward nonsense: returned inf",
    "reward text": "reward nonsense: returned '1.0'",
    "reward no words": "reward nonsense: RewardError",
    "reward hold the interpreter": "reward nonsense: ran past 2 s and was killed",
    "tool_raises": "told the model: error: tool_raises: Panic: in a tool",
    "tool_exits": "told the model: error: tool_exits: called sys.exit(4)",
    "tool_sleeps": "told the model: error: tool_sleeps: no answer within 1 s",
    "tool_swallows": "told the model: error: tool_swallows: no answer within 1 s",
    "tool_cancels": "told the model: error: tool_cancels: let a CancelledError escape",
}


def test_every_cause_is_recorded_and_the_run_ends_well(tmp_path: Path) -> None:
    workflow = tmp_path / "nonsense.py"
    workflow.write_text(WORKFLOW)
    kinds = [*CAUSES, *["leaks", "good"] * (NUM_GOOD // 2)]
    rows = tmp_path / "rows.jsonl"
    lines = [
        json.dumps({"question": f"{number} and 1?", "answer": "1", "kind": kind}) for number, kind in enumerate(kinds)
    ]
    rows.write_text("\n".join(lines))
    good = tmp_path / "good.jsonl"
    good.write_text(json.dumps({"question": "1 and 1?", "answer": "2", "kind": "good"}))
    run = Run(  # a quarter of the epoch that follows, so that the first is over
        tmp_path, "nonsense", run__steps=NUM_GOOD // 4 + 1, run__max_failed_groups=1000, rollout__batch_groups=4,
        rollout__group_size=2, rollout__min_group_size=2, rollout__max_attempts=1, rollout__episode_deadline_s=12,
        rollout__sampling__max_new_tokens=8, tasks__0__dataset__path=rows, eval__dataset__path=good, eval__limit=1,
    )  # fmt: skip

    with run.start(workflow=str(workflow)) as process:
        output, _ = process.communicate(timeout=400)

    assert process.returncode == 0, output
    assert "again (restart" not in output
    assert len(run.lines) == NUM_GOOD // 4 + 1
    told = said_by("dead", run.directory, "--json")
    assert told.returncode == 0, told.stderr
    letters = [json.loads(line) for line in told.stdout.splitlines()]
    reasons = {kinds[letter["prompt"]]: letter["reason"] for letter in letters}
    assert reasons.keys() == CAUSES.keys()
    assert {kind: cause for kind, cause in CAUSES.items() if cause not in reasons[kind]} == {}, reasons
    logged = [json.loads(line) for line in (run.directory / "logs" / "node-0.jsonl").read_text().splitlines()]
    left = [line for line in logged if line["event"] == "workflow.left_tasks"]
    assert len(left) >= NUM_GOOD
    assert {(line["num_tasks"], tuple(line["tasks"])) for line in left} == {(4, ("RecordingPolicy.chat", "swallow"))}
