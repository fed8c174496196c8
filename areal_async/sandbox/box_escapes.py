"""Commands that try to get out of a box, into its first process, or into what speaks for its shell.

Their last line is ``held`` when the wall they run against holds. All are quick and harmless, and every process
tries them in its first box, with the programs of ``escape_suite`` beside them.
"""

import json
from typing import Final

from areal_async.sandbox.escape_suite import ESCAPES

OTHERWISE_IN_A_BOX: Final = frozenset(
    {
        # its own processes, which an attempt would hit
        *("see processes", "signal a process outside", "signals that wait", "the process group of the fork server"),
        # its own files, which it may read and write
        *("the password file", "root's home", "homes", "a trace on the root", "write beside the root"),
        *("a trace below its temporary folder", "a link out of the temporary folder", "what others left"),
    }
)
"""Of ``escape_suite``: what is no escape in a box."""


def _refused(*commands: str) -> str:
    """Return a command that says ``held`` where each of some fails."""
    tries = "; ".join(f"({command}) >/dev/null 2>&1 && through='{number}'" for number, command in enumerate(commands))
    return f"through=; {tries}; echo ${{through:-held}}"


def _absent(*paths: str) -> str:
    return _refused(*(f"[ -e {path} ]" for path in paths))


def _python(source: str) -> str:
    return f"python3 -I -S - <<'END_OF_IT'\n{_ATTEMPT}{source}\nEND_OF_IT"


_ATTEMPT: Final = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
is_intel = os.uname().machine == "x86_64"
def held(result):
    print("held" if result == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS) else f"result {result}")
def refused(action, *arguments):
    try:
        print("came through:", action(*arguments))
    except OSError:
        print("held")
