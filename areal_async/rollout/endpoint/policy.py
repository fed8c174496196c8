"""The policy of a trajectory, with an address: ``policy.base_url`` and ``policy.api_key``.

What went wrong at the endpoint is the trajectory's, as if the workflow had called ``policy.chat`` itself
(``workflow_call``).
"""

from dataclasses import dataclass, field

from areal_async.config.settings import SamplingSettings
from areal_async.errors import RolloutError
from areal_async.inference.call_parser import EngineCallParser
from areal_async.rollout.endpoint.server import AgentEndpoint
from areal_async.rollout.endpoint.session import Session
from areal_async.rollout.policy.generation import Generator
from areal_async.rollout.policy.policy import PolicyRole, RecordingPolicy
from areal_async.rollout.policy.text import TextCodec


@dataclass(kw_only=True)
class PolicyMaker:
    """What the policies of all trajectories share."""

    generator: Generator
    codec: TextCodec
    endpoint: AgentEndpoint = field(default_factory=AgentEndpoint)
    """The maker of this enters it as well; it starts when a workflow asks for it."""
    call_parser: EngineCallParser | None = None
    """The servers' own parser of tool calls, where it is to be used."""

    def policy(self, sampling: SamplingSettings, name: str, max_sequence_tokens: int | None = None) -> "ServedPolicy":
        """Return a new trajectory's policy, whose answers end where a packed row of the trainer does."""
        policy = ServedPolicy(self, sampling, name=name)
        policy.record.max_sequence_tokens = max_sequence_tokens
        return policy


class ServedPolicy(RecordingPolicy):
    """One trajectory's ``contracts.Policy``, at a node that has an endpoint."""

    def __init__(
        self, maker: PolicyMaker, sampling: SamplingSettings, *, name: str, role: PolicyRole | None = None
    ) -> None:
        super().__init__(maker.generator, maker.codec, sampling, name=name, call_parser=maker.call_parser, role=role)
        self._maker = maker
        self._session: Session | None = None
        """While it is open: it knows this policy, and a circle would keep all that both hold for the collector."""
        self._base_url = self._api_key = ""
        self._failure: RolloutError | None = None
        """The session's last, once that is closed."""
        self._companions: list[ServedPolicy] = []

    @property
    def base_url(self) -> str:
        """Where this trajectory's agent finds the model."""
        self._open()
        return self._base_url

    @property
    def api_key(self) -> str:
        """The key of this trajectory, which ends with it."""
        self._open()
        return self._api_key

    @property
    def failures(self) -> list[RolloutError]:
        """What the agent's last request came to, where that is an error, for this policy and for each beside it."""
        own = self._failure if self._session is None else self._session.failure
        return ([] if own is None else [own]) + [failure for one in self._companions for failure in one.failures]

    def in_role(self, role: str, sampling: SamplingSettings) -> "ServedPolicy":
        """Return the same model under another name: in the same trajectory, with conversations of its own."""
        own = PolicyRole(name=role, trajectory=self._trajectory)
        return self._companion(self._maker, sampling, name=self._name, role=own)

    def beside(self, role: str, generator: Generator, codec: TextCodec, sampling: SamplingSettings) -> "ServedPolicy":
        """Return another model, which speaks to this trajectory's workflow and leaves no token in it."""
        own = PolicyRole(name=role, trajectory=self._trajectory, is_trained=False)
        maker = PolicyMaker(generator=generator, codec=codec, endpoint=self._maker.endpoint)
        return self._companion(maker, sampling, name=f"{self._name}.{role}", role=own)

    def close(self) -> None:
        """End what the workflow has left running, its agent's requests too."""
        super().close()
        for one in self._companions:
            one.close()
        if self._session is not None:
            self._maker.endpoint.close(self._session)
            self._failure, self._session = self._session.failure, None

    def _companion(
        self, maker: PolicyMaker, sampling: SamplingSettings, *, name: str, role: PolicyRole
    ) -> "ServedPolicy":
        companion = ServedPolicy(maker, sampling, name=name, role=role)
        self._companions.append(companion)
        return companion

    def _open(self) -> None:
        """Open the session, once.

        Raises:
            WorkflowError: the trajectory has ended without one.
        """
        if not self._base_url:
            self._recorder.check_open()
            endpoint = self._maker.endpoint
            session = Session(self, self._codec, limits=endpoint.limits, unsupported=endpoint.unsupported)
            self._base_url, self._api_key = endpoint.open(session), session.key
            self._session = session
