"""How others are served over OpenAI's and Anthropic's API: a node's agents, and whoever asks ``serve``."""

from typing import Literal, Self

from pydantic import Field, model_validator

from areal_async.config.section import LocalPath, OutputPath, Section


class EndpointSettings(Section):
    """The address at which a node's agents find the model, for programs that speak OpenAI's or Anthropic's API."""

    on_unsupported: Literal["refuse", "warn"] = "refuse"
    """A field of a request that cannot be heeded: ``refuse`` answers with an error that names it; ``warn`` leaves it
    out of account, says so in the node's log once for each field, and answers."""
    host: str | None = None
    """Address of the node's host at which it listens and which ``policy.base_url`` names, for agents in containers and
    on other hosts; whatever it is, each trajectory has a key of its own. ``None`` takes the loopback."""


class ServeSettings(Section):
    """The endpoint of ``serve``: where it listens, who may ask it, how much at once, and what it records."""

    host: str = "127.0.0.1"
    """Address at which it listens; ``0.0.0.0`` for all of the host's. Requests are plain HTTP."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port; 0 takes a free one."""
    directory: OutputPath | None = None
    """Where keys, records and exported models are; ``None`` takes ``served`` in the run's directory, or
    ``<run.directory>/served/<name>`` for a model without a run."""
    keys: LocalPath | None = None
    """File of mode 600 with one ``NAME KEY`` per line, read again when it changes; ``None`` takes ``keys`` in
    ``directory``, made with one key at the first start."""
    max_requests: int = Field(default=2048, ge=1)
    """Answers that are generated or wait at once; what comes beyond is told when to come again (status 429)."""
    request_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds a request may take from its head to the end of its answer, waiting included."""
    shutdown_deadline_s: float = Field(default=60.0, ge=0)
    """Seconds for the answers that have begun when it is told to end."""
    follow_s: float = Field(default=1.0, gt=0)
    """Seconds between two looks at which versions are meant."""
    replace: Literal["auto", "beside", "in_place"] = "auto"
    """How an arm changes its version. ``beside``: servers of the new one start beside the old ones, which end after
    their last answer: one fleet more than there are arms. ``in_place``: requests wait until all of the arm's answers
    have ended and its servers have loaded the new weights. ``auto`` takes ``beside`` unless there are GPUs, and too
    few."""
    record: Literal["tokens", "text", "nothing"] = "tokens"
    """What is kept of an answer: texts and tokens with their logprobs, texts alone, or nothing. Feedback is always."""
    record_file_bytes: int = Field(default=64 << 20, ge=1 << 10)
    """Size at which a file of records is followed by the next."""
    record_max_bytes: int = Field(default=1 << 30, ge=1 << 10)
    """Size of all files of answers, and of all of feedback; beyond it the oldest go."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.record_file_bytes > self.record_max_bytes:
            raise ValueError(
                f"record_file_bytes: got {self.record_file_bytes} with record_max_bytes={self.record_max_bytes}, need "
                "no more than that"
            )
        return self
