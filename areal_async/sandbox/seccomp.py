"""The filter of system calls, as the kernel reads it: a classic BPF program over ``struct seccomp_data``.

What is refused: everything that reaches into other processes, mounts, namespaces, keys, kernel modules, performance
counters, BPF, io_uring, clocks of the machine, its disks as a whole; all sockets but UNIX ones that connect; memory
that belongs to no process and that no limit counts (files in memory, System V, shared memory without a file, huge
pages, pages given to a pipe or a socket, attributes of files, watches, filters); what shows or slows the use of files
and memory that the host and other sandboxes share (watches, locks, leases, hints, what is cached, reads past the cache,
how busy the machine is); all commands to devices and files but a few; and, unheard, every call that is newer than this
file. The namespaces make most of these harmless already; the filter keeps programs away from the code behind them.

Sources: ``include/uapi/linux/{seccomp,filter,audit}.h``, and the kernel's tables of system calls.
"""

import errno
import platform
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter

_LOAD, _AND, _EQUAL, _GREATER, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _ARGUMENT_BYTES = 0, 4, 16, 8
"""Offsets in ``seccomp_data``; of the arguments the lower half, on little-endian machines."""
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_ALL_BITS = 0xFFFFFFFF
_NEW_NAMESPACES = 0x7E020000
"""``CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}``."""
_AF_UNIX = 1
_KIND_OF_SOCKET, _SOCK_DGRAM, _SOCK_RAW = 0xF, 2, 3
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000
_SOCKET_OPTIONS = (7, 8, 26, 50, 51, 52)
"""``SO_SNDBUF``, ``SO_RCVBUF``, ``SO_ATTACH_*``: what waits in a socket, and its filters, are the kernel's memory."""
_DEVICE_COMMANDS = (
    *(0x5401, 0x5402, 0x5403, 0x5404, 0x802C542A),  # what a terminal is set to: is it one?
    *(0x540F, 0x5411, 0x5413, 0x541B),  # whose it is, how large, what waits in it
    *(0x5421, 0x5450, 0x5451),  # FIONBIO, FIONCLEX, FIOCLEX
    0x40049409,  # FICLONE: copy a file if it goes without a copy
)
"""All that a program needs of ``ioctl``."""
_SET_TERMINAL_LATER = 0x5403
"""``TCSETSW``."""
_F_SETFL = 4
_FILE_COMMANDS = (0, 1, 2, 3, _F_SETFL, 8, 9, 10, 11, 15, 16, 1027, 1030, 1032, 1034)
"""``F_{DUPFD,GETFD,SETFD,GETFL,SETFL}``, whom signals go to, ``F_DUPFD_{QUERY,CLOEXEC}``, ``F_GET{PIPE_SZ,_SEALS}``.
Not locks, leases, hints and watches, which all who open the file see; nor larger pipes, which share one limit."""
_PROCESS_COMMANDS = (22, 62, 67)
"""``PR_SET_SECCOMP``, ``PR_SCHED_CORE``, ``PR_SET_MEMORY_MERGE``: filters are the kernel's memory, and who shares
a core or equal pages is told of others."""
_MEMORY_ADVICE = (12, 20, 21)
"""``MADV_{MERGEABLE,COLD,PAGEOUT}``: what is swapped out is in no process; shared files leave the cache."""
_RWF_NOWAIT = 0x8
_NEWEST_KNOWN = 448


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Refuse a call by an argument."""

    call: str
    argument: int
    mask: int = _ALL_BITS
    refused: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    """Values of the argument that pass; where there are any, all others are refused."""
    error: int = errno.EPERM
    """What is answered; 0 says that it was done."""
    only_with: tuple[int, int] | None = None
    """An argument and its value: with another the rule does not hold."""


_Calls = Mapping[str, int | tuple[int | None, int | None]]
"""Numbers of calls: one where it is the same on every machine, as of those since Linux 5.1, else that on x86_64 and
that on aarch64; None where a machine does not have the call."""
_LOOKED_INTO: _Calls = {
    "open": (2, None),
    "mmap": (9, 222),
    "ioctl": (16, 29),
    "madvise": (28, 233),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "setsockopt": (54, 208),
    "clone": (56, 220),
    "fcntl": (72, 25),
    "prctl": (157, 167),
    "openat": (257, 56),
    "prlimit64": (302, 261),
    "preadv2": (327, 286),
}
"""Calls that have rules."""
_ANSWERED: Mapping[int, _Calls] = {
    0: {"fsync": (74, 82), "fdatasync": (75, 83), "sync_file_range": (277, 84)},
    errno.ENOTSOCK: {"sendfile": (40, 71)},
    errno.ENOSYS: {"clone3": 435, "openat2": 437},
}
"""Error -> calls that get it, 0 for none. To sync is done without being done: nothing that a program may write is on a
disk, and the machine's would be flushed. Who calls ``sendfile`` copies by other means on this error. The flags of the
last are behind a pointer; the C library falls back on the older calls."""
_REFUSED: Mapping[str, _Calls] = {
    "other processes": {"ptrace": (101, 117), "kcmp": (312, 272), "pidfd_getfd": 438},
    "their memory": {"process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    "how they use it": {"process_madvise": 440, "process_mrelease": 448, "userfaultfd": (323, 282)},
    "memory by its node": {"mbind": (237, 235), "set_mempolicy": (238, 237), "get_mempolicy": (239, 236)},
    "pages and their nodes": {"migrate_pages": (256, 238), "move_pages": (279, 239)},
    "namespaces": {"unshare": (272, 97), "setns": (308, 268)},
    "mounts": {"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    "mounts by new calls": {"open_tree": 428, "move_mount": 429, "fsmount": 432, "mount_setattr": 442},
    "file systems": {"fsopen": 430, "fsconfig": 431, "fspick": 433, "nfsservctl": (180, 42)},
    "disks": {"sync": (162, 81), "syncfs": (306, 267), "quotactl": (179, 60), "quotactl_fd": 443},
    "swap, and turns at a disk": {"swapon": (167, 224), "swapoff": (168, 225), "ioprio_set": (251, 30)},
    "clocks": {"settimeofday": (164, 170), "adjtimex": (159, 171)},
    "clocks by their number": {"clock_settime": (227, 112), "clock_adjtime": (305, 266)},
    "names of the machine": {"sethostname": (170, 161), "setdomainname": (171, 162)},
    "the machine": {"reboot": (169, 142), "sysinfo": (99, 179), "acct": (163, 89), "vhangup": (153, 58)},
    "its hardware": {"iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None)},
    "other kernels": {"kexec_load": (246, 104), "kexec_file_load": (320, 294)},
    "modules": {"init_module": (175, 105), "delete_module": (176, 106), "finit_module": (313, 273)},
    "how programs run": {"uselib": (134, None), "personality": (135, 92)},
    "keys": {"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    "the kernel's log and counters": {"syslog": (103, 116), "perf_event_open": (298, 241)},
    "programs for the kernel": {"bpf": (321, 280), "seccomp": (317, 277)},
    "rules of one's own": {"landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446},
    "io_uring": {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "io_setup": (206, 0)},
    "System V": {"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186)},
    "files in memory": {"memfd_create": (319, 279), "memfd_secret": 447},
    "pages in pipes": {"splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75)},
    "attributes": {"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    "watches": {"inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27)},
    "watches on mounts": {"fanotify_init": (300, 262), "lookup_dcookie": (212, 18)},
    "handles": {"name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265)},
    "shared files": {"mincore": (27, 232), "flock": (73, 32), "fadvise64": (221, 223)},
}
"""What they reach -> calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A kind of machine."""

    position: int
    """Of its numbers in the tables."""
    audit: int
    o_direct: int

    def numbers(self, *tables: _Calls) -> dict[str, int]:
        """Return its numbers of the calls that it has, in ascending order."""
        given = {name: number for calls in tables for name, number in calls.items()}
        own = {name: number if isinstance(number, int) else number[self.position] for name, number in given.items()}
        return dict(sorted(((name, number) for name, number in own.items() if number is not None), key=itemgetter(1)))


ARCHITECTURES = {
    "x86_64": Architecture(position=0, audit=0xC000003E, o_direct=0x4000),
    "aarch64": Architecture(position=1, audit=0xC00000B7, o_direct=0x10000),
}


def build_filter(machine: str | None = None) -> bytes:
    """Return the filter for a machine, this one by default: an array of ``struct sock_filter``.

    Raises:
        KeyError: there is none for this architecture.
    """
    architecture = ARCHITECTURES[machine or platform.machine()]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(architecture))


def _rules(machine: Architecture) -> Iterator[Rule]:
    yield Rule(call="clone", argument=0, mask=_NEW_NAMESPACES, allowed=(0,))
    for call in ("socket", "socketpair"):
        yield Rule(call=call, argument=0, allowed=(_AF_UNIX,))
        # what senders that have gone since have sent waits at whom they sent it to
        yield Rule(call=call, argument=1, mask=_KIND_OF_SOCKET, refused=(_SOCK_DGRAM, _SOCK_RAW))
    shared = _MAP_SHARED | _MAP_ANONYMOUS
    yield Rule(call="mmap", argument=3, mask=shared, refused=(shared,))
    yield Rule(call="mmap", argument=3, mask=_MAP_HUGETLB, refused=(_MAP_HUGETLB,))
    yield Rule(call="madvise", argument=2, refused=_MEMORY_ADVICE)
    yield Rule(call="setsockopt", argument=2, refused=_SOCKET_OPTIONS)
    yield Rule(call="prctl", argument=0, refused=_PROCESS_COMMANDS)
    yield Rule(call="prlimit64", argument=0, allowed=(0,))  # one's own: others are the first process of all, too
    # after a program that a signal has ended, bash sets its terminal back, and complains that it has none
    yield Rule(call="ioctl", argument=1, refused=(_SET_TERMINAL_LATER,), error=0)
    yield Rule(call="ioctl", argument=1, allowed=_DEVICE_COMMANDS)
    yield Rule(call="fcntl", argument=1, allowed=_FILE_COMMANDS)
    past_the_cache = (machine.o_direct,)
    yield Rule(call="fcntl", argument=2, mask=machine.o_direct, refused=past_the_cache, only_with=(1, _F_SETFL))
    yield Rule(call="openat", argument=2, mask=machine.o_direct, refused=past_the_cache)
    yield Rule(call="open", argument=1, mask=machine.o_direct, refused=past_the_cache)
    yield Rule(call="preadv2", argument=5, mask=_RWF_NOWAIT, refused=(_RWF_NOWAIT,))  # whether it is in the cache


def _instructions(machine: Architecture) -> Iterator[tuple[int, int, int, int]]:
    looked_into = machine.numbers(_LOOKED_INTO)
    answers = {number: error for error, calls in _ANSWERED.items() for number in machine.numbers(calls).values()}
    answered = dict(sorted(answers.items()))
    answered |= dict.fromkeys(machine.numbers(*_REFUSED.values()).values(), errno.EPERM)
    yield _load(_ARCHITECTURE)
    yield _EQUAL, 1, 0, machine.audit
    yield _give(_KILL)
    yield _load(_NUMBER)
    yield _GREATER, 0, 1, _NEWEST_KNOWN
    yield _give(_ERRNO | errno.ENOSYS)
    for number, error in answered.items():
        yield _EQUAL, 0, 1, number
        yield _give(_ERRNO | error)
    for rule in _rules(machine):
        if rule.call in looked_into:
            body = list(_body(rule))
            yield _EQUAL, 0, len(body), looked_into[rule.call]
            yield from body
    yield _give(_ALLOW)


def _body(rule: Rule) -> Iterator[tuple[int, int, int, int]]:
    """Yield the part of a rule for its own call: it refuses, or goes on with the number of the call."""
    values = rule.allowed or rule.refused
    tests = [_load(_argument(rule.argument)), (_AND, 0, 0, rule.mask)]
    for num_left, value in zip(reversed(range(len(values))), values, strict=True):
        # to the refusal, which stands behind the last value, or beyond it
        is_last = num_left == 0
        tests.append((_EQUAL, num_left + bool(rule.allowed), is_last and not rule.allowed, value))
    tests.append(_give(_ERRNO | rule.error))
    if rule.only_with:
        other, value = rule.only_with
        yield _load(_argument(other))
        yield _EQUAL, 0, len(tests), value
    yield from tests
    yield _load(_NUMBER)


def _argument(position: int) -> int:
    return _FIRST_ARGUMENT + position * _ARGUMENT_BYTES


def _give(value: int) -> tuple[int, int, int, int]:
    return _RETURN, 0, 0, value


def _load(offset: int) -> tuple[int, int, int, int]:
    return _LOAD, 0, 0, offset
