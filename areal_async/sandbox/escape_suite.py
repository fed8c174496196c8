"""Programs that try to get out.

They print ``held`` when the wall they run against holds, and anything else when it does not; they are quick, and every
``Sandbox`` tries them all before it serves.
"""

from typing import Final

_CALL: Final = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def held(result):
    print("held" if result == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS) else f"result {result}")
"""
_RAISES: Final = """
import fcntl, mmap, os, pty, socket
def held(action, *arguments):
    try:
        result = action(*arguments)
    except OSError:
        print("held")
    else:
        print("came through:", result)
"""


def _calls(number_x86_64: int | str, number_aarch64: int | str, *arguments: object) -> str:
    rest = "".join(f", {argument}" for argument in arguments)
    return f"{_CALL}\nheld(libc.syscall({number_x86_64} if os.uname().machine == 'x86_64' else {number_aarch64}{rest}))"


def _raises(*expression: str, before: str = "") -> str:
    return f"{_RAISES}{before}\nheld({', '.join(expression)})"


ESCAPES: Final[dict[str, str]] = {
    # system calls
    "trace a process": _calls(101, 117, 16, 1, 0, 0),
    "read another process's memory": _calls(310, 270, 1, 0, 0, 0, 0, 0),
    "write another process's memory": _calls(311, 271, 1, 0, 0, 0, 0, 0),
    "mount": _CALL + "\nheld(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None))",
    "mount by a new call": _calls(430, 430, "b'tmpfs'", 0),
    "unmount": _CALL + "\nheld(libc.umount2(b'/tmp', 2))",
    "change the root": _CALL + "\nheld(libc.chroot(b'/tmp'))",
    "a nested user namespace": _CALL + "\nheld(libc.unshare(0x10000000))",
    "a nested network namespace": _CALL + "\nheld(libc.unshare(0x40000000))",
    "a nested namespace by clone": _calls(56, 220, "0x10000000 | 17", 0, 0, 0, 0),
    "a nested namespace by clone3": _calls(435, 435, "ctypes.create_string_buffer(88)", 88),
    "io_uring": _calls(425, 425, 8, "ctypes.create_string_buffer(120)"),
    "a program for the kernel": _calls(321, 280, 0, "ctypes.create_string_buffer(72)", 72),
    "performance counters": _calls(298, 241, "ctypes.create_string_buffer(128)", 0, -1, -1, 0),
    "the kernel's keys": _calls(250, 219, 0, -3, 0),
    "userfaultfd": _calls(323, 282, 0),
    "the kernel's log": _calls(103, 116, 2, "ctypes.create_string_buffer(64)", 64),
    "the machine's clock": _CALL + "\nheld(libc.clock_settime(0, ctypes.create_string_buffer(16)))",
    "the machine's name": _CALL + "\nheld(libc.sethostname(b'mine', 4))",
    "typing into the terminal": _CALL + "\nheld(libc.ioctl(0, 0x5412, b'x'))",
    "be traced": _calls(101, 117, 0, 0, 0, 0),
    "another process's files": _calls(438, 438, 0, 0, 0),
    "a file by its handle": _calls(304, 265, -100, "ctypes.create_string_buffer(64)", 0),
    "the handle of a file": _calls(303, 264, -100, "b'/usr'", "ctypes.create_string_buffer(64)", 0, 0),
    "a module for the kernel": _calls(313, 273, 0, "b''", 0),
    "another kernel": _calls(246, 104, 0, 0, 0, 0),
    "restart the machine": _calls(169, 142, "0xfee1dead", "0x28121969", "0x1234567", 0),
    "flush the machine's disks": _calls(162, 81),
    "flush one of the machine's disks": _calls(306, 267, 0),
    "make the machine's disks wait": """
import os
try:
    os.fsync(os.pipe()[0])  # not done, and so no error
    os.fdatasync(os.pipe()[0])
    print("held")
except OSError as exc:
    print("came through:", exc)
