"""Which program serves, and its command line: the real SGLang, or the embedded engine with the same routes."""

import importlib.util
import os
import secrets
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from areal_async.config.settings import InferenceSettings, Settings
from areal_async.errors import UserError
from areal_async.inference.admin_key import VARIABLE
from areal_async.inference.card_share import CardShare
from areal_async.process.freed_memory import one_heap
from areal_async.process.host import visible_gpus
from areal_async.process.interpreter import module_command

NO_VERSION = "0-0"
"""Weights version of a server that has just started: older than any that a trainer announces."""
SGLANG_ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--disable-cuda-graph"),
    # Else a server without a request spins, and takes a core that others need.
    "--sleep-on-idle",
    # The default is most of the host's memory, which other servers and a trainer share here.
    *("--max-total-tokens", "65536"),
)
"""SGLang's defaults want a GPU; ``inference.flags`` come later on the command line and win."""
UNCOMPILED = {"TORCH_COMPILE_DISABLE": "1"}
"""Has SGLang's few compiled functions run as they are written: else a model that sees has its rotary embedding compiled
as it starts, on a CPU by a C++ compiler, which takes as long as all the rest of the start and has to be there."""
COMPILED = "--enable-torch-compile"
"""SGLang's flag with which it compiles whole models."""
MEMORY_SAVER = "--enable-memory-saver"
"""SGLang's flag without which it releases nothing when it is told to."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch reads how its allocator of GPU memory works; the second name is the older one, and is read first."""
UNEVEN_GPUS = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
"""Has SGLang start where the trainer has taken more of one of a server's GPUs so far than of another."""
OWN_PATH = {"PYTHONSAFEPATH": "1"}
"""A user's folder may have a ``random.py``; a flag would be unknown to an older Python."""
IMAGES = {"SGLANG_VLM_CACHE_SIZE_MB": "0", "SGLANG_MM_AVOID_RETOKENIZE": "1"}
"""Has SGLang compute what the vision tower makes of an image for each request: it keeps that by the image alone, and
0.5.23 goes on with it after a new version of the weights, flushed or not. And has it keep the ids that were sent beside
images, instead of decoding and encoding them again. A model that does not see has no use for either."""
SGLANG_KEY = "--admin-api-key"
NAME = "--served-model-name"
NUM_NAME_BYTES = 8
NUM_SECRET_BYTES = 32
MAX_SERVERS_ON_CPU = 32
"""Where no GPU bounds how many there are."""
NCCL_MEMORY = "NCCL_CUMEM_ENABLE"
"""Says how nccl has GPUs of one host reach each other's memory; the ranks of a group must do it alike, or one cannot
open what another gives it. SGLang sets it to 0 for itself where it is not set; nccl, left alone, mostly takes 1."""
SYMMETRIC = "--enable-symm-mem"
"""SGLang's flag with which it sets that to 1, whatever was set."""
DETERMINISTIC = "--enable-deterministic-inference"
"""SGLang's flag without which it takes the seed of a request and does nothing with it."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start one server, all but its port."""

    id: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    """What is added to that of the process that starts it: the secret too, which no command line of ours has."""
    admin_key: str = field(default="", repr=False)
    """The secret without which it is not administrated; empty for a server that needs none."""
    name: str = ""
    """What it says when it is asked what it serves, by which it is known; empty where it is not asked."""

    def on_port(self, port: int) -> list[str]:
        """Return the whole command line."""
        return [*self.arguments, "--port", str(port)]


def server_command(
    settings: Settings, *, server_id: str, index: int, first_gpu: int = 0, version: str = NO_VERSION
) -> ServerCommand:
    """Return the command of server number ``index`` of a fleet whose GPUs begin at ``first_gpu``.

    It calls the weights that it starts with ``version``. Each gets a name of its own, unless ``inference.flags`` give
    it one. Nobody else sees it: requests name no model. An embedded server gets a secret too. SGLang gets none, only
    what ``inference.flags`` give it: 0.5.23 takes its key from the command line, writes it into its log and tells it to
    everybody who asks ``/server_info``.
    """
    inference = settings.inference
    python = str(inference.python or sys.executable)
    is_sglang = choose_backend(inference) == "sglang"
    _, *ours = module_command("areal_async.inference.embedded")
    arguments = [python, *(["-m", "sglang.launch_server"] if is_sglang else ours)]
    arguments += ["--model-path", settings.model.path, "--host", "127.0.0.1", "--weight-version", version]
    arguments += ["--dtype", settings.model.dtype]
    name = _value_of(NAME, inference.flags) or f"areal_async-{secrets.token_hex(NUM_NAME_BYTES)}"
    arguments += [NAME, name]
    arguments += ["--max-running-requests", str(inference.max_running_requests)]
    arguments += ["--stream-interval", str(inference.stream_interval)]
    arguments += ["--random-seed", str(_seed(settings.run.seed, server_id))]
    if inference.context_length is not None:
        arguments += ["--context-length", str(inference.context_length)]
    gpus = visible_gpus()
    is_shared = bool(gpus) and inference.colocate is not None
    if is_shared and (share := CardShare.handed_over()) is not None:
        arguments += share.flags(is_sglang=is_sglang)
    place = first_gpu + index * inference.tensor_parallel
    if index >= inference.num_servers:  # it was added, and comes after those of frozen policies
        place += settings.num_inference_gpus - inference.num_gpus
    environment = _gpu_share(gpus, place, inference.tensor_parallel) | nccl_environment(inference)
    if is_sglang:
        environment |= IMAGES | OWN_PATH
        arguments += ["--incremental-streaming-output"]
        if inference.tensor_parallel > 1:
            arguments += ["--tp-size", str(inference.tensor_parallel)]
        if is_shared and inference.colocate == "release":
            arguments += [MEMORY_SAVER]
        environment |= UNEVEN_GPUS if is_shared else {}
        environment |= _fixed_segments() if MEMORY_SAVER in (*arguments, *inference.flags) else {}
        if not gpus:
            arguments += SGLANG_ON_CPU
            environment |= {"OMP_NUM_THREADS": str(inference.num_threads)}
            environment |= UNCOMPILED if COMPILED not in inference.flags else {}
    else:
        arguments += ["--device", "auto", "--num-threads", str(inference.num_threads)]
        environment |= one_heap()  # images are decoded in threads: with a heap for each it goes on growing
    admin_key = _value_of(SGLANG_KEY, inference.flags) if is_sglang else secrets.token_urlsafe(NUM_SECRET_BYTES)
    environment |= {VARIABLE: admin_key} if admin_key else {}
    return ServerCommand(server_id, (*arguments, *inference.flags), environment, admin_key, name)


