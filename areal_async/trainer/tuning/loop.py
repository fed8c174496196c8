"""Learning from a data set instead of from rollouts: which rows when, on which rank, and what is told of it.

Which rows are held out and in which order the others come follows from the seed alone, whatever the number of ranks.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import yaml
from jinja2 import TemplateError
from numpy.typing import NDArray

from areal_async.chat_template import take_template, write
from areal_async.config.tuning import TuningSettings
from areal_async.data.rows import check_columns, load_rows
from areal_async.errors import UserError
from areal_async.process.hub import local_model
from areal_async.process.stdio import say
from areal_async.trainer.engine.parallel.ranks import Ranks, joined_ranks
from areal_async.trainer.output.archive import json_line
from areal_async.trainer.packing.pack import balance
from areal_async.vision.parts import is_image

S = TypeVar("S", bound=TuningSettings)
E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)

RANK_DEADLINE_S = 1800.0
"""How long one rank waits for another: long enough for rank 0 to write a large model."""

Conversation = list[Mapping[str, Any]]
"""Messages, as a chat template takes them."""

Indices = NDArray[np.int64]
"""Positions of examples in the data set."""


class TuningTask(Protocol[E_contra]):
    """The model that learns, and what is told of it."""

    @property
    def step_fields(self) -> tuple[str, ...]:
        """Names of what an update did, as its line of ``metrics.jsonl`` has them."""
        ...

    @property
    def engine(self) -> Any:
        """The model's ``TrainedEngine``."""
        ...

    def rows(self, examples: Sequence[E_contra], /) -> Sequence[Any]:
        """Return examples of this rank as the engine takes them."""
        ...

    def cost(self, example: E_contra, /) -> int:
        """Return what this example costs to learn, in any unit."""
        ...

    def format_step(self, fields: Mapping[str, float]) -> str:
        """Return the line that is printed of a step."""
        ...

    def held_out(self, examples: Sequence[E_contra], /) -> tuple[Mapping[str, float], str]:
        """Return what every rank's examples, never learned, come to: the line of metrics, and what is printed.

        A collective.
        """
        ...


def split(num_examples: int, settings: TuningSettings) -> tuple[Indices, Indices]:
    """Return the indices of the examples to learn and of those held out, in an order of the seed.

    Raises:
        UserError: nothing is left to learn.
    """
    order = np.random.default_rng(settings.run.seed).permutation(num_examples)
    held_out, trained = order[: settings.eval.limit], order[settings.eval.limit :]
    if not len(trained):
        raise UserError(
            f"dataset: got {num_examples} rows with eval.limit={settings.eval.limit}, need more; "
            "lower eval.limit or give more rows"
        )
    return trained, held_out


def tune(
    settings: S, *, load: Callable[[S], Sequence[E]], make: Callable[[S, Ranks], TuningTask[E]], batch_size: int
) -> None:
    """Learn to the end as one rank of however many the environment names, and write the model.

    Rank 0 prints, and writes the run directory.

    Args:
        load: returns all examples.
        make: loads the model.

    Raises:
        UserError: the model, the data set or a column is not there, or an example is too long.
    """
    with joined_ranks(deadline_s=RANK_DEADLINE_S, num_threads=settings.trainer.num_threads) as ranks:
        examples = load(settings)
        trained, held_out = split(len(examples), settings)
        task = make(settings, ranks)

        def own(indices: Indices) -> list[E]:
            """Return this rank's share of some examples, which costs what the others' cost."""
            every, data = [examples[place] for place in indices], task.engine.dims.data
            return [every[place] for place in balance(list(map(task.cost, every)), num_ranks=data.size)[data.rank]]

        total_steps = settings.run.steps or max(1, round(settings.run.epochs * len(trained) / batch_size))
        directory, is_first = settings.run_directory, ranks.rank == 0
        if is_first:
            _begin(directory, settings)
        batches = endless_batches(trained, size=batch_size, seed=settings.run.seed)
        for step in range(1, total_steps + 1):
            started = time.monotonic()
            stats = task.engine.train_step(task.rows(own(next(batches))), step=step, total_steps=total_steps)
            if is_first:
                fields = {"step": step, **{name: getattr(stats, name) for name in task.step_fields}}
                fields["time_step_s"] = time.monotonic() - started
                _append(directory, fields)
                if step % settings.run.log_every_steps == 0 or step == total_steps:
                    say(f"step {step}/{total_steps}  {task.format_step(fields)}")
        figures, text = task.held_out(own(held_out))
        task.engine.export(directory)
        if is_first:
            if len(held_out):
                _append(directory, {"step": total_steps, **figures, "held_out_rows": len(held_out)})
                say(f"held-out {text} over {len(held_out)} rows")
            say(f"model written to {directory / 'model'}")


