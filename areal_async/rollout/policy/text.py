"""Between text and tokens: the model's tokenizer, its chat template, and the tokens that end a turn."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from areal_async.api import Message
from areal_async.chat_template import take_template, text_of, write
from areal_async.config.template import TemplateSettings
from areal_async.errors import ContextFull, UserError, WorkflowError
from areal_async.inference.embedded.engine.text import decoder_of
from areal_async.inference.model_files import ModelText, read_files
from areal_async.process.gc_pauses import importing
from areal_async.process.hub import local_model
from areal_async.rollout.policy.images import ImageIntake, texts_in
from areal_async.rollout.policy.messages import assistant_message, for_template, function_call
from areal_async.rollout.tools.parse import OPENINGS, ToolFormat, guess_format, is_in_thought
from areal_async.rollout.user_code.boundary import attributed_to, shown
from areal_async.vision.images import Image
from areal_async.vision.rows import expand
from areal_async.vision.spec import FAMILIES, VisionSpec

USUAL_TEMPLATE = TemplateSettings()
USUAL_ROLES = {"system", "user", "assistant", "tool"}
"""Every template is expected to know them; one that leaves such a message out is found out."""
_MARK = "areal0mark0"
ENCODE_CACHE_TEXTS, ENCODE_CACHE_LONG_TEXTS = 1024, 8
"""All siblings of a group begin with the same prompt; tokenizing it once is most of a node's tokenizing saved."""
RENDER_CACHE_TEXTS = 64
"""Beginnings, for as many groups: siblings ask for theirs at one time."""
_CHANGING = re.compile(r"strftime_now|random|lipsum")
"""What makes a template write one conversation otherwise the next time."""
LONG_TEXT_CHARACTERS = 1 << 16
"""A tokenizer takes some ten milliseconds for so many; a longer text is tokenized beside the loop, and few are kept."""
CHARACTERS_PER_TOKEN = 16
"""More than any text has on average: prose has four or five, source code indented deeply eight."""
_PLAIN = {str, int, float, bool, type(None)}


class ContextRoom(NamedTuple):
    """What a prompt has to fit into."""

    num_tokens: int
    setting: str
    """Says so, for a user."""

    def check_length(self, text: str) -> None:
        """Refuse a text before it is tokenized: no tokenizer could fit it in.

        Raises:
            ContextFull: it has too many characters.
        """
        at_least = len(text) // CHARACTERS_PER_TOKEN
        if at_least >= self.num_tokens:
            raise ContextFull(at_least, self.num_tokens, self.setting, num_characters=len(text))


