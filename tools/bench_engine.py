"""Measure the embedded engine against Hugging Face ``generate`` with a static batch.

Same model, batch, lengths and threads; the three contenders take turns, and medians are printed, so that a busy machine
slows them alike. ``generate`` gets equal prompts and a fixed length, the best case for a static batch.

Run: ``python tools/bench_engine.py`` (``--help`` for sizes; without ``--model`` a random tiny Qwen3 is built).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import httpx_aiohttp
import torch
import uvloop
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from areal_async.inference.embedded.engine.options import EngineOptions
from areal_async.inference.embedded.engine.protocol import SamplingParams
from areal_async.inference.embedded.engine.runner import load_runner
from areal_async.inference.embedded.engine.scheduler import Scheduler
from areal_async.inference.embedded.engine.sequence import Piece, RunningSequence
from areal_async.process.host import free_port

_START_DEADLINE_S = 120.0


def main() -> None:
    """Run the rounds and print the medians."""
    args = _parse()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or _build_model(Path(folder))
        rng = random.Random(0)
        prompts = [[rng.randrange(3, 300) for _ in range(args.prompt_tokens)] for _ in range(args.batch)]
        server, url = _start_server(path, args)
        try:
            contenders: dict[str, Callable[[], None]] = {
                "generate": _generate_contender(path, prompts, args),
                "in process": _in_process_contender(path, prompts, args),
                "http": lambda: uvloop.run(_stream_all(url, prompts, args.new_tokens)),
            }
            rates = _race(contenders, args.rounds, num_tokens=args.batch * args.new_tokens)
        finally:
            server.terminate()
            server.wait()
    base = rates["generate"]
    for name, rate in rates.items():
        print(f"{name:<12} {rate:>10,.0f} tok/s   {rate / base:.2f} of generate")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; default: a random Qwen3 of 4 layers, 192 wide")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def _race(contenders: dict[str, Callable[[], None]], rounds: int, *, num_tokens: int) -> dict[str, float]:
    for run in contenders.values():
        run()
    times_s: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times_s[name].append(time.perf_counter() - start)
    return {name: num_tokens / statistics.median(values) for name, values in times_s.items()}


def _build_model(folder: Path) -> str:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=400,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def _generate_contender(path: str, prompts: list[list[int]], args: argparse.Namespace) -> Callable[[], None]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    input_ids = torch.tensor(prompts, device=args.device)

    def run() -> None:
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=args.new_tokens,
            max_new_tokens=args.new_tokens,
        )
        assert output.shape[1] == args.prompt_tokens + args.new_tokens

    return run


def _in_process_contender(path: str, prompts: list[list[int]], args: argparse.Namespace) -> Callable[[], None]:
    options = EngineOptions(model_path=path, device=args.device, dtype=args.dtype, num_threads=args.threads)
    runner = load_runner(options, Path(path))
    scheduler = Scheduler(runner, options)

    def ignore(sequence: RunningSequence, piece: Piece) -> None:
        pass

    def run() -> None:
        for index, prompt in enumerate(prompts):
            scheduler.submit(
                RunningSequence(
                    rid=str(index),
                    prompt_ids=tuple(prompt),
                    params=SamplingParams(ignore_eos=True),
                    max_new_tokens=args.new_tokens,
                    stop_token_ids=frozenset(),
                    stop_strings=None,
                    seed=index,
                    stream_interval=args.stream_interval,
                    emit=ignore,
                )
            )
        num_tokens = 0
        with torch.inference_mode():
            while scheduler.has_work:
                scheduler.step()
                num_tokens += sum(len(piece.token_ids) for _, piece in scheduler.take_emissions())
        assert num_tokens == args.batch * args.new_tokens

    return run


def _start_server(path: str, args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    command = [sys.executable, "-m", "areal_async.inference.embedded", "--model-path", path, "--port", str(port)]
    command += ["--num-threads", str(args.threads), "--stream-interval", str(args.stream_interval)]
    command += ["--device", args.device, "--dtype", args.dtype]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + _START_DEADLINE_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/health", trust_env=False)
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return server, url
    server.kill()
    raise SystemExit("the server did not start; see its message above")


async def _stream_all(url: str, prompts: list[list[int]], new_tokens: int) -> None:
    limits = httpx.Limits(max_connections=None)
    transport = httpx_aiohttp.AiohttpTransport(limits=limits)
    async with httpx.AsyncClient(base_url=url, transport=transport, timeout=_START_DEADLINE_S) as client:
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(_stream_one(client, prompt, new_tokens))


async def _stream_one(client: httpx.AsyncClient, prompt: list[int], new_tokens: int) -> None:
    sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "stream": True}
    received = bytearray()
    async with client.stream("POST", "/generate", json=body) as response:
        async for chunk in response.aiter_raw():
            received += chunk
    assert received.endswith(b"data: [DONE]\n\n")
    assert f'"length":{new_tokens}'.encode() in received


if __name__ == "__main__":
    main()
