"""A box's shell from the outside: commands go in by one pipe, their output and their ends come out by two others.

A command is read whole, by its length, and evaluated without the pipe of the ends; the line that tells its end waits
unread meanwhile, with a number that was drawn for it. So what a command prints is never taken for its end, and what
it leaves running cannot speak for the next one. Reading is done by the event loop as it comes, also between commands:
a background process is not held up, and a flood is slowed down and cut.
"""

import asyncio
import os
import secrets
from contextlib import suppress
from typing import Final

from areal_async.sandbox.limits import End

WORKSPACE: Final = "/workspace"
MAX_STATUS_BYTES: Final = 16384
"""Of what is kept of the pipe of ends: a number, a status and a path."""
BLOCK_BYTES: Final = 1 << 16
FLOOD_WAIT_S: Final = 0.01
"""From one block to the next, once more has come than is kept."""
Ending = tuple[End, int | None]


class Shell:
    """One bash. ``their_files`` are to be its standard input, its output, and the file of its ends."""

    def __init__(self, output_bytes: int, folder: str = WORKSPACE) -> None:
        self.folder = folder
        """Where it is, as it said at the end of the last command."""
        self.is_dead = False
        """It has ended, or is to: no command reaches it."""
        self.is_unheard = False
        """What it has printed is of a command whose caller has gone."""
        self._loop = asyncio.get_running_loop()
        their_lines, self._lines = os.pipe()
        their_input, self._input = os.pipe()
        self._output, their_output = os.pipe()
        self._ends, their_ends = os.pipe()
        # what an interrupted command leaves in it is taken out by a reader that, unlike the shell's, does not wait
        self._their_input = os.open(f"/proc/self/fd/{their_input}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.their_files = [their_lines, their_output, their_ends, their_input]
        self._printed = KeptOutput(output_bytes)
        self._said = b""
        self._number = ""
        self._ending: asyncio.Future[Ending] = self._loop.create_future()
        self._ending.set_result((End.ENDED, 0))
        for file in (self._lines, self._input, self._output, self._ends):
            os.set_blocking(file, False)
        os.write(self._lines, b"exec 2>&1\n")  # until then its words on the terminal that it has not go nowhere
        self._loop.add_reader(self._output, self._on_output)
        self._loop.add_reader(self._ends, self._on_end)

    @property
    def _files(self) -> tuple[int, ...]:
        return self._lines, self._input, self._their_input, self._output, self._ends

    @property
    def is_idle(self) -> bool:
        """Whether the last command has ended by itself, and another may come."""
        return not self.is_dead and self._ending.done()

    async def run(self, command: bytes) -> Ending:
        """Run a command and wait for its end. Whoever does not wait leaves a shell that is not idle."""
        self._number = secrets.token_hex(8)
        self._ending = self._loop.create_future()
        read = b'LC_ALL=C IFS= read -rN %d -u 201 __c;eval "$__c" </dev/null 200>&- 201<&-\n' % len(command)
        tell = b'builtin printf "%s %%d %%s\\0" $? "$PWD" >&200\n' % self._number.encode()
        try:
            os.write(self._lines, read + tell)
            left = memoryview(command)
            while left and not self._ending.done():
                try:
                    left = left[os.write(self._input, left) :]
                except BlockingIOError:
                    await self._wait_writable()
        except OSError:  # its other end is closed, or nobody reads it any more
            self.finish(End.ENDED, None)
        return await self.ended()

    async def ended(self) -> Ending:
        """Wait for the end of the command that runs."""
        return await asyncio.shield(self._ending)

    def forget(self) -> None:
        """Forget what is left of a command that was interrupted."""
        with suppress(BlockingIOError):
            while os.read(self._their_input, BLOCK_BYTES):
                pass

    def finish(self, end: End, status: int | None) -> None:
        """Have its command end now, however it stands with it: the shell is given up."""
        self._on_end()
        self.is_dead = True
        if not self._ending.done():
            self._ending.set_result((end, status))

    def take_output(self) -> tuple[bytes, int]:
        """Return what has been printed since the last time, and how many bytes are left out of it."""
        self._drain()
        return self._printed.take()

    def close_theirs(self) -> None:
        """Close what the shell itself has open now."""
        while self.their_files:
            os.close(self.their_files.pop())

    def close(self) -> None:
        """Hear no more of it; what it has printed can still be taken."""
        if self._input < 0:
            return
        self.finish(End.ENDED, None)
        self._drain()
        self.close_theirs()
        self._loop.remove_reader(self._output)
        self._loop.remove_reader(self._ends)
        for file in self._files:
            os.close(file)
        self._lines = self._input = self._their_input = self._output = self._ends = -1

    async def _wait_writable(self) -> None:
        """Wait until its input takes more, or the command has ended."""
        done = asyncio.Event()
        self._loop.add_writer(self._input, done.set)
        self._ending.add_done_callback(lambda _: done.set())
        try:
            await done.wait()
        finally:
            if self._input >= 0:
                self._loop.remove_writer(self._input)

    def _on_output(self) -> None:
        self._read_block()
        if self._printed.is_cut:
            self._loop.remove_reader(self._output)
            self._loop.call_later(FLOOD_WAIT_S, self._hear_again, self._output)

    def _hear_again(self, output: int) -> None:
        if output == self._output:
            self._loop.add_reader(self._output, self._on_output)

    def _read_block(self) -> bool:
        try:
            block = os.read(self._output, BLOCK_BYTES)
        except (BlockingIOError, OSError):
            return False
        if not block:
            self._loop.remove_reader(self._output)
        self._printed.add(block)
        return bool(block)

    def _drain(self) -> None:
        """Read what was written before now: as much as a pipe holds, though others may write on and on."""
        if self._input >= 0:
            for _ in range(2):
                if not self._read_block():
                    return

    def _on_end(self) -> None:
        """Read the ends that were told; the one with the number of the command that runs is its own."""
        try:
            block = os.read(self._ends, MAX_STATUS_BYTES)
        except OSError:
            return
        if not block:
            self._loop.remove_reader(self._ends)
        *ends, self._said = (self._said + block)[-MAX_STATUS_BYTES:].split(b"\0")
        for end in ends:
            number, _, rest = end.partition(b" ")
            status, _, folder = rest.partition(b" ")
            if number == self._number.encode() and status.isdigit() and not self._ending.done():
                self.folder = os.fsdecode(folder) or self.folder
                self._ending.set_result((End.ENDED, int(status[:3])))


class KeptOutput:
    """The beginning and the end of what is printed."""

    def __init__(self, most_bytes: int) -> None:
        self._half = max(1, most_bytes // 2)
        self._head, self._tail, self._num_bytes = bytearray(), bytearray(), 0

    @property
    def is_cut(self) -> bool:
        """Whether more came than is kept."""
        return self._num_bytes > 2 * self._half

    def add(self, block: bytes) -> None:
        """Keep of it what has room."""
        self._num_bytes += len(block)
        room = self._half - len(self._head)
        self._head += block[:room]
        self._tail += block[room:]
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def take(self) -> tuple[bytes, int]:
        """Return what is kept, and how many bytes are left out; then begin anew."""
        num_left_out = max(0, self._num_bytes - 2 * self._half)
        output = bytes(self._head)
        if num_left_out:
            output += b"\n(%d bytes left out)\n" % num_left_out
        output += bytes(self._tail[-self._half :])
        self._head, self._tail, self._num_bytes = bytearray(), bytearray(), 0
        return output, num_left_out
