"""Drawing ``top``: as many lines as the terminal has, none wider than it is. Pure."""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from areal_async.monitor.display import sparkline
from areal_async.monitor.evaluated import figure
from areal_async.monitor.top.rows import Column, Row
from areal_async.monitor.top.view import TopView
from areal_async.monitor.view import number, trained_tokens_per_s

MIN_WIDTH, MIN_HEIGHT = 40, 14
TALL = 36
"""Lines from which on the last events stand below every other pane."""
NUM_EVENTS_BELOW = 8
MAX_ALARMS = 3
BAR_WIDTH = 12
MIN_LAST_WIDTH, MIN_WORDS_WIDTH = 24, 16
"""Of the last column, and of words in the one before it; others are left out for them."""
KEYS = "q quit  p pause  r resume  1-{num_panes} pane  s sort  / filter  up/down scroll  ? help"
HELP = (
    "q, Ctrl-C      leave; the run goes on (Ctrl-Z stops this screen alone, fg has it go on)",
    "p              pause: admit nothing more; what was admitted is finished",
    "r              resume",
    "1, 2 ...       the pane of that number",
    "left, right    the pane before, the next one (as Tab)",
    "s              sort the pane by another column",
    "/              show rows with a text in them; Enter keeps it, Esc drops it",
    "up, down       scroll the pane; PgUp, PgDn by ten rows; Home, End",
    "?              this page, and back",
    "lag ms         the most by which a process's event loop was late in the last seconds",
    "first ms       from a request to its first token, mean over ten seconds",
    "tokens due     prompt and largest possible answer of the requests a server has",
    "swap ms        for which new weights pause a server, mean; where there is room",
    "waits          who waits for what, and for how long nothing has come of it",
    "leases         groups that a node works on, and what each waits for",
    "tasks          share of the prompts admitted now, ratio where it was changed, the last ten steps",
)