def endless_batches(rows: Indices, *, size: int, seed: int) -> Iterator[Indices]:
    """Yield batches of ``size`` out of one shuffled epoch after another; a batch may span two."""
    shuffle = np.random.default_rng((seed, 1))
    waiting = rows[:0]
    while True:
        while len(waiting) < size:
            waiting = np.concatenate([waiting, shuffle.permutation(rows)])
        yield waiting[:size]
        waiting = waiting[size:]


@dataclass(frozen=True, slots=True)
class Examples:
    """The rows of a data set, and the tokenizer of the model that learns them."""

    settings: TuningSettings
    rows: Any
    tokenizer: Any

    @classmethod
    def load(cls, settings: TuningSettings, *columns: str | None) -> Self:
        """Load rows that have these columns.

        Raises:
            UserError: the model, the data set or a column is not there, or the tokenizer does not do.
        """
        folder, rows = local_model(settings.model.path), load_rows(settings.dataset)
        check_columns(rows, tuple(column for column in columns if column is not None), settings.dataset)
        return cls(settings, rows, load_tokenizer(folder, settings))

    def conversations(self, column: str) -> list[Conversation]:
        """Return a column's conversations: a cell holds one, or the user's only message.

        Raises:
            UserError: a cell holds neither.
        """
        return [self.conversation(cell, place, column) for place, cell in enumerate(self.rows[column])]

    def conversation(self, cell: object, place: int, column: str) -> Conversation:
        """Return the conversation in a cell, or the user's only message.

        Raises:
            UserError: it holds neither.
        """
        if isinstance(cell, str):
            return [{"role": "user", "content": cell}]
        if isinstance(cell, Sequence) and len(cell) and all(map(_is_message, cell)):
            return list(cell)
        raise self._wrong_cell(cell, place, column, need="text or messages")

    def place_with_images(self, column: str) -> int | None:
        """Return the first row of which a conversation shows an image; None where none does. No row is kept."""
        cells = enumerate(self.rows[column])
        return next((place for place, cell in cells if not isinstance(cell, str) and _shows_images(cell)), None)

    def texts(self, column: str) -> list[str]:
        """Return a column's texts.

        Raises:
            UserError: a cell holds none.
        """
        return [self.text(cell, place, column) for place, cell in enumerate(self.rows[column])]

    def text(self, cell: object, place: int, column: str) -> str:
        """Return the text in a cell.

        Raises:
            UserError: it holds none.
        """
        if not isinstance(cell, str):
            raise self._wrong_cell(cell, place, column, need="text")
        return cell

    def encode(self, conversations: Sequence[Conversation], *, for_reply: bool) -> list[list[int]]:
        """Return the tokens of conversations as the template writes them; ``for_reply``: up to where it answers.

        Raises:
            UserError: the template refuses one.
        """
        return self.tokens([self.write(one, place, for_reply=for_reply) for place, one in enumerate(conversations)])

    def write(self, conversation: Conversation, place: int, *, for_reply: bool) -> str:
        """Return what the template writes of the conversation of a row.

        Raises:
            UserError: the template refuses it.
        """
        try:
            return write(self.tokenizer, conversation, self.settings.template.arguments, for_reply=for_reply)
        except TemplateError as exc:
            raise UserError(f"{self.where(place)}: the model's chat template refuses it: {exc}") from exc

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts; a template has already written whatever special tokens they have."""
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return ids

    def where(self, place: int) -> str:
        """Name a row, for an error."""
        return f"dataset: {self.settings.dataset.source} row {place}"

    def _wrong_cell(self, cell: object, place: int, column: str, *, need: str) -> UserError:
        got = "null" if cell is None else f"{type(cell).__name__} {cell!r:.60}"
        return UserError(f"{self.where(place)}: {column} is {got}, need {need}")


def load_tokenizer(folder: Path, settings: TuningSettings) -> Any:
    """Return the tokenizer of the model in ``folder``, with the chat template of the settings.

    Raises:
        UserError: it has no chat template, or one that does not do, or no token that ends a turn.
    """
    # Imported here: it takes seconds.
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    take_template(tokenizer, settings.template, setting="template")
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        raise UserError(f"model: the tokenizer of {settings.model.path} needs a chat template and an eos token")
    return tokenizer


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    return value.get("content") is not None or bool(value.get("tool_calls"))


def _shows_images(cell: object) -> bool:
    contents = [one.get("content") for one in cell if isinstance(one, Mapping)] if isinstance(cell, Sequence) else []
    return any(is_image(part) for content in contents if isinstance(content, list | tuple) for part in content)


def _begin(directory: Path, settings: TuningSettings) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
    (directory / "metrics.jsonl").unlink(missing_ok=True)


def _append(directory: Path, fields: Mapping[str, float]) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json_line(fields))
