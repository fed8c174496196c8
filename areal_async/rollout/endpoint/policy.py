"""The policy of a trajectory, with an address: ``policy.base_url`` and ``policy.api_key``.

What went wrong at the endpoint is the trajectory's, as if the workflow had called ``policy.chat`` itself: an agent that
was denied an answer, and had none since, has not been itself, and its trajectory fails with the cause.
"""

from areal_async.contracts import Policy, Rewards, Workflow
from areal_async.errors import RolloutError, WorkflowError
from areal_async.rollout.boundary import attributed_to
from areal_async.rollout.endpoint.server import Endpoint
from areal_async.rollout.endpoint.session import Session
from areal_async.rollout.policy import Generator, RecordingPolicy
from areal_async.rollout.text import TextCodec
from areal_async.settings import SamplingSettings
from areal_async.types import Prompt


class ServedPolicy(RecordingPolicy):
    """One trajectory's ``contracts.Policy``, at a node that has an endpoint."""

    def __init__(
        self, generator: Generator, codec: TextCodec, sampling: SamplingSettings, *, name: str, endpoint: Endpoint
    ) -> None:
        super().__init__(generator, codec, sampling, name=name)
        self._endpoint = endpoint
        self._session: Session | None = None
        self._base_url = ""

    @property
    def base_url(self) -> str:
        """Where this trajectory's agent finds the model."""
        self._opened()
        return self._base_url

    @property
    def api_key(self) -> str:
        """The key of this trajectory, which ends with it."""
        return self._opened().key

    @property
    def failure(self) -> RolloutError | None:
        """What the agent's last request came to, where that is an error."""
        return self._session.failure if self._session else None

    def close(self) -> None:
        """End what the workflow has left running, its agent's requests too."""
        super().close()
        if self._session is not None:
            self._endpoint.close(self._session)

    def _opened(self) -> Session:
        if self._session is None:
            self._session = Session(self, self._codec, max_new_tokens=self._sampling.max_new_tokens)
            self._base_url = self._endpoint.open(self._session)
        return self._session


def heeding(workflow: Workflow, policy: ServedPolicy, *, name: str) -> Workflow:
    """Return the workflow, failing with what its agent's last request failed with."""

    async def run(prompt: Prompt, given: Policy) -> Rewards:
        try:
            with attributed_to(WorkflowError, f"workflow {name}"):
                rewards = await workflow(prompt, given)
        except RolloutError as exc:
            if policy.failure is not None:
                raise policy.failure from exc
            raise
        if policy.failure is not None:
            raise policy.failure
        return rewards

    return run
