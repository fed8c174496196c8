"""The section about a model's chat template."""

from typing import Any

from pydantic import field_validator

from areal_async.config.section import LocalPath, Section

OURS = (
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
"""What is never a template's own argument."""


class TemplateSettings(Section):
    """How conversations are written for a model."""

    path: LocalPath | None = None
    """Jinja file that is used instead of the chat template of the model's tokenizer; ``None`` takes that one."""
    arguments: dict[str, Any] = {}
    """Given to the template by their names wherever it writes, as ``{enable_thinking: false}``."""

    @field_validator("arguments")
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        taken = [name for name in arguments if name in OURS]
        if taken:
            raise ValueError(f"got {taken[0]!r}, which is not the template's own to be told; leave it out")
        return arguments
