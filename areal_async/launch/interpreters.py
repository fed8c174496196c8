"""Whether both interpreters of a run, the trainer's and the servers', can use the GPUs that they would be given.

Asked of a torch of theirs before anything is started: each takes some seconds, and nothing where there is no GPU.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.launch.gpus import share_gpus
from areal_async.process.device import unseen_gpus
from areal_async.process.plain_text import escaped

ASK_DEADLINE_S = 120.0
"""For an import of torch from a file system that has not been read yet."""
_ASK = """
import json, torch
print(json.dumps({
    "torch": torch.__version__, "num_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
}))
"""


class _Torch(msgspec.Struct):
    """What an interpreter says of its torch."""

    torch: str
    num_gpus: int


class _Interpreter(NamedTuple):
    who: str
    python: str
    gpus: tuple[str, ...]
    """What one of its processes is given."""
    num_gpus: int
    """How many of them it uses."""


def check_interpreters(settings: Settings, gpus: tuple[str, ...], *, num_hosts: int = 1) -> list[str]:
    """Have the torch of each interpreter count the GPUs that it would be given; return what each says.

    Args:
        gpus: of this host; none asks nobody.
        num_hosts: of several, this one only trains.

    Raises:
        UserError: an interpreter cannot be asked, or its torch sees fewer GPUs than it would use.
    """
    if not gpus:
        return []
    num_ranks, inference = settings.trainer.num_ranks, settings.inference
    num_served = settings.num_inference_gpus if num_hosts == 1 else 0
    served, trained = share_gpus(gpus, num_inference=num_served, num_trainer=num_ranks)
    interpreters = [_Interpreter("the trainer", sys.executable, trained, num_ranks)]
    if num_served:
        python, one = str(inference.python or sys.executable), served[: inference.tensor_parallel]
        interpreters.append(_Interpreter("the inference server", python, one, len(one)))
    with ThreadPoolExecutor() as threads:
        return list(threads.map(_check, interpreters))


def _check(interpreter: _Interpreter) -> str:
    told = _ask(interpreter.who, interpreter.python, interpreter.gpus)
    who = f"{interpreter.who} ({interpreter.python})"
    if told.num_gpus < interpreter.num_gpus:
        need = interpreter.num_gpus
        raise UserError(unseen_gpus(who, interpreter.gpus, torch=told.torch, num_seen=told.num_gpus, need=need))
    return f"torch {told.torch} of {who} sees {told.num_gpus} of GPUs {','.join(interpreter.gpus)}"


def _ask(who: str, python: str, gpus: Sequence[str]) -> _Torch:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    command = [python, "-c", _ASK]
    try:
        answer = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_DEADLINE_S, check=True
        )
        return msgspec.json.decode(answer.stdout, type=_Torch)
    except subprocess.CalledProcessError as exc:
        lines = exc.stderr.decode(errors="replace").strip().splitlines()
        cause = escaped(lines[-1]) if lines else str(exc)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as exc:
        cause = str(exc)
    raise UserError(f"{who} ({python}): cannot say which GPUs its torch sees: {cause}; install torch there")
