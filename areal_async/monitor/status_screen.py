"""One screen about a run, as ``status`` prints it: what others say of themselves acts on no terminal. Pure."""

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from areal_async.monitor.durations import duration_text, seconds_since
from areal_async.monitor.snapshot import ENDED, OK, OVER, Status
from areal_async.monitor.token_text import shown
from areal_async.monitor.view import event_text, number
from areal_async.versions.arms import arm_text
from areal_async.versions.evaluated import figure


def render(status: Status) -> Iterable[Table | Text]:
    """Yield what the screen shows, from the run's state in its first line to what is wrong in its last."""
    head = _text(f"run {status.run}: {status.state}", style="bold")
    if status.reason:
        head.append(f" ({shown(status.reason)})", style="not bold")
    yield head
    held_out = f", last evaluation {figure(status.evaluation)}" if status.evaluation else ""
    facts = {
        "step": f"{status.step}/{status.steps}, weights {status.weights_version or 'none yet'}",
        "reward": "" if status.reward_mean is None else f"{status.reward_mean:.3f}{held_out}",
        "tags": ", ".join(f"{tag} {version}" for tag, version in status.tags.items()),
        "groups": _groups(status),
        "stored": status.stored_text,
        "changed": ", ".join(f"{setting} = {value:.12g}" for setting, value in status.changes.items()),
        "mix": ", ".join(f"{task} {share:.1%}" for task, share in status.shares.items()),
    }
    facts |= {f"arm {name}": arm_text(arm) for name, arm in status.arms.items()}
    table = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        if fact:
            table.add_row(name, _text(fact))
    yield table
    processes = Table("process", "", "up", "does", "waits for", "starts", "last death", box=None, padding=(0, 2, 0, 0))
    for member in status.members:
        style = "" if member.presence == OK else "dim" if member.presence == ENDED else "bold red"
        processes.add_row(
            _text(f"{member.role} {member.instance}"),
            Text(member.presence, style=style),
            duration_text(member.up_s) if member.up_s else "",
            *(_text(text) for text in (member.state, member.waits_for, str(member.num_starts or ""), member.why)),
        )
    yield processes
    if status.servers and status.state not in OVER:
        servers = Table(
            "server", "version", "requests", "tokens/s", "fenced", "last failure", box=None, padding=(0, 2, 0, 0)
        )
        for server in status.servers:
            fenced = _text(server["reason"] or "yes", style="bold red") if server["is_fenced"] else Text("")
            load = [f"{number(server, key):.0f}" if key in server else "" for key in ("num_requests", "tokens_per_s")]
            names = _text(server["id"]), _text(server["version"] or "none")
            servers.add_row(*names, *load, fenced, _text(server.get("failure", "")))
        yield servers
    if status.events:
        events = Table.grid(padding=(0, 2))
        for event in status.events:
            ago = f"{duration_text(seconds_since(str(event['at'])))} ago" if "at" in event else ""
            events.add_row(Text(ago, style="dim"), Text(event_text(event), overflow="ellipsis", no_wrap=True))
        yield events
    for note in status.notes:
        yield _text(note, style="red")


def _text(value: str, *, style: str = "") -> Text:
    return Text(shown(value), style=style)


def _groups(status: Status) -> str:
    if status.admitted is None:
        return "unknown: the controller keeps the books, and does not answer"
    counted = f"{status.admitted} admitted, {status.settled} settled, {status.in_flight} in flight"
    return f"{counted} when it ended" if status.credits is None else f"{counted}, {status.credits} credits"
