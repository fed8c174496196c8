"""Supervised fine-tuning: the same engine and packing as a run, with the likelihood as its objective.

Each row becomes the tokens that a server would be given for its question, followed by the answer and the token
that ends a turn; only the latter two are learned. Which rows are held out and in which order the others come
follows from the seed alone, whatever the number of ranks.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from numpy.typing import NDArray

from areal_async.algorithms.likelihood import likelihood_loss
from areal_async.data import check_columns, load_rows
from areal_async.errors import UserError
from areal_async.hub import local_model
from areal_async.sft_settings import SftDatasetSettings, SftSettings
from areal_async.trainer.distributed import Ranks, joined_ranks
from areal_async.trainer.engine import FsdpEngine, StepStats
from areal_async.trainer.pack import balance
from areal_async.trainer.rows import TrainRow

RANK_DEADLINE_S = 1800.0
"""How long one rank waits for another: long enough for rank 0 to write a large model."""


def run_sft(settings: SftSettings) -> None:
    """Fine-tune as one rank of however many the environment names; rank 0 prints and writes the run directory.

    Raises:
        UserError: the model, the data set or a column is not there, or a row is too long.
    """
    with joined_ranks(deadline_s=RANK_DEADLINE_S, num_threads=settings.trainer.num_threads) as ranks:
        _fine_tune(settings, ranks)


def _fine_tune(settings: SftSettings, ranks: Ranks) -> None:
    rows = load_examples(settings)
    order = np.random.default_rng(settings.run.seed).permutation(len(rows))
    held_out, trained = order[: settings.eval.limit], order[settings.eval.limit :]
    if not len(trained):
        raise UserError(
            f"dataset: got {len(rows)} rows with eval.limit={settings.eval.limit}, need more; "
            "lower eval.limit or give more rows"
        )
    engine = FsdpEngine(model=settings.model, trainer=settings.trainer.engine, ranks=ranks, objective=likelihood_loss)
    size = settings.trainer.batch_sequences
    total_steps = settings.run.steps or max(1, round(settings.run.epochs * len(trained) / size))
    journal = _Journal(settings.run_directory, settings.run.log_every_steps, total_steps) if ranks.rank == 0 else None
    if journal:
        journal.start(settings)
    batches = endless_batches(trained, size=size, seed=settings.run.seed)
    for step in range(1, total_steps + 1):
        started = time.monotonic()
        mine = _share([rows[index] for index in next(batches)], engine)
        stats = engine.train_step(mine, step=step, total_steps=total_steps)
        if journal:
            journal.record(step, stats, time_step_s=time.monotonic() - started)
    loss = held_out_loss(engine, _share([rows[index] for index in held_out], engine))
    engine.save_weights(settings.run_directory / "model")
    if journal:
        journal.finish(loss, num_rows=len(held_out))


def load_examples(settings: SftSettings) -> list[TrainRow]:
    """Return every row of the data set as a sequence to learn."""
    # Imported here: it takes seconds.
    from transformers import AutoTokenizer

    folder = local_model(settings.model.path)
    rows = load_rows(settings.dataset)
    check_columns(rows, (settings.dataset.question, settings.dataset.answer), settings.dataset)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        raise UserError(f"model: the tokenizer of {settings.model.path} needs a chat template and an eos token")
    return encode_examples(tokenizer, rows, settings.dataset)


def encode_examples(tokenizer: Any, rows: Any, dataset: SftDatasetSettings) -> list[TrainRow]:
    """Return prompt, answer and end of turn as tokens, the prompt out of the loss."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}] if isinstance(question, str) else question,
            add_generation_prompt=True,
            tokenize=False,
        )
        for question in rows[dataset.question]
    ]
    # The template has already written whatever special tokens a prompt starts with.
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    # On its own, as a server continues a prompt: no token spans the border.
    answer_ids = tokenizer(list(rows[dataset.answer]), add_special_tokens=False)["input_ids"]
    return [
        _example(prompt, [*answer, tokenizer.eos_token_id])
        for prompt, answer in zip(prompt_ids, answer_ids, strict=True)
    ]


def endless_batches(rows: NDArray[np.int64], *, size: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield batches of ``size`` out of one shuffled epoch after another; a batch may span two."""
    shuffle = np.random.default_rng((seed, 1))
    waiting = rows[:0]
    while True:
        while len(waiting) < size:
            waiting = np.concatenate([waiting, shuffle.permutation(rows)])
        yield waiting[:size]
        waiting = waiting[size:]


def held_out_loss(engine: FsdpEngine, rows: Sequence[TrainRow]) -> float:
    """Return the mean negative log likelihood over all ranks' rows, 0 for none. A collective."""
    logprobs, ranks = engine.logprobs(rows), engine.grid.data
    sums = torch.tensor(
        [sum(float(row.sum()) for row in logprobs), sum(float(row.loss_mask.sum()) for row in rows)],
        dtype=torch.float64,
        device=ranks.device,
    )
    total, count = ranks.reduce(sums, dist.ReduceOp.SUM).tolist()
    return -total / count if count else 0.0


def _example(prompt: list[int], answer: list[int]) -> TrainRow:
    length = len(prompt) + len(answer)
    return TrainRow(
        token_ids=np.array(prompt + answer, dtype=np.int32),
        loss_mask=np.arange(length) >= len(prompt),
        behave_logprobs=np.zeros(length, dtype=np.float32),
        advantage=0.0,
        current_mask=np.zeros(length, dtype=np.bool_),
    )


def _share(rows: Sequence[TrainRow], engine: FsdpEngine) -> list[TrainRow]:
    costs = [engine.flops.forward(row.num_tokens, int(row.loss_mask.sum())) for row in rows]
    return [rows[place] for place in balance(costs, num_ranks=engine.grid.data.size)[engine.grid.data.rank]]


@dataclass(frozen=True, slots=True)
class _Journal:
    """The run directory's ``config.yaml`` and ``metrics.jsonl``, and the lines on the screen."""

    directory: Path
    every_steps: int
    total_steps: int

    def start(self, settings: SftSettings) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "config.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
        (self.directory / "metrics.jsonl").unlink(missing_ok=True)

    def record(self, step: int, stats: StepStats, *, time_step_s: float) -> None:
        self._append(
            step=step,
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            entropy_mean=stats.entropy_mean,
            lr=stats.lr,
            num_tokens=stats.num_tokens,
            num_skipped=stats.num_skipped,
            time_step_s=time_step_s,
        )
        if step % self.every_steps == 0 or step == self.total_steps:
            _say(
                f"step {step}/{self.total_steps}  loss {stats.loss:.4f}  grad norm {stats.grad_norm:.3f}  "
                f"lr {stats.lr:.2e}  {stats.num_tokens / time_step_s:,.0f} answer tokens/s"
            )

    def finish(self, loss: float, *, num_rows: int) -> None:
        if num_rows:
            self._append(step=self.total_steps, held_out_loss=loss, held_out_rows=num_rows)
            _say(f"held-out loss {loss:.4f} over {num_rows} rows")
        _say(f"model written to {self.directory / 'model'}")

    def _append(self, **fields: float) -> None:
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(fields) + "\n")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
