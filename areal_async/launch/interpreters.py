"""Whether both interpreters of a run, the trainer's and the servers', can use the GPUs that they would be given.

Asked of a torch of theirs before anything is started: each takes some seconds, and nothing where there is no GPU. And
of what is installed there whether both bring one nccl, where they are to meet in one group.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import msgspec

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.launch.plan import share_gpus
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


_ASK_NCCL = """
import importlib.metadata, json
found = [one.version for one in importlib.metadata.distributions() if (one.name or "").startswith("nvidia-nccl-cu")]
print(json.dumps(found))
"""
T = TypeVar("T")


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
        num_hosts: of more than have ranks, this one only trains.

    Raises:
        UserError: an interpreter cannot be asked, or its torch sees fewer GPUs than it would use; or weights are to be
            broadcast between two versions of nccl.
    """
    if not gpus:
        return []
    nccl = _check_nccl(settings) if settings.inference.weight_transfer == "distributed" else []
    num_ranks, inference = settings.trainer.ranks_per_host, settings.inference
    num_served = settings.num_inference_gpus if num_hosts == settings.trainer.num_hosts else 0
    colocates = inference.colocate is not None
    served, trained = share_gpus(gpus, num_inference=num_served, num_trainer=num_ranks, colocates=colocates)
    interpreters = [_Interpreter("the trainer", sys.executable, trained, num_ranks)]
    if num_served:
        python, one = str(inference.python or sys.executable), served[: inference.tensor_parallel]
        interpreters.append(_Interpreter("the inference server", python, one, len(one)))
    with ThreadPoolExecutor() as threads:
        return [*threads.map(_check, interpreters), *nccl]


def _check(interpreter: _Interpreter) -> str:
    told = _ask(interpreter.python, _ASK, _Torch, who=interpreter.who, gpus=interpreter.gpus)
    who = f"{interpreter.who} ({interpreter.python})"
    if told.num_gpus < interpreter.num_gpus:
        need = interpreter.num_gpus
        raise UserError(unseen_gpus(who, interpreter.gpus, torch=told.torch, num_seen=told.num_gpus, need=need))
    return f"torch {told.torch} of {who} sees {told.num_gpus} of GPUs {','.join(interpreter.gpus)}"


def _check_nccl(settings: Settings) -> list[str]:
    """Compare the packages that bring nccl; a torch that brings its own does not say which it is."""
    python = str(settings.inference.python or sys.executable)
    ours = _ask(sys.executable, _ASK_NCCL, list[str], who="the trainer")
    theirs = _ask(python, _ASK_NCCL, list[str], who="the inference server")
    if not ours or not theirs:
        return []
    if ours != theirs:
        raise UserError(
            f"inference.weight_transfer: got distributed between nccl {', '.join(ours)} of the trainer "
            f"({sys.executable}) and nccl {', '.join(theirs)} of the inference server ({python}), need one version; "
            "install the same nvidia-nccl in both, or take disk"
        )
    return [f"nccl {', '.join(ours)} of both the trainer and the inference server"]


def _ask(python: str, question: str, kind: type[T], *, who: str, gpus: Sequence[str] = ()) -> T:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    command = [python, "-c", question]
    try:
        answer = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_DEADLINE_S, check=True
        )
        return msgspec.json.decode(answer.stdout, type=kind)
    except subprocess.CalledProcessError as exc:
        lines = exc.stderr.decode(errors="replace").strip().splitlines()
        cause = escaped(lines[-1]) if lines else str(exc)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as exc:
        cause = str(exc)
    raise UserError(f"{who} ({python}): does not say what its torch can use: {cause}; install torch there")
