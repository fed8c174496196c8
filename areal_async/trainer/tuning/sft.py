"""Supervised fine-tuning: the same engine and packing as a run, with the likelihood as its objective.

Each row becomes the tokens that a server would be given for its question, followed by the answer and the token
that ends a turn; only the latter two are learned.
"""

from collections.abc import Mapping, Sequence

from areal_async.algorithms.likelihood import likelihood_loss
from areal_async.config.sft import SftSettings
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.packing.rows import TrainRow, unsampled_row
from areal_async.trainer.tuning.loop import Examples, tune


def run_sft(settings: SftSettings) -> None:
    """Fine-tune to the end (``loop.tune``)."""
    tune(settings, load=load_examples, make=SftTask, batch_size=settings.trainer.batch_sequences)


class SftTask:
    """The policy that learns answers (``loop.TuningTask``)."""

    step_fields = ("loss", "grad_norm", "entropy_mean", "lr", "num_tokens", "num_skipped")

    def __init__(self, settings: SftSettings, ranks: Ranks) -> None:
        self.engine = FsdpEngine(
            model=settings.model, trainer=settings.trainer.engine, ranks=ranks, objective=likelihood_loss
        )

    def cost(self, row: TrainRow) -> int:
        """Return the floating-point operations of the row's forward pass."""
        return self.engine.flops.forward(row.num_tokens, int(row.loss_mask.sum()))

    def format_step(self, fields: Mapping[str, float]) -> str:
        """Return the line that is printed of a step."""
        return (
            f"loss {fields['loss']:.4f}  grad norm {fields['grad_norm']:.3f}  lr {fields['lr']:.2e}  "
            f"{fields['num_tokens'] / fields['time_step_s']:,.0f} answer tokens/s"
        )

    def held_out(self, rows: Sequence[TrainRow]) -> tuple[Mapping[str, float], str]:
        """Return the mean negative log likelihood over all ranks' rows, 0 for none."""
        logprob = sum(float(row.sum()) for row in self.engine.logprobs(rows))
        total, count = self.engine.dims.data.sums([logprob, float(sum(int(row.loss_mask.sum()) for row in rows))])
        loss = -total / count if count else 0.0
        return {"held_out_loss": loss}, f"loss {loss:.4f}"


def load_examples(settings: SftSettings) -> list[TrainRow]:
    """Return every row of the data set as a sequence to learn: prompt, answer and end of turn, the prompt unlearned.

    Raises:
        UserError: a column is not there, or a cell holds no conversation or no answer.
    """
    dataset = settings.dataset
    examples = Examples.load(settings, dataset.question, dataset.answer)
    tokenizer, prompts = examples.tokenizer, examples.conversations(dataset.question)
    answers = examples.texts(dataset.answer)
    prompt_ids = examples.encode(prompts, for_reply=True)
    # On its own, as a server continues a prompt: no token spans the border.
    answer_ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
    learned = [[*answer, tokenizer.eos_token_id] for answer in answer_ids]
    return [
        unsampled_row(prompt + answer, [False] * len(prompt) + [True] * len(answer))
        for prompt, answer in zip(prompt_ids, learned, strict=True)
    ]
