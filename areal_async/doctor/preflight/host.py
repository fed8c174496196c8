"""Whether the host has the ports, the disk, the files, the cores and the clock that a run wants."""

from collections.abc import Iterator, Mapping

from areal_async.config.settings import Settings
from areal_async.doctor.preflight.findings import PreflightFinding, error, gigabytes, good, good_if, warning
from areal_async.doctor.preflight.machine import Machine, free_disk_bytes
from areal_async.doctor.preflight.memory import NUM_BYTES, STATE_BYTES, ModelSize
from areal_async.launch.backend import Backend
from areal_async.launch.interpreters import check_interpreters
from areal_async.launch.local import LocalBackend
from areal_async.launch.plan import plan_groups
from areal_async.launch.run_directory import RunDirectory
from areal_async.process.host import free_port

FILES_PER_TRAJECTORY = 2
"""A stream to a server, and one of an agent's own client."""
OTHER_FILES = 512
SHARED_MEMORY_BYTES = 1 << 30
"""Below this, collectives of GPUs on one host fail or crawl."""
NUM_WEIGHTS_KEPT = 3
"""Copies of the served weights on disk at once: two kept, and the one being written."""


def check_processes(settings: Settings, machine: Machine, backend: Backend | None = None) -> Iterator[PreflightFinding]:
    """Share the GPUs as the launcher will, and have torch count them, or count threads against cores.

    Args:
        backend: of the run; None is this host alone.
    """
    backend = backend or LocalBackend()
    gpus, hosts = backend.gpus, backend.workers
    plan_groups(settings, RunDirectory(settings.run_directory), gpus=gpus, hosts=hosts)
    if hosts != backend.hosts:
        yield good("GPUs", f"{len(gpus)} on each of {', '.join(hosts)}")
        return
    if gpus:
        names = ", ".join(sorted({gpu.name for gpu in machine.gpus})) or "the driver does not name them"
        yield good("GPUs", f"{len(gpus)} ({names})")
        for told in check_interpreters(settings, gpus, num_hosts=len(hosts)):
            yield good("torch", told)
        return
    trainer, served = settings.trainer, settings.inference
    num_threads = trainer.ranks_per_host * trainer.num_threads
    if len(hosts) == trainer.num_hosts:
        num_threads += served.num_servers * served.num_threads
    saw = f"{num_threads} busy threads on {machine.num_cores} cores, no GPU"
    cure = "lower trainer.num_threads or inference.num_threads; they take turns else"
    yield good_if(num_threads <= machine.num_cores, "cores", saw, cure, otherwise=warning)


def check_ports(settings: Settings) -> Iterator[PreflightFinding]:
    """Try the ports that the settings name."""
    for name in ("port", "http_port"):
        wanted = getattr(settings.bus, name)
        free_port(wanted, setting=f"bus.{name}")
        if wanted:
            yield good("ports", f"bus.{name} {wanted} is free")
    if settings.bus.url == "embedded" and not settings.bus.port:
        yield good("ports", "free ones are taken as they are needed")


def check_disk(settings: Settings, sizes: Mapping[str, ModelSize]) -> Iterator[PreflightFinding]:
    """Add up what the run may write at the same time."""
    free = free_disk_bytes(settings.run_directory)
    state = dict.fromkeys(("actor", "critic"), STATE_BYTES - 4)  # the gradient is not in it
    if settings.trainer.lora.is_on:
        state["actor"] = NUM_BYTES[settings.model.dtype]
    trained = sum(state[role] * size.num_parameters for role, size in sizes.items() if role in state)
    # One more than is kept while the next is written.
    checkpoints = trained * (settings.trainer.keep_checkpoints + 1 + (settings.trainer.keep_best is not None))
    weights = sizes["actor"].weights_bytes(dtype=settings.model.dtype) * NUM_WEIGHTS_KEPT if "actor" in sizes else 0
    streams = settings.bus.max_disk_bytes if settings.bus.url == "embedded" else 0
    need = checkpoints + weights
    saw = (
        f"{gigabytes(free)} free at {settings.run_directory}; checkpoints {gigabytes(checkpoints)}, served weights "
        f"{gigabytes(weights)}, streams up to {gigabytes(streams)}"
    )
    cure = "make room, lower trainer.keep_checkpoints, or set run.directory to a larger disk"
    if need > free:
        yield error("disk", saw, cure)
    else:
        yield good_if(need + streams <= free, "disk", saw, f"{cure}; or lower bus.max_disk_bytes", otherwise=warning)


def check_limits(settings: Settings, machine: Machine) -> Iterator[PreflightFinding]:
    """Count the files that a node opens, and the memory that GPUs share."""
    need = FILES_PER_TRAJECTORY * settings.rollout.max_trajectories_per_node + OTHER_FILES
    saw = f"{machine.open_files:,} open files a process, a node wants {need:,}"
    cure = f"raise it (ulimit -Hn {need}), or lower rollout.max_trajectories_per_node"
    yield good_if(machine.open_files >= need, "limits", saw, cure, otherwise=error)
    shared = machine.shared_memory_bytes
    if machine.gpus and shared is not None and shared < SHARED_MEMORY_BYTES:
        yield warning("shared memory", f"{gigabytes(shared)} in /dev/shm", "enlarge it (docker: --shm-size 8g)")


def check_clock(machine: Machine) -> Iterator[PreflightFinding]:
    """Ask whether anything keeps the clock right. The run itself counts no time by it; people and logs do."""
    if machine.is_clock_kept is False:
        yield warning("clock", "nothing keeps this host's clock right", "start a time service such as chrony")
    else:
        yield good("clock", "kept right" if machine.is_clock_kept else "this host does not tell whether it is kept")
