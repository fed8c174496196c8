"""The terminal that ``top`` is drawn in, as textual drives it, taken back whatever has stopped this process."""

import asyncio
import signal
import sys
import termios
import tty

from textual.drivers.linux_driver import LinuxDriver

TAKE_SCREEN = "\x1b[?1049h\x1b[?25l"
"""The alternate screen, without the cursor."""


class TopDriver(LinuxDriver):
    """textual's driver, which also goes on after a SIGSTOP, of which no process is told before it is stopped."""

    _is_given_back = False

    def start_application_mode(self) -> None:
        """Take the terminal; in the background, where that stops this process, at the next try."""
        super().start_application_mode()  # type: ignore[no-untyped-call]
        self._modes = termios.tcgetattr(sys.stdin)
        self._is_given_back = bool(self._modes[tty.LFLAG] & termios.ICANON)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCONT, self._take_again)

    def suspend_application_mode(self) -> None:
        """Give the terminal back, as it was."""
        super().suspend_application_mode()
        self._is_given_back = True

    def _take_again(self) -> None:
        if self._is_given_back:
            self.resume_application_mode()
        else:  # the thread that reads may hang in a read that only a key ends: the modes alone, under it
            termios.tcsetattr(sys.stdin, termios.TCSANOW, self._modes)
            self.write(TAKE_SCREEN)
        self._app.refresh(layout=True)
