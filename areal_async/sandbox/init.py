"""Inside the sandbox: forks every program into namespaces of its own. Run as a file: the standard library alone.

Standard input is a socket to the outside. Its first message is the filter of system calls; then each message is one
program's limits as JSON, with four files attached: source, standard input, output and error. The answer is one JSON
object. ``{"kill": true}`` in between ends the program that runs.

    fork server ── init (process 1 of new namespaces) ── program

The fork server never reads a program or its output: the program's own process does, so that none can find another's
traces in the memory it was forked from. When ``init`` ends, the kernel ends everything else in its namespaces.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
import types

NEW_MOUNT_NAMESPACE = 0x20000
NEW_NAMESPACES = NEW_MOUNT_NAMESPACE | 0x08000000 | 0x20000000
"""Flags of the namespaces of mounts, IPC and processes."""
READ_ONLY_FROM_NOW_ON = 0x1 | 0x20 | 0x1000
RELATIVE_TIMES = 0x200000
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
PRIVATE_BELOW = 0x44000
NO_SUID_NO_DEVICES = 0x6
SET_NO_NEW_PRIVILEGES, SET_SECCOMP, SECCOMP_FILTER, SET_DEATH_SIGNAL = 38, 22, 2, 1
CAPABILITIES_V3 = 0x20080522
PRELOADED = (
    "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq", "io",
    "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "typing",
)  # fmt: skip
"""Imported once, for every program: what most of them would import first."""
CLONE = {"x86_64": 56, "aarch64": 220}
NUM_FILES = 4
FIRST_FREE_FILE = 3
NUM_OPEN_FILES = 64
"""Where the limits name none."""
NUM_WAITING_SIGNALS = 128


class Instructions(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def main() -> None:
    """Serve until the outside hangs up."""
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # else a program may send it to the fork server: it has the handler too
    close_devices()
    gc.freeze()  # what is here now is shared with every program; a collection would copy it
    outside = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    instructions = outside.recv(1 << 16)
    outside.send(b"ready")
    while True:
        message, files, _, _ = socket.recv_fds(outside, 1 << 12, NUM_FILES)
        if not message:
            return
        request = json.loads(message)
        if "kill" in request:  # it ended before
            continue
        answer = run(request, files, instructions, outside)
        outside.send(json.dumps(answer).encode())


def close_devices() -> None:
    """Forbid changes to the devices' own times and modes: programs after each other share them, and so does the host.

    Each is a mount of its own. To read and write a device stays allowed.
    """
    check(LIBC.unshare(NEW_MOUNT_NAMESPACE), "a mount namespace")
    check(LIBC.mount(b"none", b"/", None, PRIVATE_BELOW, None), "private mounts")
    for name in DEVICES:
        place = f"/dev/{name}"
        flags = os.statvfs(place).f_flag  # these have the numbers of a mount's
        kept = flags & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME)
        kept |= RELATIVE_TIMES if flags & os.ST_RELATIME else 0
        check(LIBC.mount(b"none", place.encode(), None, kept | READ_ONLY_FROM_NOW_ON, None), place)


def run(limits: dict[str, int], files: list[int], instructions: bytes, outside: socket.socket) -> dict[str, object]:
    """Run one program; return how it ended."""
    reader, writer = os.pipe()
    started = time.monotonic()
    init = fork_into_namespaces()
    if not init:
        outside.close()
        os.close(reader)
        be_init(limits, files, instructions, writer)
    os.close(writer)
    for file in files:
        os.close(file)
    was_ended = wait_for_end(init, started + limits["wall_s"], outside)
    os.waitpid(init, 0)  # comes back when nothing lives in its namespaces
    status = os.read(reader, 64)
    os.close(reader)
    return {
        "was_ended": was_ended,
        "status": int(status) if status else None,
        "duration_s": time.monotonic() - started,
    }


def wait_for_end(init: int, deadline: float, outside: socket.socket) -> bool:
    """Wait until a program's first process ends; return whether it was made to."""
    watched = os.pidfd_open(init)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.register(outside, select.POLLIN)
    was_ended = False
    while True:
        left_s = None if was_ended else max(0.0, deadline - time.monotonic())
        ready = dict(poll.poll(None if left_s is None else 1000 * left_s))
        if watched in ready:
            os.close(watched)
            return was_ended
        if ready and not outside.recv(1 << 12):  # the outside is gone: so is this whole sandbox in a moment
            os._exit(0)
        was_ended = True
        os.kill(init, signal.SIGKILL)


