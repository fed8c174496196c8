"""Supervised fine-tuning: the same engine and packing as a run, with the likelihood as its objective.

Each row becomes the tokens that a server would be given for its question, followed by the answer and the token
that ends a turn; only the latter two are learned. Of a whole conversation that is done for each of its answers.
"""

from collections.abc import Mapping, Sequence

from areal_async.algorithms.likelihood import likelihood_loss
from areal_async.config.sft import SftSettings
from areal_async.errors import UserError
from areal_async.process.hub import local_model
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.packing.rows import TrainRow, unsampled_row
from areal_async.trainer.tuning.answers import learned_tokens, pieces_of
from areal_async.trainer.tuning.loop import Examples, tune
from areal_async.trainer.tuning.seen import SeenExample, SeenExamples
from areal_async.vision.spec import VisionSpec

Example = TrainRow | SeenExample


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
        self._batch_size = settings.trainer.batch_sequences

    def rows(self, examples: Sequence[Example]) -> list[TrainRow]:
        """Return the rows, images taken in."""
        return [one.row() if isinstance(one, SeenExample) else one for one in examples]

    def cost(self, example: Example) -> int:
        """Return the floating-point operations of the row's forward pass."""
        return self.engine.flops.forward(example.num_tokens, int(example.loss_mask.sum()))

    def format_step(self, fields: Mapping[str, float]) -> str:
        """Return the line that is printed of a step."""
        return (
            f"loss {fields['loss']:.4f}  grad norm {fields['grad_norm']:.3f}  lr {fields['lr']:.2e}  "
            f"{fields['num_tokens'] / fields['time_step_s']:,.0f} answer tokens/s"
        )

    def held_out(self, examples: Sequence[Example]) -> tuple[Mapping[str, float], str]:
        """Return the mean negative log likelihood over all ranks' rows, 0 for none; a batch in memory at a time."""
        data, logprob = self.engine.dims.data, 0.0
        for start in range(0, int(data.largest(len(examples))), self._batch_size):
            rows = self.rows(examples[start : start + self._batch_size])
            logprob += sum(float(row.sum()) for row in self.engine.logprobs(rows))
        total, count = data.sums([logprob, float(sum(int(one.loss_mask.sum()) for one in examples))])
        loss = -total / count if count else 0.0
        return {"held_out_loss": loss}, f"loss {loss:.4f}"


def load_examples(settings: SftSettings) -> Sequence[Example]:
    """Return every row of the data set as a sequence to learn: prompt, answer and end of turn, the prompt unlearned.

    Raises:
        UserError: a column is not there, a cell holds no conversation or no answer, or shows what the model cannot see.
    """
    dataset = settings.dataset
    examples = Examples.load(settings, dataset.question, dataset.answer)
    if (place := examples.place_with_images(dataset.question)) is not None:
        vision = VisionSpec.read(local_model(settings.model.path))
        if vision is None:
            raise UserError(
                f"{examples.where(place)}: {dataset.question} shows an image, which the model {settings.model.path} "
                "cannot see, need text; leave such rows out, or take a model that sees (Qwen3-VL, Qwen2.5-VL)"
            )
        return SeenExamples(examples, dataset, vision)
    conversations = examples.conversations(dataset.question)
    if dataset.answer is None:
        written = [pieces_of(examples, one, None, place) for place, one in enumerate(conversations)]
        return [unsampled_row(*learned_tokens(examples, pieces)) for pieces in written]
    answers = examples.texts(dataset.answer)
    prompt_ids = examples.encode(conversations, for_reply=True)
    # On its own, as a server continues a prompt: no token spans the border.
    learned = [[*answer, examples.tokenizer.eos_token_id] for answer in examples.tokens(answers)]
    return [
        unsampled_row(prompt + answer, [False] * len(prompt) + [True] * len(answer))
        for prompt, answer in zip(prompt_ids, learned, strict=True)
    ]
