"""What one program may use, and what is known of it afterwards."""

from dataclasses import asdict, dataclass
from enum import StrEnum

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Limits of one program and all it starts together, unless another is named."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """Processor time of each of its processes, in whole seconds as the kernel counts them."""
    memory_bytes: int = 512 * MIB
    """Resident; also the address space of each process."""
    num_processes: int = 16
    """Processes and threads at once."""
    file_bytes: int = 16 * MIB
    """Size of any one file, the two outputs among them."""
    tmp_bytes: int = 64 * MIB
    """All that is in ``/tmp`` and ``/dev/shm``, each."""
    num_files: int = 4096
    """Files and folders in ``/tmp`` and ``/dev/shm``, each: empty ones take the kernel's memory too."""
    output_bytes: int = 64 * 1024
    """Size to which each output is cut."""

    def __post_init__(self) -> None:
        _check_above_zero(asdict(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxLimits:
    """Limits of a box: of each command, then of all that is in it together."""

    wall_s: float = 60.0
    """Of a command that names no other."""
    cpu_s: int = 60
    """Processor time of each process, in whole seconds as the kernel counts them; the shell is one."""
    output_bytes: int = 64 * 1024
    """What is kept of a command's output, its beginning and its end."""
    memory_bytes: int = 1024 * MIB
    """Resident; also the address space of each process."""
    num_processes: int = 128
    """Processes and threads at once."""
    disk_bytes: int = 512 * MIB
    """All files. They are in memory, outside of ``memory_bytes``; snapshots may take twice as much again."""
    num_files: int = 65536
    """Files and folders: empty ones take the kernel's memory too."""
    shm_bytes: int = 64 * MIB
    """All that is in ``/dev/shm``."""
    box_cpu_s: float = 3600.0
    """Processor time of all processes."""
    box_wall_s: float = 7200.0
    """From the box's beginning to its end."""

    def __post_init__(self) -> None:
        _check_above_zero(asdict(self))


def _check_above_zero(limits: dict[str, float]) -> None:
    for name, value in limits.items():
        if value <= 0:
            raise ValueError(f"{name}: got {value}, need more than 0")


class End(StrEnum):
    """Why a program came to its end."""

    ENDED = "ended"
    """It ended by itself, or by a signal of its own or the kernel's: see the status."""
    OUT_OF_TIME = "out of time"
    OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    """One program that has run."""

    end: End
    status: int | None
    """As ``subprocess`` gives it: negative for a signal. None when it was made to end. The program chose it: no
    verdict may rest on it."""
    stdout: bytes
    stderr: bytes
    is_cut: bool
    """An output was longer than its limit."""
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxResult:
    """One command that a box's shell has run."""

    end: End
    status: int | None
    """As ``subprocess`` gives it; of the shell itself where the command ended it. None where it was made to end. The
    command chose it: no verdict may rest on it."""
    output: bytes
    """What it wrote to standard output and error in their order, and before it what the background has written since
    the last one. What there was too much of is left out of its middle, where a line says so."""
    num_left_out: int
    """Bytes of the output that were left out."""
    is_new_shell: bool
    """The shell was started anew since the last result, in the same folder: variables, functions and all that ran are
    gone. The files are there."""
    duration_s: float

    @property
    def text(self) -> str:
        """The output as text."""
        return self.output.decode(errors="replace")