""",
    "a filter of its own": _CALL + "\nheld(libc.prctl(22, 2, 0, 0, 0))",
    "a filter by the new call": _calls(317, 277, 1, 0, 0),
    "another process's limits": _calls(302, 261, 1, 7, "ctypes.create_string_buffer(16)", 0),
    "who shares a core": _CALL + "\nheld(libc.prctl(62, 0, 0, 0, 0))",
    "equal pages of others": _CALL + "\nheld(libc.prctl(67, 1, 0, 0, 0))",
    "pages for merging": _raises("mmap.mmap(-1, 4096, 34).madvise", "12"),
    "a command to a file": _calls(16, 29, "os.open(os.__file__, 0)", "0x80086601", "ctypes.create_string_buffer(8)"),
    "how busy the machine is": _calls(99, 179, "ctypes.create_string_buffer(256)"),
    "system calls of another size": _calls("0x40000000 | 39", "0x40000000 | 172"),
    "system calls of 32 bits": """
import ctypes, mmap, os
if os.uname().machine != "x86_64":
    print("held")
    raise SystemExit
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
page.write(bytes.fromhex("b814000000 cd80 c3"))  # getpid by the old way
child = os.fork()
if not child:
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    os._exit(0)
print("held" if os.WIFSIGNALED(os.waitpid(child, 0)[1]) else "came through")
""",
    # memory that is in no process, and that nobody would count
    "files in memory": _calls(319, 279, "b'mine'", 0),
    "shared memory of System V": _calls(29, 194, 0, 4096, "0o1600"),
    "semaphores of System V": _calls(64, 190, 0, 1, "0o1600"),
    "messages of System V": _calls(68, 186, 0, "0o1600"),
    "shared memory without a file": _calls(9, 222, 0, 4096, 3, "0x21", -1, 0),
    "huge pages": _calls(9, 222, 0, 2 << 20, 3, "0x40022", -1, 0),
    "attributes of an output": _raises("os.setxattr", "1", "'user.mine'", "bytes(1 << 15)"),
    "attributes of a file": _calls(188, 5, "b'/tmp'", "b'user.mine'", "b''", 0, 0),
    "attributes of a link": _calls(189, 6, "b'/tmp'", "b'user.mine'", "b''", 0, 0),
    "pages of a file given to a pipe": _raises("os.splice", "os.open(os.__file__, 0)", "os.pipe()[1]", "1"),
    "pages of a file sent to a pipe": _raises("os.sendfile", "os.pipe()[1]", "os.open(os.__file__, 0)", "0", "1"),
    "pages of a pipe given to a pipe": _calls(276, 77, "os.pipe()[0]", "os.pipe()[1]", 1, 2),
    "memory that is swapped out": _raises("mmap.mmap(-1, 4096, 34).madvise", "21"),
    "datagrams whose sender has gone": _raises("socket.socketpair", "1", "socket.SOCK_DGRAM"),
    "datagrams by a raw socket": _raises("socket.socket", "1", "socket.SOCK_RAW"),
    "shared memory by a device": _raises("mmap.mmap", "os.open('/dev/zero', os.O_RDWR)", "4096"),
    "large buffers of a socket": _raises("socket.socketpair()[0].setsockopt", "1", "7", "1 << 30"),
    "contexts of asynchronous I/O": _calls(206, 0, 1, "ctypes.byref(ctypes.c_ulong())"),
    "watches on files": _calls(294, 26, 0),
    "watches on files by the old call": _calls(253, 26, 0),
    "a watch on a shared folder": _raises("fcntl.fcntl", "os.open(os.path.dirname(os.__file__), 0)", "1026", "1"),
    "a lock on a shared file": _raises("fcntl.flock", "os.open(os.__file__, 0)", "fcntl.LOCK_EX"),
    "a lock on a part of a shared file": _raises("fcntl.lockf", "os.open(os.__file__, 0)", "fcntl.LOCK_SH", "1"),
    "locks of others": _raises("fcntl.fcntl", "os.open(os.__file__, 0)", "5", "bytes(32)"),
    "locks on an open file": _raises("fcntl.fcntl", "os.open('/tmp/f', 66)", "37", "bytes([1] + [0] * 31)"),
    "a hint on a file": _raises("fcntl.fcntl", "os.open('/tmp/f', 66)", "1036", "bytes([2, 0, 0, 0, 0, 0, 0, 0])"),
    "reads past the cache": _calls(257, 56, -100, "b'/tmp/f'", "os.O_DIRECT | os.O_CREAT", "0o600"),
    "reads past the cache by the new call": _calls(437, 437, -100, "b'/tmp'", "ctypes.create_string_buffer(24)", 24),
    "reads past the cache from now on": _calls(72, 25, "os.open('/tmp/f', 66)", 4, "os.O_DIRECT"),
    "reads of what is cached": _raises("os.preadv", "os.open(os.__file__, 0)", "[bytearray(1)]", "0", "os.RWF_NOWAIT"),
    "a lease": _raises("fcntl.fcntl", "os.open('/tmp/f', 64)", "1024", "0"),
    "large pipes": _raises("fcntl.fcntl", "os.pipe()[1]", "1031", "1 << 20"),
    "pages given to a pipe": _calls(278, 75, "os.pipe()[1]", "ctypes.create_string_buffer(16)", 1, 8),
    "rules of a sandbox of its own": _calls(444, 444, 0, 0, 1),
    "a filter on a socket": """