"""


BOX_ESCAPES: Final[dict[str, str]] = {
    # the first process, and who is outside
    "trace the shell": _python("held(libc.syscall(101 if is_intel else 117, 16, os.getppid(), 0, 0))"),
    "trace the first process": _python("held(libc.syscall(101 if is_intel else 117, 0x4206, 1, 0, 0))"),
    "the first process's memory": _python("held(libc.syscall(310 if is_intel else 270, 1, 0, 0, 0, 0, 0))"),
    "the first process's limits": _python(
        "import resource\nrefused(resource.prlimit, 1, resource.RLIMIT_NOFILE, (0, 0))"
    ),
    "the shell's limits": _python("import resource\nrefused(resource.prlimit, os.getppid(), 0, (1, 1))"),
    "the first process's files": _python("held(libc.syscall(438, os.pidfd_open(1), 0, 0))"),
    "compare with the first process": _python("held(libc.syscall(312 if is_intel else 272, 1, os.getpid(), 0, 0, 1))"),
    "end the first process": "for n in KILL TERM INT HUP USR1 CHLD; do kill -$n 1; done; sleep 0.02; echo held",
    "stop the first process": "kill -STOP 1; kill -TSTP 1; sleep 0.02; echo held",
    "end the first process by its number": _python(
        "for number in range(1, 65):\n    libc.syscall(424, os.pidfd_open(1), number, 0, 0)\nprint('held')"
    ),
    "its memory as a file": _absent("/proc/1/mem", "/proc/self/mem", "/proc/1/root/etc", "/proc/sys/kernel"),
    "who runs outside": _refused("ps -e", "pgrep -f keep", "kill -0 4194303"),
    # files
    "where the keeper's files are": _refused(
        '[ -n "$(ls -A /box 2>/dev/null)" ]', "[ -e /keep.py ]", "[ -e /areal_async ]"
    ),
    "above the root": 'cd /; here=$(ls -id . ..); cd ../../..; [ "$(ls -id . ..)" = "$here" ] && echo held',
    "out by another root": _refused("chroot /tmp true", "unshare -r chroot /tmp"),
    "the machine's own files": _absent(
        "/etc/shadow", "/etc/machine-id", "/boot", "/sys", "/usr/local", "/usr/src", "/var/lib"
    ),
    "homes of others": _refused("ls /root/* /home/*"),
    "a folder that was open": _python(
        "found = []\nfor number in range(3, 1024):\n    try:\n        os.fstat(number)\n        found.append(number)\n"
        "    except OSError:\n        pass\nprint(found or 'held')"
    ),
    "write into the system": _refused(
        "echo > /usr/bin/mine", "echo > /python/lib/mine.py", "echo > /etc/ld.so.preload", "echo > /alternatives/awk"
    ),
    "move the system away": _refused(
        "mv /usr /other", "mv /etc /other", "rm -r /python/bin", "rmdir /dev", "mv /dev /d"
    ),
    "open the system for writing": _refused(
        "chmod u+w /usr/bin/ls", "chown nobody /usr/bin/ls", "touch /usr/bin/ls", "mount -o remount,rw /usr"
    ),
    "the system's files under another name": _refused("ln /usr/bin/ls /tmp/ls", "ln /etc/passwd /tmp/passwd"),
    "what is mounted": _refused("umount /usr", "umount -l /etc", "umount /dev/shm", "mount -t tmpfs none /etc"),
    "what is mounted, in another place": _refused("mount --bind /tmp /etc", "mount --move /usr /mnt"),
    "an overlay of its own": _refused(
        "mkdir -p /tmp/a /tmp/b /tmp/c && mount -t overlay -o lowerdir=/tmp/a,upperdir=/tmp/b,workdir=/tmp/c none /mnt"
    ),
    "marks of overlays": _python("refused(os.setxattr, '/tmp', 'user.overlay.opaque', b'y')"),
    "where overlays lead": _python("refused(os.setxattr, '/workspace', 'user.overlay.redirect', b'/../../etc')"),
    "attributes that are trusted": _python("refused(os.setxattr, '/tmp', 'trusted.overlay.opaque', b'y')"),
    "capabilities of a file": _python("refused(os.setxattr, '/tmp', 'security.capability', bytes(20))"),
    "devices": _refused("mknod /tmp/d b 8 0", "mknod /tmp/m c 1 1", "mknod /tmp/k c 1 11", "cat /tmp/d"),
    "devices of the machine": _absent(
        "/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/fuse", "/dev/sda", "/dev/vda", "/dev/net/tun", "/dev/pts/0"
    ),
    "traces on devices": _refused("touch /dev/null", "chmod 600 /dev/null", "echo > /dev/mine", "rm /dev/null"),
    "a terminal": _refused("exec 3<>/dev/tty", "python3 -c 'import pty; pty.openpty()'"),
    # who it is
    "programs that run as root": _refused(
        "su -c id", "mount /mnt", "[ \"$(python3 -c 'import os; print(os.geteuid())')\" = 0 ]"
    ),
    "a program of its own that does": (
        'cp /usr/bin/id /tmp/id && chmod 6755 /tmp/id && [ "$(/tmp/id -u)" != 0 ] && echo held'
    ),
    "another user": _python("refused(os.setresuid, 0, 0, 0)"),
    "no new privileges": _python("print('held' if libc.prctl(39, 0, 0, 0, 0) == 1 else 'may gain')"),
    "capabilities": _python(
        "data = (ctypes.c_uint32 * 6)()\nlibc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data)\n"
        "print('held' if not any(data) else list(data))"
    ),
    "the filter": _python("print('held' if libc.prctl(21, 0, 0, 0, 0) == 2 else 'none')"),
    "what the node's environment holds": (
        "left=$(compgen -e | grep -vxE 'HOME|LANG|OLDPWD|PATH|PS.|PWD|PYTHON.*|SHELL|SHLVL|TERM|USER|_'); "
        "echo ${left:-held}"
    ),
    # namespaces and the kernel
    "namespaces of its own": _refused(
        "unshare -r true", "unshare -n true", "unshare -m true", "unshare -p true", "unshare -i true", "unshare -C true"
    ),
    "namespaces of others": _python("held(libc.syscall(308 if is_intel else 268, os.pidfd_open(1), 0x20000))"),
    "calls that are newer than the filter": _python(
        "def is_known(number):\n"
        "    return libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS\n"
        "found = list(filter(is_known, range(449, 520)))\n"
        "print(found or 'held')"
    ),
    "rings": _python("held(libc.syscall(427, 0, 0, 0, 0))"),
    "faults of pages": _python("held(libc.syscall(323 if is_intel else 282, 1))"),
    "keys of the session": _python("held(libc.syscall(250 if is_intel else 219, 1, 0, 0, 0, 0))"),
    "keys of its own": _python("held(libc.syscall(248 if is_intel else 217, b'user', b'mine', b'x', 1, -3))"),
    "trees of mounts": _python("held(libc.syscall(428, -100, b'/', 1))"),
    "clocks": _refused("date -s '2001-01-01'", "hostname mine"),
    "control groups": _absent("/sys/fs/cgroup", "/proc/self/cgroup"),
    "a core file": (
        "cd /tmp && (ulimit -c unlimited; python3 -c 'import os; os.abort()') >/dev/null 2>&1; "
        'cd; [ -z "$(ls /tmp/core* 2>/dev/null)" ] && echo held'
    ),
    "queues of messages": _python(
        "rt = ctypes.CDLL('librt.so.1', use_errno=True)\n"
        "print('held' if rt.mq_open(b'/mine', 0o102, 0o600, None) == -1 else 'through')"
    ),
    # network
    "the broker": _refused("exec 3<>/dev/tcp/127.0.0.1/4222", "exec 3<>/dev/udp/127.0.0.1/53"),
    "a server of its own": _python("import socket\nrefused(socket.socket, socket.AF_INET6)"),
    # the shell's own lines
    "the file of ends": _refused("{ echo x >&200; }", "{ : <&201; }"),
    "an end by what is printed": r"printf '%s 0 /\0' 0123456789abcdef; printf '\nheld\n'",
    "an end by files that were put away": (
        "for n in {10..255}; do { printf '%016d 7 /\\0' 0 >&$n; } 2>/dev/null; done; echo held"
    ),
}

ATTEMPTS: Final = "/tmp/attempts"
RUNNER: Final = f"""
import json, os
for name, source in json.load(open({ATTEMPTS!r})):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.closerange(3, 256)
        try:
            exec(compile(source, name, "exec"), {{"__name__": "__main__"}})
        finally:
            import sys
            sys.stdout.flush()
            os._exit(0)
    os.close(writer)
    said = b""
    while block := os.read(reader, 4096):
        said += block
    os.close(reader)
    os.waitpid(child, 0)
    if said.strip() != b"held":
        print(name, said[-200:])
print("held")
"""


def attempts() -> bytes:
    """Return the programs of ``escape_suite`` that are escapes in a box too, for ``RUNNER``."""
    return json.dumps([item for item in ESCAPES.items() if item[0] not in OTHERWISE_IN_A_BOX]).encode()
