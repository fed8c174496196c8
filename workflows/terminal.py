"""An agent in a shell, for tasks of `harbor:PATH`: it is asked, runs commands, and says when it is done."""

from areal_async import Policy, Prompt
from areal_async.sandbox import Box

MAX_TURNS = 30
COMMAND_S = 120.0
TASK = """Work on the task below in a Linux shell. It has no network. Call `bash` as often as you need; the folder, \
variables and what runs in the background stay from call to call. When it is done, answer in words, without a call.

"""


async def terminal(prompt: Prompt, policy: Policy, box: Box) -> None:
    """Let the model work in a box until it calls nothing more."""

    async def bash(command: str) -> str:
        """Run commands in the shell and return what they print.

        Args:
            command: one line or several, as bash reads them.
        """
        done = await box.run(command, timeout_s=COMMAND_S)
        notes = {"status": done.status or "", "end": "" if done.status is not None else f"{done.end}"}
        told = " ".join(f"{name}: {value}" for name, value in notes.items() if value)
        anew = "the shell was started anew, its variables are gone" if done.is_new_shell else ""
        return "\n".join(part for part in (done.text.rstrip("\n"), told, anew) if part) or "(no output)"

    messages = [{"role": "user", "content": TASK + prompt["instruction"]}]
    await policy.act(messages, [bash], max_turns=MAX_TURNS, tool_timeout_s=COMMAND_S + 10)