import ctypes, socket, struct
instruction = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 1))
try:
    socket.socketpair()[0].setsockopt(1, 26, struct.pack("HxxxxxxP", 1, ctypes.addressof(instruction)))
except PermissionError:
    print("held")
""",
    "terminals": _raises("pty.openpty"),
    "signals that wait": """
import ctypes, signal
libc = ctypes.CDLL(None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
count = 0
while count < 1000 and not libc.sigqueue(2, signal.SIGRTMIN, None):
    count += 1
print("held" if count < 1000 else count)
""",
    # what others do with files that are shared
    "what of a file is cached": f"""{_CALL}
import mmap
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
place = ctypes.addressof(ctypes.c_char.from_buffer(page))
held(libc.mincore(ctypes.c_void_p(place), 4096, ctypes.create_string_buffer(1)))
""",
    "throw a shared file out of the cache": _raises("os.posix_fadvise", "os.open(os.__file__, 0)", "0", "0", "4"),
    "a core file": """
import os
child = os.fork()
if not child:
    os.abort()
print("came through" if os.WCOREDUMP(os.waitpid(child, 0)[1]) else "held")
""",
    "capabilities": """
import ctypes
libc = ctypes.CDLL(None)
data = (ctypes.c_uint32 * 6)()
libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)
print("held" if not any(data) else list(data))
""",
    "no new privileges": "import ctypes\nprint('held' if ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 1 else 'may gain')",
    "capabilities for its children": _CALL + "\nheld(libc.prctl(47, 2, 21, 0, 0))",
    "another user": _raises("os.setuid", "0"),
    "other groups": _raises("os.setgroups", "[0]"),
    "go before others": _raises("os.nice", "-5"),
    "go before others at a disk": _calls(251, 30, 1, 0, "2 << 13"),
    "run in real time": _raises("os.sched_setscheduler", "0", "os.SCHED_FIFO", "os.sched_param(1)"),
    "higher limits": """
import resource
found = []
for name in ("AS", "CPU", "FSIZE", "NPROC", "NOFILE", "CORE", "MEMLOCK"):
    kind = getattr(resource, f"RLIMIT_{name}")
    _, most = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (most, most + 1))
    except (OSError, ValueError):
        continue
    found.append(kind)
