"""Everything this package raises, in two branches.

    ArealError
    ├── RolloutError            data: caught in one place, recorded on the trajectory, published
    │   ├── WorkflowError       the user's workflow raised, timed out or returned nonsense
    │   │   └── ContextFull     a conversation has no room left for an answer: an ordinary end, which it may catch
    │   ├── RewardError         a reward raised, timed out or is not a finite number
    │   ├── GenerationError     no server could finish a completion
    │   └── ToolError           a tool's call went wrong: told to the model, which may try again
    └── PipelineError           ends the process with a non-zero status, never swallowed
        ├── UserError           a mistake the user can mend: one sentence, no traceback
        │   ├── UnreachableError  the broker does not answer: it is down, or elsewhere
        │   └── UnansweredError  no process of the run answers a request: it is starting, gone, or too busy
        ├── BusError            the broker refused, or did not answer within its deadline
        │   ├── DeniedError     the broker denies this role a subject: its permissions are others than ours
        │   ├── StreamFullError the stream holds ``max_bytes``: wait, the message is not stored
        │   ├── ConflictError   a compare-and-set lost: the value is no longer the one that was read
        │   └── ConsumerGoneError  the consumer was deleted: for a trainer, a newer lineage has taken over
        ├── WireError           bytes that are not a message of ours, or that this run cannot train
        │   └── StoredImageError      an image is not stored, or is not what its name says
        ├── StalenessError      a token over the bound reached the loss: a broken promise
        └── FencedError         a newer lineage has taken over: this process must not write any more

``Reject`` is not an error: a workflow raises it to withdraw its sibling.
"""


class ArealError(Exception):
    """The base of everything raised here on purpose."""


class RolloutError(ArealError):
    """A rollout went wrong. It is data: recorded with its cause, then published like a success."""


class WorkflowError(RolloutError):
    """The workflow raised, ran past its deadline or returned something that is not a reward."""


class ContextFull(WorkflowError):
    """A prompt leaves no room for an answer, in the servers' context or in a row that can be trained.

    An ordinary end of a long conversation: catch it and return the reward of what was said until then, or let it pass,
    and the trajectory has failed. ``policy.act`` catches it once the model has said something.
    """

    def __init__(self, num_prompt_tokens: int, most: int, setting: str, *, num_characters: int = 0) -> None:
        """Take ``num_characters`` where they alone say that there are ``num_prompt_tokens`` at the least."""
        got = f"{num_characters} characters, at least {num_prompt_tokens}" if num_characters else f"{num_prompt_tokens}"
        super().__init__(
            f"prompt is too long: got {got} tokens, which leave no room for an answer in a maximum "
            f"context length of {most} tokens ({setting}); shorten it, raise that, or catch ContextFull and return a "
            "reward"
        )


class RewardError(RolloutError):
    """A reward function raised, ran past its deadline or returned no finite number."""


class GenerationError(RolloutError):
    """No inference server could start or finish a completion."""


class ToolError(RolloutError):
    """A call of a tool went wrong. ``policy.act`` tells the model; a tool may raise it to say so in its own words."""


class PipelineError(ArealError):
    """Something that no rollout can carry: it leaves the task group and ends the process."""


class UserError(PipelineError):
    """A mistake the user can mend. The command line prints its one sentence and exits with ``exit_code``."""

    exit_code = 2


class UnreachableError(UserError):
    """The broker does not answer at its address."""


class UnansweredError(UserError):
    """No process of the run answers a request. One that is started again may."""


class BusError(PipelineError):
    """The broker refused a request, or did not answer within its deadline."""


class DeniedError(BusError):
    """The broker denies this role a subject. No retry mends it."""


class StreamFullError(BusError):
    """The stream holds as much as it may. Nothing was stored; wait until some of it is gone and send again."""


class ConflictError(BusError):
    """A compare-and-set lost: another writer was faster. Read again and decide again."""


class ConsumerGoneError(BusError):
    """The consumer that was pulled from does not exist any more."""


class WireError(PipelineError):
    """Bytes that are no message of ours (wrong schema, length or checksum), or a trajectory that no step can train."""


class StoredImageError(WireError):
    """An image that is not stored, not whole, or not the one that its hash names. What looks at it cannot be used."""


class StalenessError(PipelineError):
    """A token older than ``max_staleness`` reached the loss."""


class FencedError(PipelineError):
    """A newer lineage exists; whatever this process would write now must not count."""


class Reject(Exception):
    """Withdraw this sibling: not a failure, not tried again, not trained."""


def leaves_of(error: BaseException) -> list[BaseException]:
    """Return the errors that task groups have wrapped, in their order; the error itself when it is no group."""
    leaves: list[BaseException] = []
    left = [error]  # no recursion: whoever nests them may be a user's code
    while left:
        one = left.pop()
        if isinstance(one, BaseExceptionGroup):
            left += reversed(one.exceptions)
        else:
            leaves.append(one)
    return leaves
