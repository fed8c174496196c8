"""How agents are served: ``policy.base_url`` and what it makes of what it cannot do."""

from typing import Literal

from areal_async.config.section import Section


class EndpointSettings(Section):
    """The address at which a node's agents find the model, for programs that speak OpenAI's or Anthropic's API."""

    on_unsupported: Literal["refuse", "warn"] = "refuse"
    """A field of a request that cannot be heeded: ``refuse`` answers with an error that names it; ``warn`` leaves it
    out of account, says so in the node's log once for each field, and answers."""
    host: str | None = None
    """Address of the node's host at which it listens and which ``policy.base_url`` names, for agents in containers and
    on other hosts; whatever it is, each trajectory has a key of its own. ``None`` takes the loopback."""
