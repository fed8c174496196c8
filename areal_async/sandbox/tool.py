"""A tool for models: run a Python program, see what it prints.

    said = await python("print(6 * 7)")        # in a workflow
    await policy.act(messages, tools=[python])  # by the model itself

One call is one program, in the sandbox that all rewards and tools of this process share: nothing is kept from one call
to the next, and nothing outside is within reach. Whatever goes wrong with the program is told to the model as text.
That programs cannot be isolated on this machine is not the model's doing: it ends the run.
"""

from typing import Final

from areal_async.sandbox.limits import End, ProgramResult, SandboxLimits
from areal_async.sandbox.programs import shared_sandbox

LIMITS: Final = SandboxLimits(wall_s=5.0, cpu_s=5)
MOST_CHARACTERS: Final = 4000
"""Bound of what comes back: a conversation has to hold it."""
NOTHING_PRINTED: Final = "(it ended and printed nothing; print what you want to see)"


async def python(code: str) -> str:
    """Run a Python program and return what it prints, or how it failed.

    Every call is a new program: nothing of an earlier call is left. There is no network and no file of yours.

    Args:
        code: the whole program; print what you want to see.
    """
    execution = await (await shared_sandbox()).run(code, limits=LIMITS)
    return _told(execution, LIMITS)


def _told(execution: ProgramResult, limits: SandboxLimits) -> str:
    """Return the output, then the errors, then why it ended if that was not by itself."""
    parts = [_shortened(stream.decode(errors="replace").strip("\n")) for stream in (execution.stdout, execution.stderr)]
    match execution.end:
        case End.OUT_OF_TIME:
            parts.append(f"(ended after {limits.wall_s:g} s: it ran too long)")
        case End.OUT_OF_MEMORY:
            parts.append(f"(ended: it took more than {limits.memory_bytes >> 20} MiB of memory)")
        case End.ENDED if execution.status:
            parts.append(f"(ended with status {execution.status})")
    return "\n".join(part for part in parts if part) or NOTHING_PRINTED


def _shortened(text: str) -> str:
    """Keep the start and the end, where results and errors stand."""
    if len(text) <= MOST_CHARACTERS:
        return text
    kept = MOST_CHARACTERS // 2
    return f"{text[:kept]}\n({len(text) - 2 * kept} characters left out)\n{text[-kept:]}"
