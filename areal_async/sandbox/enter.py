"""Become nobody, then bubblewrap, then a server. Run as a file by ``python -I -S``: the standard library alone.

    python -I -S enter.py '{"mount_point": ..., "bubblewrap": ..., "libraries": ..., "interpreter": ..., "prefix": ...,
                            "group": ..., "servers": ..., "capabilities": ..., "folders": ..., "places": ...}'

``servers`` has files of ours by the place that each gets inside; the first is what runs. ``folders`` are the system's
to read beside its libraries, each in its own place, and ``places`` empty ones to mount at.

Root's own files may be closed to others (an interpreter under ``/root``), so what the sandbox needs of them is bound to
a place that is open, in a mount namespace that ends with this process, before the privileges are given away.
"""

import contextlib
import ctypes
import json
import os
import sys

NOBODY = 65534
NEW_MOUNTS = 0x20000
PRIVATE_BELOW = 0x44000
BIND_BELOW = 0x5000
NOT_SUID_NOT_DEVICES = 0x6


def main() -> None:
    """Replace this process by the sandbox."""
    config = json.loads(sys.argv[1])
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where memory is short all the same, a program goes first
    with contextlib.suppress(OSError), open(config["group"], "w") as group:
        group.write("0")
    prefix, bubblewrap, libraries = config["prefix"], config["bubblewrap"], config["libraries"]
    servers = {place: os.open(path, os.O_RDONLY) for place, path in config["servers"].items()}
    for server in servers.values():
        os.set_inheritable(server, True)
    if os.geteuid() == 0:
        place = config["mount_point"]
        _mount_privately(place)
        prefix = _bind(prefix, f"{place}/python")
        bubblewrap = f"{_bind(os.path.dirname(bubblewrap), f'{place}/bin')}/{os.path.basename(bubblewrap)}"
        libraries = libraries and _bind(libraries, f"{place}/lib")
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    os.umask(0o022)
    environment = {"LD_LIBRARY_PATH": libraries} if libraries else {}
    os.execve(bubblewrap, [bubblewrap, *_arguments(prefix, config["interpreter"], servers, config)], environment)


def _arguments(prefix: str, interpreter: str, servers: dict[str, int], config: dict[str, list[str]]) -> list[str]:
    arguments = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    arguments += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox"]
    arguments += ["--cap-drop", "ALL"]
    for capability in config["capabilities"]:
        arguments += ["--cap-add", capability]
    for folder in ("bin", "lib", "lib64"):  # what else is beside them may be anybody's: under /usr, src and local
        if os.path.isdir(f"{prefix}/{folder}"):
            arguments += ["--ro-bind", f"{prefix}/{folder}", f"/python/{folder}"]
    for folder in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", *config["folders"]):
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            arguments += ["--ro-bind", folder, folder]
    # a shared mapping of /dev/zero is memory that no limit counts
    arguments += ["--dev", "/dev", "--dev-bind", "/dev/null", "/dev/zero", "--perms", "0777", "--dir", "/tmp"]
    # terminals are few on a machine, and their buffers are the kernel's memory
    arguments += ["--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts"]
    for place, server in servers.items():
        arguments += ["--ro-bind-data", str(server), place]
    for place in config["places"]:
        arguments += ["--dir", place]
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/"]
    arguments += ["--chdir", "/", "--clearenv", "--setenv", "LD_LIBRARY_PATH", "/python/lib"]
    return [*arguments, "--", f"/python/{interpreter}", "-I", "-S", next(iter(servers))]


def _mount_privately(place: str) -> None:
    _check(_LIBC.unshare(NEW_MOUNTS), "a mount namespace")
    _check(_LIBC.mount(b"none", b"/", None, PRIVATE_BELOW, None), "private mounts")
    _check(_LIBC.mount(b"tmpfs", place.encode(), b"tmpfs", NOT_SUID_NOT_DEVICES, b"size=64k,mode=0755"), place)


def _bind(source: str, target: str) -> str:
    os.mkdir(target, 0o755)
    _check(_LIBC.mount(source.encode(), target.encode(), None, BIND_BELOW, None), f"binding {source}")
    return target


def _check(status: int, what: str) -> None:
    if status:
        raise SystemExit(f"{what}: {os.strerror(ctypes.get_errno())}")


_LIBC = ctypes.CDLL(None, use_errno=True)

if __name__ == "__main__":
    main()
