"""``top``'s screen: the head, the panes and the keys, drawn in a terminal by textual.

It draws what the view holds and asks nobody: the feed that fills the view calls ``draw_soon``. When the terminal is
given back, at the end, at Ctrl-Z or by a signal, its modes, its text and its cursor are as they were.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.geometry import Size
from textual.timer import Timer
from textual.widgets import Input, Label, Static

from areal_async.monitor.token_text import shown
from areal_async.monitor.top.head import head_lines
from areal_async.monitor.top.rows import PANES, Column
from areal_async.monitor.top.table import PaneTable
from areal_async.monitor.top.terminal import TopDriver
from areal_async.monitor.top.view import TopView

MIN_WIDTH, MIN_HEIGHT = 40, 14
TALL = 36
"""Lines from which on the last events stand below every other pane."""
NUM_EVENTS_BELOW = 8
MIN_PAUSE_S = 0.1
"""Seconds between two drawings."""
REDRAW_S = 1.0
"""Seconds after which everything is drawn anew: how long ago it was has changed."""
NOTICE_S = 5.0
"""How long the answer to an order is in sight."""
ALL_ROWS = 1 << 30
BELOW_COLUMNS = (Column("ago", True), Column("last events"))
KEYS = "q quit  p pause  r resume  1-{num_panes} pane  s sort  / filter  up/down scroll  ? help"
TYPING = " Enter keeps it, Esc drops it"
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


class TopApp(App[signal.Signals]):
    """One run on one screen; returns the signal that ended it, None when the user left."""

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (MIN_WIDTH, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (MIN_HEIGHT, "-normal"), (TALL, "-tall")]
    CSS = f"""
    Screen {{ background: ansi_default; color: ansi_default; overflow: hidden; }}
    Static, Label {{ text-wrap: nowrap; text-overflow: ellipsis; }}
    #small, #below, #help, #typing, .-low #body, .-narrow #body {{ display: none; }}
    .-low #small, .-narrow #small {{ display: block; }}
    #help Static {{ text-wrap: wrap; }}
    #body {{ height: 1fr; overflow: hidden; }}
    #pane, #help {{ height: 1fr; scrollbar-size: 0 0; background: ansi_default; }}
    .-tall #below.-wanted {{ display: block; height: {NUM_EVENTS_BELOW + 1}; }}
    #foot, #typing {{ dock: bottom; height: 1; }}
    #typing Label {{ width: auto; }}
    #filter {{ width: 1fr; background: ansi_default; color: ansi_default; }}
    #filter:focus {{ background-tint: ansi_default 0%; }}
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit"),
        Binding("ctrl+c", "interrupt", priority=True),
        Binding("ctrl+z", "suspend_process", priority=True),
        Binding("p", "order('pause')"),
        Binding("r", "order('resume')"),
        Binding("s", "sort"),
        Binding("slash", "type(True)", priority=True),
        Binding("enter", "type(False)", priority=True),
        Binding("escape", "drop_filter"),
        Binding("question_mark", "help"),
        Binding("left", "turn(-1)"),
        Binding("right", "turn(1)"),
        Binding("tab", "turn(1)", priority=True),
        Binding("up", "scroll(-1)"),
        Binding("down", "scroll(1)"),
        Binding("pageup", "scroll(-10)"),
        Binding("pagedown", "scroll(10)"),
        Binding("home", f"scroll({-ALL_ROWS})"),
        Binding("end", f"scroll({ALL_ROWS})"),
        *(Binding(str(place), f"turn_to({place - 1})") for place in range(1, len(PANES) + 1)),
    ]

    def __init__(self, view: TopView, *, order: Callable[[str], Awaitable[str]]) -> None:
        """Show ``view``; ``order`` gives the run an order, ``pause`` or ``resume``, and returns what became of it."""
        super().__init__(driver_class=TopDriver, ansi_color=True)
        self._view = view
        self._give_order = order
        self._head, self._tabs, self._foot = Static(), Static(), Static(id="foot")
        self._pane, self._below = PaneTable(id="pane"), PaneTable(id="below")
        self._help = VerticalScroll(Static("\n".join(HELP)), id="help", can_focus=False)
        self._filter = Input(id="filter", compact=True)
        self._typing = Horizontal(Label("/"), self._filter, Label(TYPING), id="typing")
        self._body = Vertical(self._head, self._tabs, self._pane, self._help, self._below, id="body")
        self._has_news = False
        self._notice = ""
        """What became of the last order."""
        self._forgetting: Timer | None = None

    def compose(self) -> ComposeResult:
        yield Static(f"top needs {MIN_WIDTH} x {MIN_HEIGHT}", id="small")
        yield self._body
        yield self._typing
        yield self._foot

    def on_mount(self) -> None:
        self.set_interval(MIN_PAUSE_S, self._draw_news)
        self.set_interval(REDRAW_S, self._draw)
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for one in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(one, self.exit, one)
        self._draw()

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def draw_soon(self) -> None:
        """Draw what is new, a few times a second at most."""
        self._has_news = True

    def _draw_news(self) -> None:
        if self._has_news:
            self._draw()

    def _draw(self) -> None:
        self._has_news = False
        if not self.is_headless:
            try:
                size = Size(*os.get_terminal_size(sys.stdin.fileno()))
            except OSError:  # the terminal has gone, and nobody has told
                self.exit()
                return
            if size != self.size:  # nor need a signal tell of another size
                self.post_message(events.Resize(size, size))
        view, pane = self._view, self._pane
        self._head.update(Text("\n").join(head_lines(view, self.size.width)))
        self._tabs.visible = pane.visible = view.status is not None
        pane.show(view.pane.columns, view.rows())
        self._tabs.update(self._tabs_text())
        self._below.set_class(view.pane_name != "events" and pane.display, "-wanted")
        self._below.show(BELOW_COLUMNS, PANES["events"].rows(list(view.events)[: -NUM_EVENTS_BELOW - 1 : -1], "newest"))
        self._foot.update(self._foot_text())

    def _tabs_text(self) -> Text:
        """Return the panes' names, which rows of how many are in sight, and how they are sorted."""
        tabs = Text()
        for place, name in enumerate(self._view.panes, start=1):
            tabs.append(f" {place} {name} ", style="reverse" if name == self._view.pane_name else "")
        if self._pane.display:
            first, end = self._pane.span
            if end - first < self._pane.num_rows:
                tabs.append(f"  {first + 1}-{end} of {self._pane.num_rows}", style="bold")
            tabs.append(f"  by {self._view.sort_name}", style="dim")
        return tabs

    def _foot_text(self) -> Text:
        """Return the answer to the last order while it is new, else the filter and the keys."""
        if self._notice:
            return Text(shown(self._notice), style="reverse")
        only = f"only with {self._view.filter!r}, Esc for all  " if self._view.filter else ""
        return Text.assemble((only, "bold"), (KEYS.format(num_panes=len(self._view.panes)), "dim"))

    def _draw_from_top(self) -> None:
        self._pane.scroll_by(-ALL_ROWS)
        self._draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the rows with what is typed in them, at each letter."""
        self._view.filter = event.value
        self._draw_from_top()

    # the keys

    def action_interrupt(self) -> None:
        self.exit(signal.SIGINT)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Say whether a key acts now: what comes in one burst with the key that begins the filter is typed into it."""
        is_typing = self._typing.display
        if action == "type":
            return parameters[0] != is_typing
        return not (is_typing and action == "turn")

    def action_type(self, is_typing: bool) -> None:
        """Begin to type the filter, or keep it as it is typed."""
        self._typing.display, self._foot.display = is_typing, not is_typing
        self.set_focus(self._filter if is_typing else None)
        self._draw()

    def action_drop_filter(self) -> None:
        self._filter.value = self._view.filter = ""
        self.action_type(False)

    def action_sort(self) -> None:
        self._view.sort_next()
        self._draw_from_top()

    def action_turn(self, num_panes: int) -> None:
        self.action_turn_to((self._view.place + num_panes) % len(self._view.panes))

    def action_turn_to(self, pane: int) -> None:
        if pane < len(self._view.panes):
            self._view.place = pane
            self._draw_from_top()

    def action_scroll(self, num_rows: int) -> None:
        if self._pane.display:
            self._pane.scroll_by(num_rows)
        else:
            self._help.scroll_relative(y=num_rows, animate=False)
        self._draw()

    def action_help(self) -> None:
        self._pane.display, self._help.display = self._help.display, self._pane.display
        self._draw()

    def action_order(self, order: str) -> None:
        self.run_worker(self._order(order))

    async def _order(self, order: str) -> None:
        self._say(await self._give_order(order))
        if self._forgetting is not None:
            self._forgetting.stop()
        self._forgetting = self.set_timer(NOTICE_S, lambda: self._say(""))

    def _say(self, notice: str) -> None:
        self._notice = notice
        self._draw()
