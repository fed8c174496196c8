"""A tiny model and a real server for the tests of the embedded engine."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from areal_async.inference.http import KEEP_ALIVE_S
from areal_async.process.host import free_port

PAD_ID, EOS_ID = 0, 1
FIRST_BYTE_ID = 2
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
"""What the tokenizer writes for each byte, by token id from ``FIRST_BYTE_ID`` on: ASCII's own for what ASCII prints."""
VOCAB_SIZE = 258
CONTEXT_LENGTH = 512
START_DEADLINE_S = 240.0
POLL_S = 0.05


def build_model(folder: Path, *, seed: int) -> Path:
    """Save a random Qwen3 (2 layers, 64 wide, tied embeddings) and a byte-level tokenizer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    vocab = {"<pad>": PAD_ID, "<eos>": EOS_ID} | {c: FIRST_BYTE_ID + i for i, c in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
    return folder


def reference_distribution(
    folder: Path, prompt: Sequence[int], output: Sequence[int], *, temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probabilities [len(output), vocabulary] that one plain forward pass gives each output position."""
    return torch.log_softmax(reference_logits(folder, prompt, output) / temperature, dim=-1)


def reference_logits(folder: Path, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """Return the logits [len(output), vocabulary] that one plain forward pass gives each output position."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    return logits


def reference_logprobs(
    folder: Path, prompt: Sequence[int], output: Sequence[int], *, temperature: float = 1.0
) -> list[float]:
    """Score ``output`` after ``prompt`` by one plain forward pass of the model in ``folder``."""
    logprobs = reference_distribution(folder, prompt, output, temperature=temperature)
    scores: list[float] = logprobs.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
    return scores


def command(model_path: Path, port: int, *flags: str) -> list[str]:
    """Return the command line of one engine."""
    base = [sys.executable, "-m", "areal_async.inference.embedded", "--model-path", str(model_path)]
    return [*base, "--port", str(port), "--weight-version", "0-0", "--dtype", "float32", "--num-threads", "1", *flags]


class Stream:
    """The events of one streamed answer, joined as a client would."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()
        self.events: list[dict[str, Any]] = []
        self.is_done = False

    def read(self, num_events: int | None = None) -> Stream:
        """Read that many events, or all that are left."""
        while not self.is_done and (num_events is None or num_events > 0):
            line = next(self._lines)
            if line == "data: [DONE]":
                self.is_done = True
            elif line:
                self.events.append(json.loads(line.removeprefix("data: ")))
                num_events = None if num_events is None else num_events - 1
        return self

    @property
    def output_ids(self) -> list[int]:
        return [token_id for event in self.events for token_id in event["output_ids"]]

    @property
    def logprobs(self) -> list[float]:
        return [entry[0] for event in self.events for entry in event["meta_info"]["output_token_logprobs"]]

    @property
    def text(self) -> str:
        return "".join(event["text"] for event in self.events)

    @property
    def meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = self.events[-1]["meta_info"]
        return meta


class Server:
    """One engine process and a client for it."""

    def __init__(self, model_path: Path, *flags: str) -> None:
        port = free_port()
        self.process = self.start(model_path, port, *flags)
        # Let go of before the server does, which may be just as a request is on its way.
        limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=100.0, limits=limits, trust_env=False)
        try:
            self._wait_until_up()
        except BaseException:
            self.close()
            raise

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._is_up():
            assert self.process.poll() is None, "the server ended while starting"
            assert time.monotonic() < deadline, "the server did not start in time"

    def start(self, model_path: Path, port: int, *flags: str) -> subprocess.Popen[bytes]:
        """Start the process; another kind of server does it otherwise."""
        return subprocess.Popen(command(model_path, port, *flags))

    def _is_up(self) -> bool:
        with suppress(httpx.TransportError):
            if self.http.get("/health").status_code == 200:
                return True
        # One that starts says 503 at once; asked without a pause it would have no core of two to start on.
        select.select([], [], [], POLL_S)
        return False

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait()

    def generate(self, prompt: Sequence[int], *, rid: str | None = None, **sampling: Any) -> dict[str, Any]:
        """Answer one prompt, unstreamed."""
        response = self.http.post("/generate", json=body(prompt, rid=rid, **sampling))
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    @contextmanager
    def stream(self, prompt: Sequence[int], *, rid: str | None = None, **sampling: Any) -> Iterator[Stream]:
        """Open one streamed answer; leaving early disconnects."""
        request = body(prompt, rid=rid, **sampling) | {"stream": True}
        with self.http.stream("POST", "/generate", json=request) as response:
            assert response.status_code == 200
            yield Stream(response)

    def post(self, route: str, **fields: Any) -> httpx.Response:
        return self.http.post(route, json=fields)

    def load(self) -> dict[str, Any]:
        load: dict[str, Any] = self.http.get("/v1/loads").json()["loads"][0]
        return load

    def wait_idle(self) -> None:
        """Wait until no request is left: only then can the cache be flushed."""
        deadline = time.monotonic() + START_DEADLINE_S
        while self.post("/flush_cache").status_code != 200:
            assert time.monotonic() < deadline, f"load is {self.load()}, expected no request"

    def wait_for_load(self, **expected: int) -> None:
        """Ask for the load until it is as expected."""
        deadline = time.monotonic() + START_DEADLINE_S
        while any(self.load()[name] != value for name, value in expected.items()):
            assert time.monotonic() < deadline, f"load is {self.load()}, expected {expected}"


@contextmanager
def restored(server: Server, model: Path) -> Iterator[None]:
    """Leave a server running, idle and with this model's weights whatever is done to it meanwhile."""
    yield
    server.post("/continue_generation")
    server.post("/abort_request", abort_all=True)
    server.wait_idle()
    answer = server.post("/update_weights_from_disk", model_path=str(model), weight_version="0-0")
    assert answer.json()["success"], answer.text


def body(prompt: Sequence[int], *, rid: str | None = None, **sampling: Any) -> dict[str, Any]:
    """Build a request for ids and logprobs."""
    sampling = {"temperature": 1.0, "ignore_eos": True, **sampling}
    return {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, "rid": rid}


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    """Return a fixed random prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_BYTE_ID, VOCAB_SIZE, (length,), generator=generator).tolist()