def fork_into_namespaces() -> int:
    """Fork; the child is process 1 of new namespaces of processes, mounts and IPC.

    One system call instead of ``unshare`` and two forks, each of which copies the interpreter's page tables. The C
    library does not know of this child; it knows again of the program that the child forks in the ordinary way.
    """
    number = CLONE[os.uname().machine]
    PYTHON.PyOS_BeforeFork()
    pid: int = PYTHON.syscall(number, NEW_NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        PYTHON.PyOS_AfterFork_Child()
    else:
        PYTHON.PyOS_AfterFork_Parent()
        check(pid < 0, "new namespaces")
    return pid


def be_init(limits: dict[str, int], files: list[int], instructions: bytes, writer: int) -> None:
    """Be process 1: make an empty place, collect whatever ends, and end with the program."""
    check(LIBC.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "death signal")
    os.setsid()  # else the fork server is in the program's process group: signals and priorities for one would reach it
    check(LIBC.mount(b"none", b"/", None, PRIVATE_BELOW, None), "private mounts")
    options = f"size={limits['tmp_bytes']},nr_inodes={limits['num_files']},mode=0777".encode()
    for folder in (b"/tmp", b"/dev/shm"):
        check(LIBC.mount(b"tmpfs", folder, b"tmpfs", NO_SUID_NO_DEVICES, options), folder.decode())
    program = os.fork()
    if not program:
        os.close(writer)
        be_program(limits, files, instructions)
    for file in files:
        os.close(file)
    while True:
        ended, status = os.wait()
        if ended == program:
            os.write(writer, str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)


def be_program(limits: dict[str, int], files: list[int], instructions: bytes) -> None:
    """Give away everything, then run the program as ``__main__``."""
    source_file, *standard = files
    with open(source_file, "rb", closefd=False) as reading:
        source = reading.read()
    for number, file in enumerate(standard):
        os.dup2(file, number)
    os.closerange(FIRST_FREE_FILE, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.chdir("/tmp")
    os.environ.clear()
    os.environ.update({"HOME": "/tmp", "PATH": "/python/bin", "LANG": "C.UTF-8"})
    sys.argv = ["program.py"]
    for name, stream in (
        ("stdin", open(0)),
        ("stdout", open(1, "w")),
        ("stderr", open(2, "w", errors="backslashreplace")),
    ):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.modules["random"].seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    bound(limits)
    lock(instructions)
    os._exit(run_program(source))


def bound(limits: dict[str, int]) -> None:
    """Set the limits of resources; nobody inside may raise them again."""
    memory, files, processes = limits["memory_bytes"], limits["file_bytes"], limits["num_processes"]
    # bubblewrap, the fork server and init are of the same user, and count as well
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_FSIZE, files),
        (resource.RLIMIT_NPROC, processes + limits["num_besides"]),
        (resource.RLIMIT_NOFILE, limits.get("num_open_files", NUM_OPEN_FILES)),
        (resource.RLIMIT_CORE, 1),  # 0 stops a file only; 1 is too little for one, and stops a program of the machine's
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, NUM_WAITING_SIGNALS),  # timers are counted with them
    ):
        resource.setrlimit(kind, (value, value))


def lock(instructions: bytes) -> None:
    """Give away the last capability and every way to get one, and the calls that no program needs."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    check(LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    check(LIBC.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")
    filter_program = Instructions(len(instructions) // 8, instructions)
    check(LIBC.prctl(SET_SECCOMP, SECCOMP_FILTER, ctypes.byref(filter_program), 0, 0), "seccomp")


def run_program(source: bytes) -> int:
    """Run it as the interpreter would; return the exit status."""
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    status = 0
    try:
        exec(compile(source, "program.py", "exec"), main_module.__dict__)
    except SystemExit as exc:
        status = exit_status(exc.code)
    except BaseException as exc:  # noqa: BLE001 -- whatever it is: this is the end of the process
        rest = exc.__traceback__ and exc.__traceback__.tb_next  # not this file's own frame
        traceback.print_exception(type(exc), exc, rest)
        status = 1
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError):
        status = status or 120
    return status


def exit_status(code: object) -> int:
    """Return what ``sys.exit(code)`` exits with."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def check(status: int, what: str) -> None:
    """End this process, unheard by the program, when a wall cannot be raised."""
    if status:
        os.write(2, f"{what}: {os.strerror(ctypes.get_errno())}\n".encode())
        os._exit(70)


LIBC = ctypes.CDLL(None, use_errno=True)
PYTHON = ctypes.PyDLL(None, use_errno=True)

if __name__ == "__main__":
    main()
