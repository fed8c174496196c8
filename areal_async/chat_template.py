"""Give a tokenizer the chat template of the settings, and find out at once that it does not do.

Jinja takes an argument that a template never reads without a word, so a misspelt one would be ignored for a whole run.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from areal_async.config.template import TemplateSettings
from areal_async.errors import UserError

TRIAL = ({"role": "user", "content": "one and one?"},)


def take_template(tokenizer: Any, template: TemplateSettings, *, setting: str) -> None:
    """Have a tokenizer write by the template of the settings.

    Args:
        setting: where ``template`` stands, as the user knows it.

    Raises:
        UserError: the file cannot be read or is no template, it cannot write a question, or it reads no argument of a
            name that is given.
    """
    if template.path is not None:
        try:
            tokenizer.chat_template = template.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise UserError(f"{setting}.path: cannot read {template.path}: {exc}; name a Jinja file") from exc
    if template == TemplateSettings():
        return
    what = f"{setting}.path: {template.path}" if template.path is not None else f"{setting}: the tokenizer's own"
    from jinja2 import TemplateError  # here: whoever only reads settings does not need it

    try:
        write(tokenizer, TRIAL, template.arguments)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as exc:
        raise UserError(f"{what} cannot write a question: {type(exc).__name__}: {exc}; mend the template") from exc
    text = text_of(tokenizer)
    unread = [name for name in template.arguments if not re.search(rf"\b{re.escape(name)}\b", text)]
    if unread:
        raise UserError(
            f"{setting}.arguments: got {unread[0]!r}, which stands nowhere in the chat template, need a name that it "
            "reads; leave it out"
        )


def text_of(tokenizer: Any) -> str:
    """Return the template of a tokenizer, or all that it has, one after the other; empty where it has none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(template.values())


def write(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    for_reply: bool = True,
) -> str:
    """Write a conversation, up to where the model answers or, not ``for_reply``, to the end of the last message."""
    text: str = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, add_generation_prompt=for_reply, tokenize=False, **arguments
    )
    return text
