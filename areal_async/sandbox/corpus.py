"""Programs that try to get out, or to take more than is theirs.

``ESCAPES`` print ``held`` when the wall they run against holds, and anything else when it does not; they are quick, and
every ``Sandbox`` tries them all before it serves. ``ABUSES`` take memory, time, processes, room, or lie about their
end: they are for tests, which look at what is left afterwards.
"""

from typing import Final

_CALL: Final = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def held(result):
    print("held" if result == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS) else f"result {result}")
"""
_RAISES: Final = """
import os, socket
def held(action, *arguments):
    try:
        result = action(*arguments)
    except OSError:
        print("held")
    else:
        print("came through:", result)
"""


def _calls(number_x86_64: int, number_aarch64: int, *arguments: object) -> str:
    rest = "".join(f", {argument}" for argument in arguments)
    return f"{_CALL}\nheld(libc.syscall({number_x86_64} if os.uname().machine == 'x86_64' else {number_aarch64}{rest}))"


def _raises(*expression: str) -> str:
    return f"{_RAISES}\nheld({', '.join(expression)})"


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
    "capabilities": """
import ctypes
libc = ctypes.CDLL(None)
data = (ctypes.c_uint32 * 6)()
libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)
print("held" if not any(data) else list(data))
""",
    "no new privileges": "import ctypes\nprint('held' if ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 1 else 'may gain')",
    "another user": _raises("os.setuid", "0"),
    # processes
    "see processes": "import os\nprint('held' if os.getpid() == 2 and not os.path.exists('/proc/self') else 'sees')",
    "signal a process outside": _raises("os.kill", "3", "9"),
    "end its own keeper": """
import os, signal, time
for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
    os.kill(1, number)
time.sleep(0.05)
print("held")
""",
    "open files left by the keeper": """
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
    "the password file": _raises("open", "'/etc/passwd'"),
    "root's home": _raises("os.listdir", "'/root'"),
    "homes": _raises("os.listdir", "'/home'"),
    "kernel settings": _raises("open", "'/proc/sys/kernel/core_pattern'", "'w'"),
    "system devices": _raises("open", "'/dev/mem'"),
    "sysfs": _raises("os.listdir", "'/sys/kernel'"),
    "write beside the root": _raises("open", "'/mine'", "'w'"),
    "write into the interpreter": _raises("open", "'/python/lib/mine.py'", "'w'"),
    "write into devices": _raises("open", "'/dev/mine'", "'w'"),
    "a link out of the temporary folder": """
import os
os.symlink("/../../../../etc/passwd", "/tmp/link")
try:
    open("/tmp/link").read()
except OSError:
    print("held")
""",
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
    "a UNIX socket by an abstract name": _raises("socket.socket(socket.AF_UNIX).connect", "'\\0/tmp/.X11-unix/X0'"),
    "network interfaces": _raises("socket.if_nameindex"),
}

ABUSES: Final[dict[str, str]] = {
    "spin": "while True: pass",
    "sleep": "import time\ntime.sleep(3600)",
    "ignore every signal": """
import signal, time
for number in range(1, 32):
    if number not in (9, 19):
        signal.signal(number, signal.SIG_IGN)
while True:
    time.sleep(1)
""",
    "one large block": "block = bytearray(1 << 30)\nprint(len(block))",
    "many small blocks": "blocks = []\nwhile True: blocks.append(bytes(1000) + str(len(blocks)).encode())",
    "memory by many processes": """
import os, time
for _ in range(12):
    if not os.fork():
        block = bytearray(os.urandom(1 << 20) * 40)
        time.sleep(60)
        os._exit(0)
time.sleep(60)
""",
    "memory in files": "import os\nfor n in range(1000): open(f'/dev/shm/{n}', 'wb').write(os.urandom(1 << 20))",
    "fork bomb": """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    "threads": """
import threading, time
while True:
    threading.Thread(target=time.sleep, args=(60,)).start()
""",
    "children that outlive it": """
import os, time
for _ in range(5):
    if not os.fork():
        os.setsid()
        while True:
            time.sleep(0.01)
print("left")
""",
    "zombies": "import os\nfor _ in range(10):\n    if not os.fork(): os._exit(0)\nprint('left')",
    "output flood": "while True: print('x' * 10000)",
    "error flood": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
    "fill the disk": "block = bytes(1 << 20)\nfile = open('/tmp/large', 'wb')\nwhile True: file.write(block)",
    "many files": "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'w').close()\n    n += 1",
    "exit without a word": "import os\nos._exit(0)",
    "claim to have passed": "print('PASSED 100 tests')\nimport sys\nsys.exit(0)",
    "kill itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "kill everyone": "import os\nos.kill(-1, 9)",
    "crash": "import ctypes\nctypes.string_at(0)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "break the interpreter": """
import sys
sys.stdout = sys.stderr = None
sys.modules.clear()
raise SystemExit(object())
""",
    "raise what is no error": "class Odd(BaseException):\n    def __str__(self): raise Odd\nraise Odd",
    "no program": "this is not Python",
    "zero bytes": "print(1)\0",
}