def most_servers(settings: Settings, *, num_gpus_lent: int = 0) -> int:
    """Return how many servers of the policy under training this process has GPUs for; without any, a sane bound.

    GPUs that servers share with the trainer are all taken.

    Args:
        num_gpus_lent: GPUs that arms have.
    """
    gpus, inference = visible_gpus(), settings.inference
    if not gpus:
        return max(inference.num_servers, MAX_SERVERS_ON_CPU)
    if inference.colocate is not None:
        return inference.num_servers
    num_frozen = settings.num_inference_gpus - inference.num_gpus
    return max(inference.num_servers, (len(gpus) - num_frozen - num_gpus_lent) // inference.tensor_parallel)


def choose_backend(inference: InferenceSettings) -> Literal["sglang", "embedded"]:
    """Resolve ``auto``: SGLang where its interpreter is named or a GPU and SGLang are found."""
    if inference.backend != "auto":
        return inference.backend
    if inference.python is not None:
        return "sglang"
    has_sglang = importlib.util.find_spec("sglang") is not None
    return "sglang" if has_sglang and visible_gpus() else "embedded"


def check_tool_call_parser(inference: InferenceSettings) -> None:
    """Make sure that the servers have the parser that is asked for.

    Raises:
        UserError: the embedded engine has none.
    """
    name = inference.tool_call_parser
    if name is not None and choose_backend(inference) == "embedded":
        raise UserError(
            f"inference.tool_call_parser: got {name}, but the embedded engine has no parsers; leave it out, or take "
            "inference.backend=sglang"
        )


def nccl_environment(inference: InferenceSettings) -> dict[str, str]:
    """Return what trainer and servers both have in their environment, where weights are broadcast between them."""
    if inference.weight_transfer != "distributed":
        return {}
    return {NCCL_MEMORY: "1" if SYMMETRIC in inference.flags else os.environ.get(NCCL_MEMORY, "0")}


def draws_by_seed(inference: InferenceSettings) -> bool:
    """Say whether the servers go by the seed of a request: SGLang does so only where it is told to."""
    return choose_backend(inference) == "embedded" or DETERMINISTIC in inference.flags


def has_sha256(inference: InferenceSettings) -> bool:
    """Say whether the servers' checksums of their tensors are SHA-256: SGLang's on a GPU are not."""
    return choose_backend(inference) == "embedded" or not visible_gpus()


def _gpu_share(gpus: Sequence[str], first: int, num_gpus: int) -> dict[str, str]:
    """Give each server GPUs of its own, going round where there are fewer than needed."""
    if not gpus:
        return {}
    share = [gpus[(first + offset) % len(gpus)] for offset in range(min(num_gpus, len(gpus)))]
    return {"CUDA_VISIBLE_DEVICES": ",".join(share)}


def _fixed_segments() -> dict[str, str]:
    """Return what the environment says of torch's allocator, without segments that grow.

    Under those SGLang's memory saver refuses to load the model.
    """
    said = {name: os.environ[name].split(",") for name in ALLOCATOR if name in os.environ}
    return {name: ",".join(one for one in said[name] if "expandable_segments" not in one) for name in said}


def _value_of(name: str, flags: Sequence[str]) -> str:
    """Return what the last of the flags of this name has; empty where there is none."""
    values = [after for flag, after in pairwise(flags) if flag == name]
    values += [flag.removeprefix(f"{name}=") for flag in flags if flag.startswith(f"{name}=")]
    return values[-1] if values else ""


def _seed(seed: int, server_id: str) -> int:
    """Return a seed of the server's own: two that sampled alike would fill groups with twins."""
    return (seed * 1_000_003 + zlib.crc32(server_id.encode())) % 2**31