print("held" if not found else found)
""",
    # processes
    "the process group of the fork server": "import os\nprint('held' if os.getpgrp() and os.getsid(0) else 'shared')",
    "see processes": "import os\nprint('held' if os.getpid() == 2 and not os.path.exists('/proc/self') else 'sees')",
    "signal a process outside": _raises("os.kill", "3", "9"),
    "end the fork server": """
import os, signal, time
for number in range(1, 65):
    os.kill(1, number)
time.sleep(0.05)
print("held")
""",
    "end the fork server by a file's signal": """
import fcntl, os, signal, time
reader, writer = os.pipe()
fcntl.fcntl(reader, fcntl.F_SETOWN, 1)
fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
os.write(writer, b"x")
time.sleep(0.05)
print("held")
""",
    "open files left by the fork server": """
import os
def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
found = [number for number in range(3, 1024) if is_open(number)]
print("held" if not found else found)
""",
    "sources in the frames": """
import sys
frame, found = sys._getframe(), []
while frame:
    found += [name for name, value in frame.f_locals.items() if name in ("files", "outside", "writer") and frame.f_back]
    frame = frame.f_back
import os, stat
def is_socket(number):
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False
print("held" if not any(map(is_socket, range(1024))) else found)
""",
    # files
    "what is beside the interpreter": """
import os
print("held" if {*os.listdir("/python")} <= {"bin", "lib", "lib64"} else os.listdir("/python"))
""",
    "the password file": _raises("open", "'/etc/passwd'"),
    "root's home": _raises("os.listdir", "'/root'"),
    "homes": _raises("os.listdir", "'/home'"),
    "kernel settings": _raises("open", "'/proc/sys/kernel/core_pattern'", "'w'"),
    "system devices": _raises("open", "'/dev/mem'"),
    "sysfs": _raises("os.listdir", "'/sys/kernel'"),
    "control groups": _raises("open", "'/sys/fs/cgroup/cgroup.procs'", "'w'"),
    "a trace among the terminals": _raises("os.utime", "'/dev/pts'"),
    "a trace on a terminal's maker": _raises("os.chmod", "'/dev/pts/ptmx'", "0o600"),
    "a trace on a device": _raises("os.utime", "'/dev/null'"),
    "a trace on the root": _raises("os.chmod", "'/'", "0o777"),
    "a trace below its temporary folder": _raises("os.mkdir", "'/tmp/../mine'"),
    "write beside the root": _raises("open", "'/mine'", "'w'"),
    "write into the interpreter": _raises("open", "'/python/lib/mine.py'", "'w'"),
    "write into devices": _raises("open", "'/dev/mine'", "'w'"),
    "a link out of the temporary folder": _raises(
        "open", "'/tmp/link'", before="os.symlink('/../../../../etc/passwd', '/tmp/link')"
    ),
    "a device of its own": _raises("os.mknod", "'/tmp/disk'", "0o060666", "os.makedev(8, 0)"),
    "what others left": """
import os
found = os.listdir("/tmp") + os.listdir("/dev/shm")
open("/tmp/mine", "w").write("left")
open("/dev/shm/mine", "w").write("left")
print("held" if not found else found)
""",
    # network
    "the broker by loopback": _raises("socket.create_connection", "('127.0.0.1', 4222)", "1"),
    "the network": _raises("socket.create_connection", "('1.1.1.1', 53)", "1"),
    "datagrams": _raises("socket.socket", "socket.AF_INET", "socket.SOCK_DGRAM"),
    "the kernel's sockets": _raises("socket.socket", "16", "socket.SOCK_RAW"),
    "sockets of virtual machines": _calls(41, 198, 40, 1, 0),
    "packets": _calls(41, 198, 17, 3, 0),
    "a pair of sockets of another family": _calls(53, 199, 30, 1, 0, "ctypes.create_string_buffer(8)"),
    "a UNIX socket by an abstract name": _raises("socket.socket(socket.AF_UNIX).connect", "'\\0/tmp/.X11-unix/X0'"),
    "network interfaces": _raises("socket.if_nameindex"),
}
