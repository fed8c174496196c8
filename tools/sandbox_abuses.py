"""Programs that take memory, time, processes or room, or lie about their end: for tests, which look at what is left."""

from typing import Final

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
    "memory in pipes": """
import fcntl, os
pipes = []
try:
    while True:
        pipes.append(os.pipe())
        try:
            fcntl.fcntl(pipes[-1][1], 1031, 1 << 20)
        except OSError:
            pass
        os.set_blocking(pipes[-1][1], False)
        try:
            while os.write(pipes[-1][1], bytes(1 << 16)):
                pass
        except BlockingIOError:
            pass
except OSError:
    print(len(pipes))
""",
    "memory in sockets": """
import socket
pairs = []
try:
    while True:
        pairs.append(socket.socketpair())
        for one in pairs[-1]:
            try:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
            except OSError:
                pass
            one.setblocking(False)
            try:
                while one.send(bytes(1 << 16)):
                    pass
            except BlockingIOError:
                pass
except OSError:
    print(len(pairs))
""",
    "memory in sockets of many processes": """
import os, socket, time
for _ in range(40):
    try:
        if not os.fork():
            break
    except OSError:
        pass
pairs = []
try:
    while True:
        pairs.append(socket.socketpair())
        for one in pairs[-1]:
            one.setblocking(False)
            try:
                while one.send(bytes(1 << 16)):
                    pass
            except BlockingIOError:
                pass
except OSError:
    time.sleep(60)
""",
    "memory in connections that nobody takes": """
import socket, time
listening = [socket.socket(socket.AF_UNIX) for _ in range(32)]
for number, one in enumerate(listening):
    one.bind(f"\\0{number}")
    one.listen(4096)
for number in range(32):
    for _ in range(4096):
        sending = socket.socket(socket.AF_UNIX)
        try:
            sending.setblocking(False)
            sending.connect(f"\\0{number}")
            while sending.send(bytes(1 << 16)):
                pass
        except BlockingIOError:
            pass
        sending.close()
time.sleep(60)
""",
    "memory in sockets on their way": """
import os, socket, time
for _ in range(40):
    try:
        if not os.fork():
            break
    except OSError:
        pass
kept = socket.socketpair()
try:
    while True:
        pairs = [socket.socketpair() for _ in range(8)]
        for one in sum(pairs, ()):
            one.setblocking(False)
            try:
                while one.send(bytes(1 << 16)):
                    pass
            except BlockingIOError:
                pass
        socket.send_fds(kept[0], [b"x"], [one.fileno() for one in sum(pairs, ())])
except OSError:
    time.sleep(1)
""",
    "memory in attributes of an output": """
import os
count = 0
try:
    while count < 40_000:
        os.setxattr(1, f"user.{count}", bytes(1 << 15))
        count += 1
except OSError:
    pass
print("left", count)
""",
    "memory in pages given to sockets": """
import os, socket
reader, writer = os.pipe()
pairs = [socket.socketpair() for _ in range(20)]
for one in sum(pairs, ()):
    one.setblocking(False)
pages = [bytes(4096 * 16)] * 16
def fill(sending):
    file = os.open("/tmp/f", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.writev(file, pages)
    for page in range(256):
        os.splice(file, writer, 1, page * 4096)
        if page % 16 == 15:
            os.splice(reader, sending.fileno(), 16, flags=2)
    os.close(file)
try:
    for pair in pairs:
        for sending in pair:
            try:
                while True:
                    fill(sending)
            except BlockingIOError:
                os.read(reader, 1 << 16)
except OSError:
    print("left")
""",
    "memory in locks": """
import fcntl, os
for _ in range(40):
    try:
        os.fork()
    except OSError:
        pass
files = [open(f"/tmp/{os.getpid()}-{n}", "wb") for n in range(50)]
for place in range(1 << 20, 0, -2):
    for file in files:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
""",
    "memory in maps of memory": """
import ctypes, mmap, os, time
libc = ctypes.CDLL(None)
pages = mmap.mmap(-1, 40_000 << 12, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
for page in range(0, 40_000, 2):
    pages[page << 12] = 1
    libc.mprotect(ctypes.c_void_p(start + (page << 12)), 4096, 1)
while True:
    try:
        if os.fork():
            time.sleep(60)
    except OSError:
        time.sleep(60)
""",
    "files without content": """
import os
count = 0
try:
    while True:
        os.close(os.open(f"/tmp/{count}", os.O_CREAT))
        count += 1
except OSError:
    print("left", count)
""",
    "folders in folders": """
import os
try:
    while True:
        os.mkdir("d")
        os.chdir("d")
except OSError:
    print("left")
""",
    "memory that moves from child to child": """
import os, time
for _ in range(4):
    if not os.fork():
        block = bytearray(os.urandom(1 << 20)) * 100
        while True:
            if os.fork():
                os._exit(0)
            block[0] = 1
time.sleep(60)
""",
    "starve the fork server": """
import resource, time
for kind in range(16):
    try:
        resource.prlimit(1, kind, (0, 0))
    except OSError:
        pass
time.sleep(0.1)
print("left")
""",
    "an endless output by one byte": "import os\nos.pwrite(1, b'x', 15 << 20)",
    "an output beyond any limit": "import os\nos.ftruncate(1, 1 << 40)",
    "stop itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "close everything": "import os\nos.closerange(0, 64)\nprint('left')",
    "an alarm": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.01, 1e-6)\nsignal.pause()",
    "an expression without end": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "a number without end": "print(9 ** 9 ** 9)",
    "many files": "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'w').close()\n    n += 1",
    "exit without a word": "import os\nos._exit(0)",
    "claim to have passed": "print('PASSED 100 tests')\nimport sys\nsys.exit(0)",
    "kill itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "kill everyone": "import os\nos.kill(-1, 9)",
    "kill its process group": "import os\nos.kill(0, 9)",
    "stop its process group": "import os, signal\nos.kill(0, signal.SIGSTOP)",
    "crash": "import ctypes\nctypes.string_at(0)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "break the interpreter": """
import sys
sys.stdout = sys.stderr = None
sys.modules.clear()
raise SystemExit(object())
""",
    "raise what is no error": "class Odd(BaseException):\n    def __str__(self): raise Odd\nraise Odd",
    "no program": "def no program",
    "nested without end": "(" * 100_000,
    "a program of megabytes": "x = 1\n" * 300_000,
    "a verdict for anyone who listens": """
import os
for number in range(3, 1024):
    try:
        os.write(number, b'{"was_ended": false, "status": 0, "duration_s": 0}')
    except OSError:
        pass
""",
    "zero bytes": "print(1)\0",
}
