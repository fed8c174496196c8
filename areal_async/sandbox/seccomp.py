"""The filter of system calls, as the kernel reads it: a classic BPF program over ``struct seccomp_data``.

What is refused: everything that reaches into other processes, mounts, namespaces, keys, kernel modules, performance
counters, BPF, io_uring, clocks of the machine, its disks as a whole; all sockets but UNIX ones; memory that belongs to
no process and that no limit counts (files in memory, System V, shared memory without a file, pages given to a pipe,
watches, filters); what shows or slows the use of files that the host and other sandboxes share (watches, locks, leases,
what is cached); and, unheard, every call that is newer than this file. The namespaces make most of these harmless
already; the filter keeps programs away from the code behind them.

Sources: ``include/uapi/linux/{seccomp,filter,audit}.h``, and the kernel's tables of system calls.
"""

import errno
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 24, 32, 40
"""Offsets in ``seccomp_data``; of the arguments the lower half, on little-endian machines."""
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NEW_NAMESPACES = 0x7E020000
"""``CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}``."""
_AF_UNIX = 1
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_SOCKET_OPTIONS = (7, 8, 26, 50, 51, 52)
"""``SO_SNDBUF``, ``SO_RCVBUF``, ``SO_ATTACH_*``: what waits in a socket, and its filters, are the kernel's memory."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""``TIOCSTI`` and ``TIOCLINUX``: typing into a terminal."""
_FILE_COMMANDS = (5, 6, 7, 36, 37, 38, 1024, 1025, 1026, 1031)
"""``F_{GETLK,SETLK,SETLKW}``, ``F_OFD_*``, ``F_{SETLEASE,GETLEASE,NOTIFY}``: locks, which whoever opens the file sees,
and watches on folders. ``F_SETPIPE_SZ``: larger pipes are taken from what all of a user share."""
_NEWEST_KNOWN = 448
_CLONE3 = 435
_SAME_EVERYWHERE = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "memfd_secret": 447,
    "process_mrelease": 448,
}
"""Since 5.1 every architecture has the same numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Numbers of one machine."""

    audit: int
    clone: int
    fcntl: int
    ioctl: int
    mmap: int
    setsockopt: int
    socket: int
    socketpair: int
    refused: dict[str, int]


ARCHITECTURES = {
    "x86_64": Architecture(
        audit=0xC000003E,
        clone=56,
        fcntl=72,
        ioctl=16,
        mmap=9,
        setsockopt=54,
        socket=41,
        socketpair=53,
        refused={
            "mincore": 27,
            "shmget": 29,
            "semget": 64,
            "msgget": 68,
            "flock": 73,
            "ptrace": 101,
            "syslog": 103,
            "uselib": 134,
            "personality": 135,
            "vhangup": 153,
            "modify_ldt": 154,
            "pivot_root": 155,
            "adjtimex": 159,
            "chroot": 161,
            "sync": 162,
            "acct": 163,
            "settimeofday": 164,
            "mount": 165,
            "umount2": 166,
            "swapon": 167,
            "swapoff": 168,
            "reboot": 169,
            "sethostname": 170,
            "setdomainname": 171,
            "iopl": 172,
            "ioperm": 173,
            "init_module": 175,
            "delete_module": 176,
            "quotactl": 179,
            "nfsservctl": 180,
            "io_setup": 206,
            "lookup_dcookie": 212,
            "fadvise64": 221,
            "clock_settime": 227,
            "mbind": 237,
            "set_mempolicy": 238,
            "get_mempolicy": 239,
            "kexec_load": 246,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "inotify_init": 253,
            "inotify_add_watch": 254,
            "migrate_pages": 256,
            "unshare": 272,
            "vmsplice": 278,
            "move_pages": 279,
            "inotify_init1": 294,
            "perf_event_open": 298,
            "fanotify_init": 300,
            "name_to_handle_at": 303,
            "open_by_handle_at": 304,
            "clock_adjtime": 305,
            "syncfs": 306,
            "setns": 308,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "kcmp": 312,
            "finit_module": 313,
            "memfd_create": 319,
            "kexec_file_load": 320,
            "bpf": 321,
            "userfaultfd": 323,
        },
    ),
    "aarch64": Architecture(
        audit=0xC00000B7,
        clone=220,
        fcntl=25,
        ioctl=29,
        mmap=222,
        setsockopt=208,
        socket=198,
        socketpair=199,
        refused={
            "io_setup": 0,
            "lookup_dcookie": 18,
            "inotify_init1": 26,
            "inotify_add_watch": 27,
            "flock": 32,
            "umount2": 39,
            "mount": 40,
            "pivot_root": 41,
            "nfsservctl": 42,
            "chroot": 51,
            "vhangup": 58,
            "quotactl": 60,
            "vmsplice": 75,
            "sync": 81,
            "acct": 89,
            "personality": 92,
            "unshare": 97,
            "kexec_load": 104,
            "init_module": 105,
            "delete_module": 106,
            "clock_settime": 112,
            "syslog": 116,
            "ptrace": 117,
            "reboot": 142,
            "sethostname": 161,
            "setdomainname": 162,
            "settimeofday": 170,
            "adjtimex": 171,
            "msgget": 186,
            "semget": 190,
            "shmget": 194,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "fadvise64": 223,
            "swapon": 224,
            "swapoff": 225,
            "mincore": 232,
            "mbind": 235,
            "get_mempolicy": 236,
            "set_mempolicy": 237,
            "migrate_pages": 238,
            "move_pages": 239,
            "perf_event_open": 241,
            "fanotify_init": 262,
            "name_to_handle_at": 264,
            "open_by_handle_at": 265,
            "clock_adjtime": 266,
            "syncfs": 267,
            "setns": 268,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "kcmp": 272,
            "finit_module": 273,
            "memfd_create": 279,
            "bpf": 280,
            "userfaultfd": 282,
            "kexec_file_load": 294,
        },
    ),
}


