"""Inside the sandbox: keeps one box after the other. Run as a file: the standard library and what stands beside it.

    keeper ── init (process 1 of new namespaces) ── the box's shell ── commands
                                                 └─ a copier for each file that is read or written

Standard input is a socket to the outside, on which the keeper starts and ends boxes. Each box's ``init`` has a socket
of its own: it interrupts the shell, starts it anew, reads and writes files and takes snapshots, in the box's own view
of the file system. The shell's three pipes lead straight to the outside: what it is to run, what is printed, and how
commands have ended.

All that a box may write is one file system in memory that ends with its namespaces. Its snapshots are in another,
which the keeper keeps: the next ``init`` lays an empty one over the newest snapshot, or copies it where the kernel does
not let an ordinary user lay file systems over each other.
"""

import ctypes
import errno
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys

sys.path.insert(0, "/")  # in the sandbox the two files below stand alone, under their own names

from areal_async.sandbox.init import (
    LIBC,
    NO_SUID_NO_DEVICES,
    PRIVATE_BELOW,
    SET_DEATH_SIGNAL,
    bound,
    check,
    close_devices,
    fork_into_namespaces,
    lock,
)
from areal_async.sandbox.trees import copy_tree, read_file, write_file

SAVED, LIVE, ROOT, SETTINGS = "/box/saved", "/box/live", "/box/root", "/box/etc"
BIND_BELOW, DETACH, REMOUNT_READ_ONLY = 0x5000, 2, 0x21
OPEN_MOUNTED, CONFIGURE = 433, 431
"""The system calls ``fspick`` and ``fsconfig``, everywhere."""
OF_THE_FILE_ITSELF, TEXT, RECONFIGURE = 8, 1, 7
WORKSPACE = "/workspace"
FOLDERS = {
    "/home": 0o755, "/mnt": 0o755, "/opt": 0o755, "/root": 0o755, "/run": 0o755,
    "/srv": 0o755, "/tmp": 0o1777, "/var": 0o755, "/var/log": 0o755, "/var/tmp": 0o1777, WORKSPACE: 0o755,
}  # fmt: skip
FILES = {
    "passwd": "nobody:x:65534:65534:nobody:/workspace:/bin/bash\n",
    "group": "nogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
"""Of ``/etc``, which can only be read: what is loaded into every program is named there. Nothing is shown of the
machine's own."""
MOUNTED = {"/usr": "/usr", "/python": "/python", "/dev": "/dev", SETTINGS: "/etc", "/etc/alternatives": "/alternatives"}
"""What is read of the system -> its place in a box, at the top: what is mounted there cannot be moved from inside.
Links below ``/usr`` lead through the last, on Debian."""
MERGED = ("/bin", "/sbin", "/lib", "/lib64")
"""Links into ``/usr``, or folders of their own on older systems."""
SHELL = ("/bin/bash", "--noprofile", "--norc", "--noediting", "+H", "+O", "checkwinsize", "-i")
"""Interactive, so that an interrupt ends the command and not the shell."""
STATUS_FILE, COMMAND_FILE = 200, 201
NUM_OPEN_FILES = 256
NUM_FILES = 5
MOST_BYTES = 1 << 16


def main() -> None:
    """Serve until the outside hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    close_devices()
    make_settings()
    outside = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    instructions = outside.recv(MOST_BYTES)
    outside.send(json.dumps({"can_overlay": can_overlay()}).encode())
    box = 0
    while True:
        message, files, _, _ = socket.recv_fds(outside, MOST_BYTES, NUM_FILES)
        if not message:
            return
        request = json.loads(message)
        if box:
            os.kill(box, signal.SIGKILL)
            os.waitpid(box, 0)  # comes back when nothing lives in its namespaces
            box = 0
        if "start" in request:
            if request["is_new"]:
                renew_saved(request["start"])
            drop_older(request["snapshot"])
            box = fork_into_namespaces()
            if not box:
                outside.close()
                Init(request, files, instructions).serve()
        for file in files:
            os.close(file)
        outside.send(b"{}")


def make_settings() -> None:
    """Make ``/etc`` of all boxes."""
    mount_memory(SETTINGS, 1 << 16, 16)
    for name, content in FILES.items():
        with open(f"{SETTINGS}/{name}", "w") as file:
            file.write(content)
    os.symlink("/alternatives", f"{SETTINGS}/alternatives")
    mount("none", SETTINGS, None, REMOUNT_READ_ONLY | NO_SUID_NO_DEVICES)


def can_overlay() -> bool:
    """Try whether the kernel lets this user lay file systems over each other, and remembers what was replaced."""
    box = fork_into_namespaces()
    if not box:
        try:
            mount_memory(LIVE, 1 << 20, 64)
            for folder in ("base", "base/folder", "base/folder/below", "up", "work"):
                os.mkdir(f"{LIVE}/{folder}")
            lay_over(f"{LIVE}/base", ROOT)
            os.rmdir(f"{ROOT}/folder/below")
            os.rmdir(f"{ROOT}/folder")
            os.mkdir(f"{ROOT}/folder")
            os._exit(1 if os.listdir(f"{ROOT}/folder") else 0)
        except OSError:
            os._exit(1)
    return os.waitpid(box, 0)[1] == 0


def renew_saved(limits: dict[str, int]) -> None:
    """Forget the snapshots of the box before."""
    if os.path.ismount(SAVED):
        check(LIBC.umount2(SAVED.encode(), DETACH), SAVED)
    mount_memory(SAVED, 2 * limits["disk_bytes"], 2 * limits["num_files"])


def drop_older(snapshot: str) -> None:
    """Remove the snapshots that the next box does not stand on."""
    for name in os.listdir(SAVED):
        if name != snapshot:
            shutil.rmtree(f"{SAVED}/{name}", ignore_errors=True)


def mount_memory(place: str, num_bytes: int, num_files: int, mode: int = 0o755) -> None:
    """Mount a file system in memory.

    Raises:
        OSError: it may not be.
    """
    options = f"size={num_bytes},nr_inodes={num_files},mode={mode:o}"
    mount("tmpfs", place, "tmpfs", NO_SUID_NO_DEVICES, options)


def bound_memory(folder: int, num_bytes: int, num_files: int) -> None:
    """Give a file system in memory other bounds. It need have no place any more: what is laid over it may have."""
    mounted = LIBC.syscall(OPEN_MOUNTED, folder, b"", OF_THE_FILE_ITSELF)
    check(mounted < 0, "its files")
    for name, value in (("size", num_bytes), ("nr_inodes", num_files)):
        check(LIBC.syscall(CONFIGURE, mounted, TEXT, name.encode(), str(value).encode(), 0), name)
    check(LIBC.syscall(CONFIGURE, mounted, RECONFIGURE, None, None, 0), "its bounds")
    os.close(mounted)


def lay_over(base: str, place: str) -> None:
    """Mount what is live over a base that is only read."""
    options = f"userxattr,lowerdir={base},upperdir={LIVE}/up,workdir={LIVE}/work"
    mount("overlay", place, "overlay", NO_SUID_NO_DEVICES, options)


def mount(source: str, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount.

    Raises:
        OSError: the kernel refuses.
    """
    texts = [text and text.encode() for text in (source, place, kind)]
    if LIBC.mount(*texts, flags, options and options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), place)


