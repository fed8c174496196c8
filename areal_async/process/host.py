"""What this host offers: its GPUs, and ports to listen on. Without torch: the command line asks before it is loaded."""

import fcntl
import os
import random
import re
import socket
import struct
import subprocess
import sys
from collections import deque
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path

from areal_async.errors import UserError

PROBE_DEADLINE_S = 10.0
DEVICES = Path("/dev")
PLACES = "AREAL_GPU_PLACES"
"""Environment variable of a process on another host than its launcher's: which GPUs it is to see, counted from 0 among
those that this host gives. What they are called is known there alone."""
MIG = "MIG-"
"""What the name of a part of a GPU begins with."""
SIOCGIFADDR = 0x8915
"""Linux's question for the IPv4 address of an interface; a ``struct ifreq`` has it in bytes 20 to 24."""
RENDEZVOUS = "RENDEZVOUS_ID"
"""Environment variable that names one start of processes which meet: those of another start meet nobody of it."""
LOOPBACK = "127.0.0.1"
ANY = "0.0.0.0"
"""What listens there listens at every address of the host; nobody connects to it."""
PORTS = range(16384, 32768)
"""Below those that outgoing connections take: none of them can take a port while its server restarts."""
NUM_TRIES = 50
NUM_RESERVED = 64
"""Ports that a process keeps others from drawing, the newest: one is drawn seconds before its server listens there."""
_DRAWS = random.SystemRandom()
"""Not the shared generator: two processes with one seed would draw the same ports at the same time."""
_reserved: deque[int] = deque()


def visible_gpus() -> tuple[str, ...]:
    """Return the identifiers that ``CUDA_VISIBLE_DEVICES`` takes, honouring what it says now.

    Numbers as CUDA counts, which programs that read the variable expect; for a MIG device its UUID: it has no number.
    """
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return _driver_gpus()
    names = (name.strip() for name in allowed.split(","))
    return tuple(takewhile(lambda name: name not in ("", "-1"), names))  # CUDA stops there too


def take_gpus() -> None:
    """Have this process see those of its host's GPUs whose places its launcher, on another host, has told it.

    Raises:
        UserError: this host has fewer.
    """
    told = os.environ.pop(PLACES, None)
    if told is None:
        return
    gpus, places = visible_gpus(), [int(place) for place in told.split(",")]
    if max(places) >= len(gpus):
        raise UserError(
            f"GPUs: got {len(gpus)} on host {socket.gethostname()}, need {max(places) + 1}, as the first host of the "
            "run has them; leave it out, or lower trainer.num_ranks or inference.num_servers"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[place] for place in places)


@cache
def _driver_gpus() -> tuple[str, ...]:
    """Ask the driver, once. The numbers in ``/dev`` are the host's: CUDA counts a container's GPUs from 0."""
    mig_devices: list[list[str]] = []
    """Of each GPU; one that is divided can only be had in parts."""
    for line in ask_driver("-L").splitlines():
        if line.startswith("GPU "):
            mig_devices.append([])
        elif mig_devices and (uuid := re.search(r"UUID: (MIG-[^)]+)", line)):
            mig_devices[-1].append(uuid[1])
    if mig_devices:
        return tuple(name for number, parts in enumerate(mig_devices) for name in parts or [str(number)])
    # A container may have the GPUs without the driver's program.
    files = [path for path in DEVICES.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal()]
    return tuple(map(str, range(len(files))))


def check_address(host: str, *, setting: str) -> None:
    """Refuse an address that this host cannot both listen at and give to others.

    Raises:
        UserError: it is every address at once, IPv6, another host's, or no name; ``setting`` names whose it was to be.
    """
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
            if probe.getsockname()[0] != ANY:
                return
        except (OSError, UnicodeError):  # a name may also be none that could be looked up
            pass
    raise UserError(f"{setting}: got {host!r}, need an IPv4 address or a name of this host that the other hosts reach")


def address_towards(host: str, port: int) -> str:
    """Return the address of this host under which those at ``host`` can reach it.

    Raises:
        OSError: the name is none, or there is no way there.
    """
    family, kind, protocol, _, destination = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(destination)  # of datagrams: sends nothing, picks the interface
        address: str = probe.getsockname()[0]
    return address


def interface_towards(host: str, port: int) -> str | None:
    """Return the name of the network interface that reaches ``host``; None where this host does not tell."""
    if sys.platform != "linux":
        return None
    try:
        address = address_towards(host, port)
        with socket.socket() as asked:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # one without an address
                    answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("40s", name.encode()))
                    if socket.inet_ntoa(answer[20:24]) == address:
                        return name
    except OSError:
        pass
    return None


def free_port(wanted: int = 0, *, setting: str = "port", host: str = LOOPBACK) -> int:
    """Return ``wanted`` when it can be listened on at ``host``, or for 0 any free port that no other process has drawn.

    Raises:
        UserError: it is taken; ``setting`` names whose it was to be.
    """
    for port in [wanted] if wanted else _DRAWS.sample(PORTS, NUM_TRIES):
        with socket.socket() as probe:
            if wanted:  # its server may have ended just now; one that is drawn is to be free of old connections as well
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        if wanted or _reserve(port):
            return port
    if wanted:
        raise UserError(f"{setting}: port {wanted} of {host} is taken; choose another, or 0 for a free one")
    raise UserError(f"{setting}: got none of {NUM_TRIES} ports of {PORTS.start} to {PORTS.stop - 1}, need a free one")


def far_port() -> int:
    """Return a port of another host, where nobody looks whether it is free: it is to be for one try alone."""
    return _DRAWS.choice(PORTS)


def _reserve(port: int) -> bool:
    """Keep others from drawing a port; say whether nobody has drawn it before.

    By a socket with an abstract name, which Linux has for each network, as it has ports, and frees with its process.
    """
    if sys.platform != "linux":
        return True
    with socket.socket(socket.AF_UNIX) as mark:
        try:
            mark.bind(f"\0areal_async.port.{port}")
        except OSError:
            return False
        _reserved.append(mark.detach())
    while len(_reserved) > NUM_RESERVED:
        os.close(_reserved.popleft())
    return True


def ask_driver(*question: str) -> str:
    """Return what the driver of the GPUs answers (``nvidia-smi``); nothing where there is none, or it does not."""
    command = ["nvidia-smi", *question]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PROBE_DEADLINE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
