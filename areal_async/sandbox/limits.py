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
        for name, value in asdict(self).items():
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
