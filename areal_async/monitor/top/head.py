"""The head of ``top``: progress, reward, speed, age, groups and alarms of a run, one line each. Pure."""

from collections.abc import Iterator

from rich.text import Text

from areal_async.monitor.display import sparkline
from areal_async.monitor.snapshot import Status
from areal_async.monitor.token_text import shown
from areal_async.monitor.top.view import TopView
from areal_async.monitor.view import number, reward_text, trained_tokens_per_s
from areal_async.versions.arms import arm_text
from areal_async.versions.evaluated import figure

MAX_ALARMS = 3
MAX_TAGS = 2
BAR_WIDTH = 12


def head_lines(view: TopView, width: int) -> Iterator[Text]:
    """Yield the lines of the head; what is wider than ``width`` cells is for the screen to cut off."""
    status = view.status
    if status is None:
        yield Text(f"asking ... ({shown(view.trouble)})" if view.trouble else "asking ...")
        return
    title = Text.assemble(
        (f"run {shown(status.run)}: ", "bold"),
        (shown(status.state), "bold green" if status.state == "running" else "bold yellow"),
        f"  step {view.step or status.step}/{status.steps}  weights {shown(status.weights_version) or 'none yet'}",
    )
    for tag, version in list(status.tags.items())[:MAX_TAGS]:
        title.append(f"  {shown(tag)} {shown(version)}")
    yield title.append(f"  ({shown(status.reason)})") if status.reason else title
    facts = {
        "reward": _reward(view, status, width),
        "speed": _speed(view),
        "a step": _step_time(view),
        "staleness": "".join(_staleness(view)) or "no step yet",
        "groups": _groups(view, status),
        "stored": status.stored_text,
    }
    facts |= {f"arm {name}": arm_text(arm) for name, arm in status.arms.items()}
    for name, fact in facts.items():
        yield Text.assemble((f"{name:<9} ", "bold"), shown(fact))
    alarms = status.notes[:MAX_ALARMS]
    if len(status.notes) > MAX_ALARMS:
        alarms[-1] = f"and {len(status.notes) - MAX_ALARMS + 1} alarms more"
    for alarm in alarms:
        yield Text(f"! {shown(alarm)}", style="bold red")
    if not alarms:
        yield Text("no alarm", style="dim")


def _reward(view: TopView, status: Status, width: int) -> str:
    rewards = [number(line, "reward_mean") for line in view.steps]
    if not rewards:
        return "no step yet"
    evaluation = f", evaluation {figure(status.evaluation)}" if status.evaluation else ""
    text = reward_text(view) + evaluation
    return f"{text}  {sparkline(rewards[-max(1, min(80, width - 12 - len(text))) :])}"


def _speed(view: TopView) -> str:
    generated = view.sum_of_nodes("tokens_per_s")
    trained = f", {trained_tokens_per_s(view.steps[-1]):.0f} trained" if view.steps else ""
    return f"{generated:.0f} tokens/s generated{trained}, {view.trajectories_per_s:.1f} trajectories/s"


def _step_time(view: TopView) -> str:
    if not view.steps:
        return "no step yet"
    line = view.steps[-1]
    return (
        f"{number(line, 'time_step_s'):.1f} s: {number(line, 'time_wait_data_s'):.1f} waiting for data,"
        f" {number(line, 'time_train_s'):.1f} training, {number(line, 'time_weights_s'):.1f} weights"
    )


def _staleness(view: TopView) -> Iterator[str]:
    """Yield each age with its share of the tokens trained last, and the bound."""
    by_age = view.tokens_by_age
    total = sum(by_age.values())
    for age, tokens in sorted(by_age.items()) if total else ():
        share = tokens / total
        percent = "<1" if 0 < share < 0.01 else f"{100 * share:.0f}"
        yield f"{age} {'█' * round(BAR_WIDTH * share) or '▏'} {percent} %  "
    if total and "max_staleness" in view.controller:
        yield f"of at most {view.controller['max_staleness']}"


def _groups(view: TopView, status: Status) -> str:
    if "admitted" not in view.controller:
        return "the controller keeps the books, and does not answer"
    running = int(view.sum_of_nodes("num_groups_running"))
    return (
        f"{status.in_flight} in flight ({running} running), {status.credits} credits,"
        f" {status.admitted} admitted, {status.settled} settled"
    )