class Init:
    """Process 1 of a box. What it is asked comes over its socket; it answers with the number of the request."""

    def __init__(self, request: dict, files: list[int], instructions: bytes) -> None:  # type: ignore[type-arg]
        self.limits = request["start"] | {
            "num_open_files": NUM_OPEN_FILES,
            "file_bytes": request["start"]["disk_bytes"],
        }
        self.instructions = instructions
        self.shell = 0
        self.copiers: dict[int, int] = {}
        """Process -> number of the request that it answers."""
        check(LIBC.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "death signal")
        os.setsid()
        control, *pipes = files
        self.control = socket.socket(fileno=control)
        self.saved = os.open(SAVED, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.make_root(request["snapshot"], uses_overlay=request["uses_overlay"])
        except OSError as exc:
            self.say(event="failed", why=str(exc))
            os._exit(1)
        self.start_shell(pipes, WORKSPACE)

    def make_root(self, snapshot: str, *, uses_overlay: bool) -> None:
        """Make the box's file system and have it be all there is."""
        check(LIBC.mount(b"none", b"/", None, PRIVATE_BELOW, None), "private mounts")
        mount_memory(LIVE, self.limits["disk_bytes"], self.limits["num_files"])
        self.live = os.open(LIVE, os.O_RDONLY | os.O_DIRECTORY)
        root = LIVE
        if snapshot and uses_overlay:
            os.mkdir(f"{LIVE}/up")
            os.mkdir(f"{LIVE}/work")
            lay_over(f"{SAVED}/{snapshot}", ROOT)
            root = ROOT
        elif snapshot:
            copy_tree(os.open(f"{SAVED}/{snapshot}", os.O_RDONLY), os.open(LIVE, os.O_RDONLY))
        else:
            fill(root)
        for source, place in mounted():
            mount(source, root + place, None, BIND_BELOW)
        mount_memory(f"{root}/dev/shm", self.limits["shm_bytes"], self.limits["num_files"], 0o1777)
        os.chdir(root)
        check(LIBC.pivot_root(b".", b"."), "the root")
        check(LIBC.umount2(b".", DETACH), "the root before")
        os.chdir("/")

    def start_shell(self, pipes: list[int], folder: str) -> None:
        """Start the shell with its pipes: what to run, what is printed, how it ends."""
        self.shell = os.fork()
        if not self.shell:
            os.setsid()
            os.umask(0o022)
            try:
                os.chdir(folder)
            except OSError:
                os.chdir("/")
            environment = {
                "HOME": WORKSPACE, "LANG": "C.UTF-8", "PATH": "/python/bin:/usr/bin:/usr/sbin", "PS1": "", "PS2": "",
                "SHELL": "/bin/bash", "TERM": "dumb", "USER": "nobody", "PYTHONDONTWRITEBYTECODE": "1",
            }  # fmt: skip
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores them, and a shell inherits that
                signal.signal(number, signal.SIG_DFL)
            nowhere = os.open("/dev/null", os.O_WRONLY)
            # its first words would be of the terminal that it has not
            for place, file in (
                (0, pipes[0]),
                (1, pipes[1]),
                (2, nowhere),
                (STATUS_FILE, pipes[2]),
                (COMMAND_FILE, pipes[3]),
            ):
                os.dup2(file, place)
            self.confine(STATUS_FILE, COMMAND_FILE)
            try:
                os.execve(SHELL[0], SHELL, environment)
            finally:
                os._exit(127)
        for file in pipes:
            os.close(file)

    def confine(self, first_kept: int, last_kept: int) -> None:
        """Be no more than the box: close all files but the standard ones and some, and give away all rights."""
        os.closerange(3, first_kept)
        os.closerange(last_kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        bound(self.limits)
        lock(self.instructions)

    def serve(self) -> None:
        """Do what is asked until the outside hangs up."""
        reader, writer = os.pipe()
        for file in (reader, writer):
            os.set_blocking(file, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.say(event="started")
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if reader in ready:
                os.read(reader, MOST_BYTES)
            if self.control.fileno() in ready:
                message, files, _, _ = socket.recv_fds(self.control, MOST_BYTES, NUM_FILES)
                if not message:
                    os._exit(0)
                self.do(json.loads(message), files)
            self.collect()

    def do(self, request: dict, files: list[int]) -> None:  # type: ignore[type-arg]
        """Do one thing."""
        match request["do"]:
            case "interrupt":
                self.signal_group()
            case "restart":
                self.end_all()
                if request["has_more_room"]:
                    bound_memory(self.live, 2 * self.limits["disk_bytes"], 2 * self.limits["num_files"])
                self.start_shell(files, request["folder"])
                self.say(number=request["number"])
            case "read" | "write":
                self.copy_file(request, files[0])
            case "snapshot":
                self.save(request)

    def signal_group(self) -> None:
        """Interrupt what runs in front, as a terminal would."""
        try:
            os.killpg(self.shell, signal.SIGINT)
        except ProcessLookupError:
            pass

    def end_all(self) -> None:
        """End every process of the box but this one."""
        try:
            os.kill(-1, signal.SIGKILL)
            while True:
                os.wait()
        except (ProcessLookupError, ChildProcessError):
            self.shell = 0
        for number in self.copiers.values():
            self.say(number=number, error=[errno.EINTR, "the box was restarted"])
        self.copiers.clear()

    def collect(self) -> None:
        """Take note of what has ended."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.shell:
                    self.shell = 0
                    self.say(event="shell_ended", status=os.waitstatus_to_exitcode(ended[1]))
                elif ended[0] in self.copiers:
                    number = self.copiers.pop(ended[0])
                    if ended[1]:
                        self.say(number=number, error=[errno.EINTR, "it was ended"])
        except ChildProcessError:
            pass

    def copy_file(self, request: dict, file: int) -> None:  # type: ignore[type-arg]
        """Read or write a file as one of the box's own processes: its paths and links lead nowhere else."""
        copier = os.fork()
        if copier:
            self.copiers[copier] = request["number"]
            os.close(file)
            return
        os.dup2(file, 0)
        os.dup2(self.control.fileno(), STATUS_FILE)
        self.control = socket.socket(fileno=STATUS_FILE)
        self.confine(STATUS_FILE, STATUS_FILE)
        try:
            if request["do"] == "read":
                read_file(request["path"], 0, request["most"])
            else:
                write_file(request["path"], 0, request["mode"])
            self.say(number=request["number"])
        except OSError as exc:
            self.say(number=request["number"], error=[exc.errno, exc.strerror])
        except ValueError as exc:
            self.say(number=request["number"], error=[errno.EINVAL, str(exc)])
        os._exit(0)

    def save(self, request: dict) -> None:  # type: ignore[type-arg]
        """Copy the whole of the box's file system while nothing in it moves."""
        try:
            os.kill(-1, signal.SIGSTOP)
        except ProcessLookupError:
            pass
        name = request["name"]
        try:
            os.mkdir(name, dir_fd=self.saved)
            place = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.saved)
            root = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
            try:
                copy_tree(root, place)
            finally:
                os.close(place)
                os.close(root)
            self.say(number=request["number"])
        except OSError as exc:
            shutil.rmtree(name, ignore_errors=True, dir_fd=self.saved)
            self.say(number=request["number"], error=[exc.errno, exc.strerror])
        try:
            os.kill(-1, signal.SIGCONT)
        except ProcessLookupError:
            pass

    def say(self, **what: object) -> None:
        """Answer, or tell of something."""
        self.control.send(json.dumps(what).encode())


def fill(root: str) -> None:
    """Make what a box has from its beginning."""
    for folder, mode in FOLDERS.items():
        os.mkdir(root + folder)
        os.chmod(root + folder, mode)
    for _, place in mounted():
        os.mkdir(root + place)
    for link in MERGED:
        if os.path.islink(link):
            os.symlink(os.readlink(link), root + link)


def mounted() -> list[tuple[str, str]]:
    """Return what of the system is shown, and where."""
    places = [*MOUNTED.items(), *((place, place) for place in MERGED if not os.path.islink(place))]
    return [(source, place) for source, place in places if os.path.isdir(source)]


if __name__ == "__main__":
    main()
