"""Measure the embedded engine against Hugging Face ``generate`` with a static batch.

Same model, requests and threads. The three contenders take turns and each round gives one ratio, so that a busy machine
slows them alike; the medians of the ratios are printed. Two mixes: ``equal`` has one batch of different prompts, all of
one length and answered at one length, the best case for a static batch; ``rl`` has groups of siblings with one prompt
and answers of log-normal lengths, as many in flight as the batch is large, the next as soon as one is done. A static
batch decodes until its longest answer is done; only the tokens that were asked for count.

Run: ``python tools/bench_engine.py`` (``--help`` for sizes; without ``--model`` a random tiny Qwen3 is built).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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


class Request(NamedTuple):
    """One prompt and how many tokens are to follow it."""

    prompt: list[int]
    new_tokens: int


def main() -> None:
    """Run the rounds and print the medians."""
    args = _parse()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or _build_model(Path(folder), args)
        requests = _requests(args)
        server, url = _start_server(path, args)
        try:
            contenders: dict[str, Callable[[], None]] = {
                "generate": _generate_contender(path, requests, args),
                "in process": _in_process_contender(path, requests, args),
                "http": lambda: uvloop.run(_stream_all(url, requests, args.batch)),
            }
            times_s = _race(contenders, args.rounds)
        finally:
            server.terminate()
            server.wait()
    num_tokens = sum(request.new_tokens for request in requests)
    print(f"{len(requests)} requests, {num_tokens:,} tokens, {args.threads} threads, load {os.getloadavg()[0]:.1f}")
    for name, values in times_s.items():
        ratios = sorted(base / value for base, value in zip(times_s["generate"], values, strict=True))
        rate = num_tokens / statistics.median(values)
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"{name:<12} {rate:>10,.0f} tok/s   {statistics.median(ratios):.2f} of generate ({spread})")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; default: a random Qwen3 of 4 layers, 192 wide")
    parser.add_argument("--mix", choices=["equal", "rl"], default="equal")
    parser.add_argument("--hidden", type=int, default=192, help="width of the random model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the random model")
    parser.add_argument("--requests", type=int, default=192, help="of the mix rl")
    parser.add_argument("--siblings", type=int, default=8, help="requests with one prompt in the mix rl")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stream-interval", type=int, default=8, help="tokens per event")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def _requests(args: argparse.Namespace) -> list[Request]:
    rng = random.Random(0)

    def prompt() -> list[int]:
        return [rng.randrange(3, 300) for _ in range(args.prompt_tokens)]

    if args.mix == "equal":
        return [Request(prompt(), args.new_tokens) for _ in range(args.batch)]
    prompts = [prompt() for _ in range(-(-args.requests // args.siblings))]
    median = args.new_tokens / 4
    lengths = [min(args.new_tokens, max(1, round(rng.lognormvariate(0.0, 1.0) * median))) for _ in range(args.requests)]
    return [Request(prompts[index // args.siblings], length) for index, length in enumerate(lengths)]


def _race(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    for run in contenders.values():
        run()
    times_s: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times_s[name].append(time.perf_counter() - start)
    return times_s


def _build_model(folder: Path, args: argparse.Namespace) -> str:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=400,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 96,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def _generate_contender(path: str, requests: list[Request], args: argparse.Namespace) -> Callable[[], None]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).to(args.device).eval()

    def run() -> None:
        for start in range(0, len(requests), args.batch):
            batch = requests[start : start + args.batch]
            input_ids = torch.tensor([request.prompt for request in batch], device=args.device)
            new_tokens = max(request.new_tokens for request in batch)
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
            assert output.shape[1] == args.prompt_tokens + new_tokens

    return run


def _in_process_contender(path: str, requests: list[Request], args: argparse.Namespace) -> Callable[[], None]:
    options = EngineOptions(
        model_path=path,
        device=args.device,
        dtype=args.dtype,
        num_threads=args.threads,
        max_running_requests=args.batch,
    )
    runner = load_runner(options, Path(path))
    scheduler = Scheduler(runner, options)

    def ignore(sequence: RunningSequence, piece: Piece) -> None:
        pass

    def run() -> None:
        for index, request in enumerate(requests):
            scheduler.submit(
                RunningSequence(
                    rid=str(index),
                    prompt_ids=tuple(request.prompt),
                    params=SamplingParams(ignore_eos=True),
                    max_new_tokens=request.new_tokens,
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
        assert num_tokens == sum(request.new_tokens for request in requests)

    return run


def _start_server(path: str, args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    command = [sys.executable, "-m", "areal_async.inference.embedded", "--model-path", path, "--port", str(port)]
    command += ["--num-threads", str(args.threads), "--stream-interval", str(args.stream_interval)]
    command += ["--device", args.device, "--dtype", args.dtype, "--max-running-requests", str(args.batch)]
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


async def _stream_all(url: str, requests: list[Request], batch: int) -> None:
    limits = httpx.Limits(max_connections=None)
    transport = httpx_aiohttp.AiohttpTransport(limits=limits)
    todo = iter(requests)

    async def work() -> None:
        for request in todo:
            await _stream_one(client, request)

    async with httpx.AsyncClient(base_url=url, transport=transport, timeout=_START_DEADLINE_S) as client:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(batch):
                tasks.create_task(work())


async def _stream_one(client: httpx.AsyncClient, request: Request) -> None:
    sampling = {"max_new_tokens": request.new_tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": request.prompt, "sampling_params": sampling, "return_logprob": True, "stream": True}
    received = bytearray()
    async with client.stream("POST", "/generate", json=body) as response:
        async for chunk in response.aiter_raw():
            received += chunk
    assert received.endswith(b"data: [DONE]\n\n")
    assert f'"length":{request.new_tokens}'.encode() in received


if __name__ == "__main__":
    main()
