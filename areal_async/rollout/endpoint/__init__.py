"""The endpoint for black-box agents: programs that speak OpenAI's or Anthropic's API, recorded token for token.

Read in this order: ``calls`` (what a request asks for and what a reply says, whatever the API), ``reading`` (every
field of a request is accounted for), one module per API (``openai_chat``, ``openai_responses``,
``anthropic_messages``: pure translations; ``extras`` is what all three take beside their own fields), ``forms`` (the
grammar of what an answer may be), ``memory`` (a conversation that comes back is made of recorded replies), ``session``
(one trajectory's key and running requests), ``app`` and ``server`` (HTTP, one server per node, started when the first
workflow asks for ``policy.base_url``).
"""