class TextCodec:
    """A Hugging Face tokenizer, as a policy needs it."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int],
        vocab_size: int,
        template_arguments: Mapping[str, Any] | None = None,
        vision: VisionSpec | None = None,
    ) -> None:
        """Take as ``vision`` how the model sees; ``None`` for one that reads text alone."""
        self._tokenizer = tokenizer
        self._decoder = decoder_of(tokenizer)
        self.vision = vision
        self.model = str(getattr(tokenizer, "name_or_path", "") or "policy")
        """Folder or hub name of the model."""
        self._template = text_of(tokenizer)
        self._writes_alike = _CHANGING.search(self._template) is None
        self._template_arguments = template_arguments or {}
        self._written_roles = {"user", "assistant"}
        self.tool_format: ToolFormat = guess_format(self._template)
        """How the model writes calls."""
        self.vocab_size = vocab_size
        """Number of tokens that the model knows, which may be more than its tokenizer uses, or fewer."""
        self._encode_once = lru_cache(maxsize=ENCODE_CACHE_TEXTS)(self._encode)
        self._render_once = lru_cache(maxsize=RENDER_CACHE_TEXTS)(self._render_packed)
        self._encode_long_once = lru_cache(maxsize=ENCODE_CACHE_LONG_TEXTS)(self._encode)
        self.stop_token_ids = list(stop_token_ids)
        self.turn_ends = [text for one in stop_token_ids if (text := self.decode([one], skip_special_tokens=False))]
        """What the end of a turn is written as."""
        self.usual_closing = ""
        """What the template was last found to write behind a message of the model's, from the end of turn on."""
        self.images = ImageIntake(vision, model=self.model)
        """Takes in the images of messages."""
        self._placeholder = "" if vision is None else self.decode([vision.image_token_id], skip_special_tokens=False)

    @cached_property
    def begins_thought(self) -> bool:
        """Whether the template has the model begin with a thought.

        Raises:
            WorkflowError: as ``render``.
        """
        return is_in_thought(self.render([{"role": "user", "content": "?"}]))

    @cached_property
    def shows_tags(self) -> bool:
        """Whether the mark of a call is in the text that tokens are decoded to."""
        mark = OPENINGS.get(self.tool_format, ("",))[0]
        return self.decode(self.encode(mark)) == mark

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """Whether the template writes arguments of calls only where they are JSON's text: DeepSeek's joins them."""
        trial: list[Message] = [
            {"role": "user", "content": "?"},
            assistant_message("", [function_call("call00001", "f", "{}")]),
            {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": ""},
        ]
        try:
            self._write(trial, as_text=False)
        except WorkflowError:
            with suppress(WorkflowError):
                self._write(trial, as_text=True)
                return True
        return False

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, for_reply: bool = True
    ) -> str:
        """Write a conversation with the model's chat template, up to where the model answers.

        Args:
            tools: their schemas, as OpenAI writes them.
            for_reply: ``False`` stops after the last message instead.

        Raises:
            WorkflowError: the template refuses it, or cannot write it.
        """
        if not self._template:
            raise WorkflowError(
                "chat template: the model's tokenizer has none; name a Jinja file, rollout.template.path, or ask with "
                "policy.complete"
            )
        as_text = any(message.get("tool_calls") for message in messages) and self._takes_text_arguments
        return self._write(messages, tools, for_reply=for_reply, as_text=as_text)

    def render_beginning(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """As ``render``, up to where the model answers: once for all siblings, whose conversations begin alike.

        Raises:
            WorkflowError: as ``render``.
        """
        conversation = [list(messages), list(tools)]
        if self._writes_alike and _is_plain(conversation):
            with suppress(ValueError, OverflowError):  # half a pair of surrogates, a number of more than 64 bits
                said = msgspec.msgpack.encode(conversation)
                if len(said) <= LONG_TEXT_CHARACTERS:
                    return self._render_once(said)
        return self.render(*conversation)

    def _render_packed(self, said: bytes) -> str:
        return self.render(*msgspec.msgpack.decode(said))

    def _write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        for_reply: bool = True,
        as_text: bool,
    ) -> str:
        with attributed_to(WorkflowError, "chat template"):
            return write(
                self._tokenizer,
                [for_template(message, has_text_arguments=as_text) for message in messages],
                self._template_arguments,
                tools=[dict(tool) for tool in tools],
                for_reply=for_reply,
            )

    def check_roles(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Refuse a role that the model's chat template does not write: it would leave the message out, or make one up.

        Raises:
            WorkflowError: there is one.
        """
        for index, message in enumerate(messages):
            role = message["role"]
            if role in self._written_roles:
                continue
            marked = [*messages[:index], {**message, "content": _MARK}, *messages[index + 1 :]]
            is_named = role in USUAL_ROLES or f"'{role}'" in self._template or f'"{role}"' in self._template
            if not is_named or _MARK not in self.render(marked, tools):
                known = sorted(self._written_roles | (USUAL_ROLES - {role}))
                raise WorkflowError(
                    f"messages: got the role {role!r:.50}, which the model's chat template does not write, need one of "
                    f"{', '.join(known)}"
                )
            self._written_roles.add(role)

    def check_placeholders(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Refuse text that would be read as an image which is not there.

        Raises:
            WorkflowError: a text has the model's placeholder of an image in it.
        """
        if not self._placeholder:
            return
        for number, one in enumerate((*messages, *tools), start=1):
            if any(self._placeholder in text for text in texts_in(one)):
                where = f"messages: got the text {self._placeholder} in place {number}"
                if number > len(messages):
                    where = f"tools: got the text {self._placeholder} in the description of one"
                raise WorkflowError(
                    f"{where}, which stands for an image, need images as parts of their own, "
                    '{"type": "image", "image": ...}; take it out of the text'
                )

    def expand(self, token_ids: list[int], images: Sequence[Image]) -> list[int]:
        """Return what the chat template has written, each image with as many placeholders as it has tokens.

        Raises:
            WorkflowError: the template has written more or fewer images than there are.
        """
        if self.vision is None or (not images and self.vision.image_token_id not in token_ids):
            return token_ids
        grids = [self.vision.grid_of(image.width, image.height) for image in images]
        with attributed_to(WorkflowError, "chat template"):
            num_written = token_ids.count(self.vision.image_token_id)
            if num_written != len(images):
                raise WorkflowError(
                    f"chat template: wrote {num_written} placeholders for {len(images)} images, need one for each; "
                    "name a template that shows the images of every role, rollout.template.path"
                )
            return expand(token_ids, grids, self.vision)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokenize; a rendered conversation holds its special tokens already.

        Raises:
            WorkflowError: it has half of a surrogate pair, which no tokenizer takes.
        """
        encode_once = self._encode_once if len(text) <= LONG_TEXT_CHARACTERS else self._encode_long_once
        return list(encode_once(text, add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text."""
        text: str = self._decoder.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_reply(self, output_ids: list[int]) -> str:
        """Return what the model wrote, special tokens too, without the one that ends its turn."""
        return self.decode(output_ids[:-1] if self.ends_turn(output_ids) else output_ids, skip_special_tokens=False)

    def ends_turn(self, output_ids: list[int]) -> bool:
        """Say whether the model has said the end of its turn."""
        return bool(output_ids) and output_ids[-1] in self.stop_token_ids

    def is_end_of_turn(self, text: str) -> bool:
        """Say whether a text is one end of a turn, and what the template may write behind that."""
        return text.startswith(tuple(self.turn_ends)) and sum(map(text.count, self.turn_ends)) == 1

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise WorkflowError(
                f"prompt: got {text[exc.start]!r}, which is half a character, after "
                f"{shown(text[max(0, exc.start - 20) : exc.start])}, need text that UTF-8 can hold; put "
                'text.encode(errors="replace").decode() where it comes from'
            ) from exc
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))