def build_filter(machine: str | None = None) -> bytes:
    """Return the filter for a machine, this one by default: an array of ``struct sock_filter``.

    Raises:
        KeyError: there is none for this architecture.
    """
    architecture = ARCHITECTURES[machine or platform.machine()]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(architecture))


def _instructions(machine: Architecture) -> Iterator[tuple[int, int, int, int]]:
    def give(value: int) -> tuple[int, int, int, int]:
        return _RETURN, 0, 0, value

    def load(offset: int) -> tuple[int, int, int, int]:
        return _LOAD, 0, 0, offset

    refuse, unknown = give(_ERRNO | errno.EPERM), give(_ERRNO | errno.ENOSYS)
    yield load(_ARCHITECTURE)
    yield _EQUAL, 1, 0, machine.audit
    yield give(_KILL)
    yield load(_NUMBER)
    yield _GREATER, 0, 1, _NEWEST_KNOWN
    yield unknown
    yield _EQUAL, 0, 1, _CLONE3  # its flags are behind a pointer; the C library falls back on clone
    yield unknown
    for number in (*machine.refused.values(), *_SAME_EVERYWHERE.values()):
        yield _EQUAL, 0, 1, number
        yield refuse
    yield _EQUAL, 0, 4, machine.clone
    yield load(_FIRST_ARGUMENT)
    yield _ANY_BIT, 0, 1, _NEW_NAMESPACES
    yield refuse
    yield give(_ALLOW)
    for number in (machine.socket, machine.socketpair):
        yield _EQUAL, 0, 4, number
        yield load(_FIRST_ARGUMENT)
        yield _EQUAL, 1, 0, _AF_UNIX
        yield refuse
        yield give(_ALLOW)
    yield _EQUAL, 0, 5, machine.mmap
    yield load(_FOURTH_ARGUMENT)
    yield _ANY_BIT, 0, 2, _MAP_ANONYMOUS
    yield _ANY_BIT, 0, 1, _MAP_SHARED
    yield refuse
    yield give(_ALLOW)
    for number, offset, values in (
        (machine.setsockopt, _THIRD_ARGUMENT, _SOCKET_OPTIONS),
        (machine.ioctl, _SECOND_ARGUMENT, _TERMINAL_INPUT),
        (machine.fcntl, _SECOND_ARGUMENT, _FILE_COMMANDS),
    ):
        yield _EQUAL, 0, 2 * len(values) + 2, number
        yield load(offset)
        for value in values:
            yield _EQUAL, 0, 1, value
            yield refuse
        yield give(_ALLOW)
    yield give(_ALLOW)
