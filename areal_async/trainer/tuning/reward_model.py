"""Training of a reward model on pairs of answers, by Bradley and Terry's loss.

A conversation is rendered whole by the model's chat template and scored at its last token, as those who serve the model
do. The folder that comes out is a sequence classifier of one label: it serves as a reward in ``run``, and starts PPO's
critic.
"""

from collections.abc import Mapping, Sequence

from areal_async.algorithms.preference import bradley_terry_loss
from areal_async.config.reward_model import RewardModelSettings
from areal_async.errors import UserError
from areal_async.trainer.engine.pairs import Pair, PairEngine
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.tuning.loop import Conversation, Examples, tune


def run_reward_model(settings: RewardModelSettings) -> None:
    """Train to the end (``loop.tune``)."""
    tune(settings, load=load_pairs, make=RewardModelTask, batch_size=settings.trainer.batch_pairs)


class RewardModelTask:
    """The classifier that learns to tell pairs apart (``loop.TuningTask``)."""

    step_fields = ("loss", "accuracy", "margin_mean", "grad_norm", "lr", "num_pairs", "num_skipped")

    def __init__(self, settings: RewardModelSettings, ranks: Ranks) -> None:
        self.engine = PairEngine(model=settings.model, trainer=settings.trainer.engine, ranks=ranks)

    def rows(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        """Return the pairs."""
        return pairs

    def cost(self, pair: Pair) -> int:
        """Return the floating-point operations of the pair's forward pass."""
        return sum(self.engine.flops.forward(len(one), 1) for one in pair)

    def format_step(self, fields: Mapping[str, float]) -> str:
        """Return the line that is printed of a step."""
        return (
            f"loss {fields['loss']:.4f}  pairs right {fields['accuracy']:.3f}  grad norm {fields['grad_norm']:.3f}  "
            f"lr {fields['lr']:.2e}  {fields['num_pairs'] / fields['time_step_s']:,.0f} pairs/s"
        )

    def held_out(self, pairs: Sequence[Pair]) -> tuple[Mapping[str, float], str]:
        """Return the mean loss and the share of pairs told right over all ranks' pairs, 0 for none."""
        chosen_P, rejected_P = self.engine.scores(pairs).double().unbind(1)
        total = float(bradley_terry_loss(chosen_P, rejected_P)) * len(pairs) if pairs else 0.0
        sums = self.engine.dims.data.sums([total, float((chosen_P > rejected_P).sum()), float(len(pairs))])
        loss, accuracy = (one / max(1.0, sums[-1]) for one in sums[:-1])
        figures = {"held_out_loss": loss, "held_out_accuracy": accuracy}
        return figures, f"loss {loss:.4f}, pairs right {accuracy:.3f}"


def load_pairs(settings: RewardModelSettings) -> list[Pair]:
    """Return every row of the data set as a pair of conversations.

    Raises:
        UserError: a column is not there, a cell holds no conversation or no answer, or a pair is longer than a packed
            row.
    """
    dataset = settings.dataset
    examples = Examples.load(settings, dataset.question, dataset.chosen, dataset.rejected)
    for column in filter(None, (dataset.question, dataset.chosen, dataset.rejected)):
        if (place := examples.place_with_images(column)) is not None:
            raise UserError(
                f"{examples.where(place)}: {column} shows an image, which no reward model sees, need text; leave such "
                "rows out"
            )
    chosen, rejected = (
        examples.encode(_answered(examples, dataset.question, column), for_reply=False)
        for column in (dataset.chosen, dataset.rejected)
    )
    pairs = [Pair(*both) for both in zip(chosen, rejected, strict=True)]
    longest = max(range(len(pairs)), key=lambda place: pairs[place].num_tokens)
    if pairs[longest].num_tokens > settings.trainer.token_budget:
        raise UserError(
            f"dataset: got a pair of {pairs[longest].num_tokens} tokens in row {longest}, need at most "
            f"trainer.token_budget={settings.trainer.token_budget}; raise it, or leave the row out"
        )
    return pairs


def _answered(examples: Examples, question: str | None, column: str) -> list[Conversation]:
    """Return the conversations that the answers of a column end, or that it holds whole."""
    if question is None:
        return examples.conversations(column)
    return [
        [*asked, {"role": "assistant", "content": answer}]
        for asked, answer in zip(examples.conversations(question), examples.texts(column), strict=True)
    ]