def load_codec(
    model_path: str,
    template: TemplateSettings = USUAL_TEMPLATE,
    *,
    setting: str = "model.path",
    template_setting: str = "rollout.template",
) -> TextCodec:
    """Load the tokenizer of a model that ``setting`` names. Takes a second or more: the library that reads it is large.

    Raises:
        UserError: there is none, or it has no end token to stop at, or no model it is for, or ``template`` does not do.
    """
    model = f"{setting} {model_path}"
    with importing(), attributed_to(UserError, f"{model}: cannot load its tokenizer"):
        found = read_files(model_path)
    vision = None
    if found is None:
        found, vision = _read_by_library(model_path, model)
    take_template(found.tokenizer, template, setting=template_setting)
    if not found.end_ids:
        raise UserError(f"{model}: names no end-of-turn token; set eos_token_id in its configuration")
    return TextCodec(
        found.tokenizer,
        stop_token_ids=sorted(found.end_ids),
        vocab_size=found.vocab_size,
        template_arguments=template.arguments,
        vision=vision,
    )


def _read_by_library(model_path: str, model: str) -> tuple[ModelText, VisionSpec | None]:
    """Return what transformers makes of a model's files, and how the model sees; ``model`` names it in errors."""
    with importing():
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    with attributed_to(UserError, f"{model}: cannot load its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    with attributed_to(UserError, f"{model}: cannot load its configuration"):
        config = AutoConfig.from_pretrained(model_path)
        vocab_size = config.get_text_config().vocab_size
    vision = VisionSpec.read(local_model(model_path)) if config.model_type in FAMILIES else None
    ids = {tokenizer.eos_token_id}
    if not Path(model_path).is_dir() or Path(model_path, "generation_config.json").is_file():
        with attributed_to(UserError, f"{model}: cannot load its generation config"):
            eos = GenerationConfig.from_pretrained(model_path).eos_token_id
        ids |= set(eos if isinstance(eos, list) else [eos])
    ids.discard(None)
    return ModelText(tokenizer, vocab_size, ids), vision


def _is_plain(value: object) -> bool:
    """Say whether a value is what JSON is made of, and nothing that only passes for it, as an enumeration does."""
    kind = type(value)
    if kind is dict:
        return all(type(key) is str and _is_plain(one) for key, one in cast(dict[object, object], value).items())
    return kind in _PLAIN or (kind is list and all(map(_is_plain, cast(list[object], value))))
