"""Rows that show images, made as they are learned: of a data set no more images are in memory than of a step.

Invariant: an image is taken in as that of a prompt is in a run, so a model is fine-tuned on what servers show it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from areal_async.config.sft import SftDatasetSettings
from areal_async.errors import UserError
from areal_async.trainer.packing.rows import TrainRow, unsampled_row
from areal_async.trainer.tuning.answers import learned_tokens, pieces_of
from areal_async.trainer.tuning.loop import Conversation, Examples
from areal_async.vision.images import ImageError, final_size, source_size, take_image
from areal_async.vision.parts import is_image, part_for_template
from areal_async.vision.rows import expand
from areal_async.vision.spec import VisionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenExample:
    """A row whose images have not been taken in. All ranks make those of a step, to share them by their cost."""

    where: str
    """The row, as an error names it."""
    token_ids: list[int]
    """One placeholder for each image."""
    loss_mask: NDArray[np.bool_]
    sources: Sequence[Any]
    """Its images, in their order, as ``take_image`` takes them."""
    num_tokens: int
    """As many as there will be, but for an image that its EXIF data turn round."""
    vision: VisionSpec

    def row(self) -> TrainRow:
        """Take its images in.

        Raises:
            UserError: one is damaged, or is beyond the limits.
        """
        try:
            images = [take_image(source, self.vision) for source in self.sources]
            grids = [self.vision.grid_of(image.width, image.height) for image in images]
            expanded = np.array(expand(self.token_ids, grids, self.vision))
        except ValueError as exc:
            raise UserError(f"{self.where}: {exc}") from exc
        is_text, mask = expanded != self.vision.image_token_id, np.zeros(len(expanded), dtype=np.bool_)
        mask[is_text] = self.loss_mask[np.array(self.token_ids) != self.vision.image_token_id]
        row = unsampled_row(expanded.tolist(), mask.tolist())
        return replace(row, images=tuple(image.data for image in images))


class SeenExamples(Sequence[SeenExample]):
    """All rows of a data set of which some show images."""

    def __init__(self, examples: Examples, dataset: SftDatasetSettings, vision: VisionSpec) -> None:
        self._examples = examples
        self._dataset = dataset
        self._vision = vision
        wanted = dataset.question, dataset.answer, dataset.images
        self._rows = examples.rows.select_columns([one for one in examples.rows.column_names if one in wanted])

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> SeenExample: ...
    @overload
    def __getitem__(self, place: slice) -> list[SeenExample]: ...
    def __getitem__(self, place: int | slice) -> SeenExample | list[SeenExample]:
        """Return the row, or rows, at a place.

        Raises:
            UserError: a cell holds no conversation or no answer, or not the images that the conversation shows.
        """
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        place, where = int(place), self._examples.where(int(place))
        row = self._rows[place]
        conversation = self._examples.conversation(row[self._dataset.question], place, self._dataset.question)
        answer = (
            None
            if self._dataset.answer is None
            else self._examples.text(row[self._dataset.answer], place, self._dataset.answer)
        )
        sources = self._sources(conversation, row, where)
        shown = [_for_template(message) for message in conversation]
        tokens = learned_tokens(self._examples, pieces_of(self._examples, shown, answer, place))
        num_written = tokens.token_ids.count(self._vision.image_token_id)
        if num_written != len(sources):
            raise UserError(
                f"{where}: the chat template wrote {num_written} placeholders for {len(sources)} images, need one for "
                "each; take placeholders out of the text, or name a template that shows images, template.path"
            )
        try:
            sizes = [final_size(*source_size(source), self._vision) for source in sources]
        except ImageError as exc:
            raise UserError(f"{where}: {exc}") from exc
        num_more = sum(self._vision.num_tokens(self._vision.grid_of(*size)) - 1 for size in sizes)
        return SeenExample(
            where=where,
            token_ids=tokens.token_ids,
            loss_mask=np.array(tokens.loss_mask),
            sources=sources,
            num_tokens=len(tokens.token_ids) + num_more,
            vision=self._vision,
        )

    def _sources(self, conversation: Conversation, row: dict[str, Any], where: str) -> list[Any]:
        """Return the images that a conversation shows: each part's own, or the next of the row's column."""
        own = [_own_image(part) for part in _image_parts(conversation)]
        column, num_needed = self._dataset.images, sum(one is None for one in own)
        if not num_needed:
            return own
        if column not in row:
            raise UserError(
                f"{where}: got {num_needed} parts of images without an image, need a column that has them; say which "
                "with --dataset.images"
            )
        listed = row[column]
        given = listed if isinstance(listed, list | tuple) else [] if listed is None else [listed]
        if len(given) != num_needed:
            raise UserError(
                f"{where}: {column} has {len(given)} images, need {num_needed}, one for each part of an image"
            )
        following = iter(given)
        return [next(following) if one is None else one for one in own]


def _image_parts(conversation: Conversation) -> Iterator[Any]:
    for message in conversation:
        if isinstance(content := message.get("content"), list | tuple):
            yield from filter(is_image, content)


def _own_image(part: Any) -> Any:
    """Return the image in a part, None where a column has it."""
    source = part.get(part["type"])
    return source.get("url") if part["type"] == "image_url" and isinstance(source, dict) else source


def _for_template(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if isinstance(content, list | tuple):
        return {**message, "content": [part_for_template(part) for part in content]}
    return message
