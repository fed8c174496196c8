"""What of a conversation is learned: everything that the assistant says, to the token that ends its turn."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from areal_async.errors import UserError
from areal_async.trainer.tuning.loop import Conversation, Examples


class Piece(NamedTuple):
    """A part of what a chat template writes, which is tokenized by itself: a server continues a prompt so."""

    text: str
    is_learned: bool


class LearnedTokens(NamedTuple):
    """One sequence. Both [L]."""

    token_ids: list[int]
    loss_mask: list[bool]


def pieces_of(examples: Examples, conversation: Conversation, answer: str | None, place: int) -> list[Piece]:
    """Part a row into what is given and what is learned.

    Args:
        answer: what the assistant says at the end; None where the conversation has all that it says.

    Raises:
        UserError: the assistant says nothing, or the template writes an earlier turn otherwise once there is a later.
    """
    if answer is not None:
        prompt = examples.write(conversation, place, for_reply=True)
        return [Piece(prompt, is_learned=False), Piece(answer + examples.tokenizer.eos_token, is_learned=True)]
    pieces = list(_turns(examples, conversation, place))
    if not pieces:
        raise UserError(
            f"{examples.where(place)}: got no message of the assistant, need one to learn; name the column of the "
            "answers, dataset.answer, or leave the row out"
        )
    return pieces


def _turns(examples: Examples, conversation: Conversation, place: int) -> Iterator[Piece]:
    told = ""
    for number, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        asked = examples.write(conversation[:number], place, for_reply=True)
        said = examples.write(conversation[: number + 1], place, for_reply=False)
        if not (asked.startswith(told) and said.startswith(asked)):
            raise UserError(
                f"{examples.where(place)}: the model's chat template writes what comes before message {number + 1} "
                "otherwise than it did; give the last answer alone, in a column of its own, dataset.answer"
            )
        yield Piece(asked[len(told) :], is_learned=False)
        yield Piece(said[len(asked) :], is_learned=True)
        told = said


def learned_tokens(examples: Examples, pieces: Sequence[Piece]) -> LearnedTokens:
    """Return the tokens of a row. What a template writes behind the end of a turn is not learned."""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    end = examples.tokenizer.eos_token_id
    for piece, ids in zip(pieces, examples.tokens([piece.text for piece in pieces]), strict=True):
        num_learned = len(ids) - ids[::-1].index(end) if end in ids else len(ids)
        token_ids += ids
        loss_mask += [piece.is_learned and number < num_learned for number in range(len(ids))]
    return LearnedTokens(token_ids, loss_mask)