def draw(view: TopView, width: int, height: int) -> list[Text]:
    """Return exactly ``height`` lines of at most ``width`` cells."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        lines = [Text(f"top needs {MIN_WIDTH} x {MIN_HEIGHT}")]
    elif view.status is None:
        lines = [Text(f"asking ... ({view.trouble})" if view.trouble else "asking ...")]
    else:
        lines = list(_head(view, width))
        lines += _panes(view, width, height - len(lines) - 1)
    lines = lines[: height - 1] + [Text()] * (height - 1 - len(lines))
    lines.append(_foot(view))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _foot(view: TopView) -> Text:
    if view.is_typing:
        return Text(f"/{view.filter}▏ Enter keeps it, Esc drops it", style="reverse")
    if view.notice:
        return Text(view.notice, style="reverse")
    only = f"only with {view.filter!r}, Esc for all  " if view.filter else ""
    return Text.assemble((only, "bold"), (KEYS.format(num_panes=len(view.panes)), "dim"))


def _head(view: TopView, width: int) -> Iterator[Text]:
    status = view.status
    assert status is not None
    title = Text.assemble(
        (f"run {status.run}: ", "bold"),
        (status.state, "bold green" if status.state == "running" else "bold yellow"),
        f"  step {view.step}/{status.steps}  weights {status.weights_version or 'none yet'}",
    )
    if status.reason:
        title.append(f"  ({status.reason})")
    yield title
    yield _fact("reward", *_reward(view, width))
    yield _fact("speed", *_speed(view))
    yield _fact("a step", *_step_time(view))
    yield _fact("staleness", *_staleness(view))
    yield _fact("groups", _groups(view))
    stored = [f"{one['num_messages']} {what} ({one['num_bytes'] / 1e6:.1f} MB)" for what, one in status.queue.items()]
    yield _fact("stored", ", ".join(stored))
    alarms = status.notes[:MAX_ALARMS]
    if len(status.notes) > MAX_ALARMS:
        alarms[-1] = f"and {len(status.notes) - MAX_ALARMS + 1} alarms more"
    for alarm in alarms:
        yield Text(f"! {alarm}", style="bold red")
    if not alarms:
        yield Text("no alarm", style="dim")


def _reward(view: TopView, width: int) -> Iterator[str]:
    rewards = [number(line, "reward_mean") for line in view.steps]
    if not rewards:
        yield "no step yet"
        return
    text = f"{rewards[-1]:.3f}, last {min(10, len(rewards))}: {sum(rewards[-10:]) / len(rewards[-10:]):.3f}"
    assert view.status is not None
    if view.status.evaluation:
        text += f", evaluation {figure(view.status.evaluation)}"
    yield text
    yield f"  {sparkline(rewards[-max(1, min(80, width - 12 - len(text))) :])}"


def _speed(view: TopView) -> Iterator[str]:
    generated = sum(number(node, "tokens_per_s") for node in view.nodes.values())
    yield f"{generated:.0f} tokens/s generated"
    if view.steps:
        yield f", {trained_tokens_per_s(view.steps[-1]):.0f} trained"
    yield f", {view.trajectories_per_s:.1f} trajectories/s"


def _step_time(view: TopView) -> Iterator[str]:
    if not view.steps:
        yield "no step yet"
        return
    line = view.steps[-1]
    yield f"{number(line, 'time_step_s'):.1f} s: {number(line, 'time_wait_data_s'):.1f} waiting for data,"
    yield f" {number(line, 'time_train_s'):.1f} training, {number(line, 'time_weights_s'):.1f} weights"


def _staleness(view: TopView) -> Iterator[str]:
    by_age = view.tokens_by_age
    total = sum(by_age.values())
    if not total:
        yield "no step yet"
        return
    for age, tokens in sorted(by_age.items()):
        share = tokens / total
        percent = "<1" if 0 < share < 0.01 else f"{100 * share:.0f}"
        yield f"{age} {'█' * round(BAR_WIDTH * share) or '▏'} {percent} %  "
    if "max_staleness" in view.controller:
        yield f"of at most {view.controller['max_staleness']}"


def _groups(view: TopView) -> str:
    status = view.status
    assert status is not None
    if "admitted" not in view.controller:
        return "the controller keeps the books, and does not answer"
    running = sum(int(number(node, "num_groups_running")) for node in view.nodes.values())
    return (
        f"{status.in_flight} in flight ({running} running), {status.credits} credits,"
        f" {status.admitted} admitted, {status.settled} settled"
    )


def _fact(name: str, *parts: str) -> Text:
    return Text.assemble((f"{name:<10}", "bold"), "".join(parts))


def _panes(view: TopView, width: int, height: int) -> Iterator[Text]:
    """Draw the chosen pane, and below it the last events where there is room."""
    tabs = Text(overflow="ellipsis", no_wrap=True)
    for place, name in enumerate(view.panes, start=1):
        tabs.append(f" {place} {name} ", style="reverse" if name == view.pane_name else "")
    if view.shows_help:
        yield tabs
        yield from map(Text, HELP)
        return
    below: list[Text] = []
    if height >= TALL - MIN_HEIGHT and view.pane_name != "events" and view.status is not None:
        below = [
            Text("last events", style="bold"),
            *_table((), view.newest_events(NUM_EVENTS_BELOW), width),
        ]
    room = height - 2 - len(below)
    rows = view.rows()
    view.offset = max(0, min(view.offset, len(rows) - room))
    if len(rows) > room:
        tabs.append(f"  {view.offset + 1}-{min(len(rows), view.offset + room)} of {len(rows)}", style="bold")
    tabs.append(f"  by {view.sort_name}", style="dim")
    yield tabs
    pane = list(_table(view.columns, rows[view.offset : view.offset + room], width))
    yield from pane
    yield from [Text()] * (room + 1 - len(pane))
    yield from below


def _table(columns: Sequence[Column], rows: Sequence[Row], width: int) -> Iterator[Text]:
    """Lay rows out in columns as wide as what is in them; the last two share what is left."""
    heads = [tuple(one.name for one in columns)] if columns else []
    grid = [*heads, *(row.cells for row in rows)]
    if not grid:
        return
    widths = [max(cell_len(cells[index]) for cells in grid) for index in range(len(grid[0]))]
    shown = _that_fit(columns, widths, width)
    widths = [widths[index] for index in shown]
    left = width - sum(widths[:-2]) - 2 * (len(widths) - 1)
    if len(widths) > 2 and widths[-2] + widths[-1] > left:
        widths[-2] = max(8, min(widths[-2], left - min(widths[-1], left // 2)))
    numbers = [bool(columns) and columns[index].is_number for index in shown]
    styles = (["bold"] if columns else []) + [row.style for row in rows]
    for cells, style in zip(grid, styles, strict=True):
        fitted = [
            _fitted(cells[index], size, is_number=is_number)
            for index, size, is_number in zip(shown[:-1], widths[:-1], numbers[:-1], strict=True)
        ]
        yield Text("  ".join([*fitted, cells[shown[-1]]]), style=style)


def _that_fit(columns: Sequence[Column], widths: Sequence[int], width: int) -> list[int]:
    """Return the columns that leave the last one room; those that matter least go first."""
    shown, needed = list(range(len(widths))), list(widths)
    needed[-1] = min(widths[-1], MIN_LAST_WIDTH)
    if columns and not columns[-2].is_number:
        needed[-2] = min(widths[-2], MIN_WORDS_WIDTH)
    for rank in sorted({one.is_left_out for one in columns} - {0}):
        if sum(needed[index] for index in shown) + 2 * (len(shown) - 1) <= width:
            break
        shown = [index for index in shown if columns[index].is_left_out != rank]
    return shown


def _fitted(cell: str, size: int, *, is_number: bool) -> str:
    if cell_len(cell) > size:
        return set_cell_size(cell, size - 1) + "…"
    return cell.rjust(size) if is_number else set_cell_size(cell, size)
