"""Whether a trajectory can be trained in this run, by its header and by its tokens: the one place that says so.

``wire`` lets through what is well formed. What this model, these settings and this step can make use of is another
question, which only the trainer can answer: anyone who may store a trajectory may store a token that the model does not
have. What is refused here goes the way of what cannot be read: a dead letter, and its group's outcome. Pure.

Invariant: the engine trains all that passes, and every number that a step reports of it is finite.
"""

import numpy as np

from areal_async.config.settings import Settings
from areal_async.errors import WireError
from areal_async.protocol.fields import MAX_INFO, MAX_INFO_KEYS, MAX_LOGPROB, MAX_REWARD, OWN_INFO, is_info_key
from areal_async.protocol.types import Cut, ImageRef, Sequence, Slot, SlotStatus, StoredMessage, Trajectory, Version
from areal_async.trainer.batch.cut import ages_in
from areal_async.vision.images import ImageError
from areal_async.vision.pixels import decode
from areal_async.vision.rows import check_grids
from areal_async.vision.spec import VisionSpec

MAX_BYTES_PER_PIXEL = 4
"""Of a PNG as ``take_image`` makes it: three that zlib could not make fewer, and the frames of rows and chunks. It
bounds what a batch's images take by its tokens, before they are fetched."""
MAX_FRAME_BYTES = 1024
"""Of the rest of such a file."""


class TrainingLimits:
    """Limits of the trajectories that one run can train."""

    def __init__(self, settings: Settings, *, vocab_size: int | None = None, vision: VisionSpec | None = None) -> None:
        """Take what is known of the models of the step.

        Args:
            vocab_size: tokens that every model has; ``None`` where headers alone are checked.
            vision: how they see; ``None`` where one does not.
        """
        self._settings = settings
        self._vocab_size = vocab_size
        self._vision = vision
        self._group_sizes = {task.name: settings.rollout_of(task.name).group_size for task in settings.tasks}

    def check_message(self, message: StoredMessage) -> None:
        """Hold headers against the run.

        Raises:
            WireError: its slots cannot be trained, whatever their tokens are.
        """
        what = f"trajectory message {message.sequence}"
        if self._group_sizes and message.workflow not in self._group_sizes:
            raise WireError(f"{what}: got the workflow {message.workflow}, which this run does not have")
        group_size = self._group_sizes.get(message.workflow, self._settings.rollout.group_size)
        if message.group_size != group_size:
            raise WireError(f"{what}: got a group of {message.group_size}, need {group_size} (group_size)")
        for slot in message.slots:
            if slot.status is SlotStatus.SCORED:
                self._check_slot(slot, f"{what}: sibling {slot.sibling}")

    def check_trajectory(self, trajectory: Trajectory, *, cut: Cut, lineage: int) -> None:
        """Hold tokens and metrics against the run, in the step of ``cut`` as ``lineage`` trains it.

        Raises:
            WireError: it cannot be trained.
        """
        slot = trajectory.slot
        what = f"trajectory {slot.sample_uid}"
        self._check_slot(slot, what)
        num_sampled = 0
        for sequence in trajectory.sequences:
            self._check_sequence(sequence, what)
            _check_ages(sequence, what, cut=cut, lineage=lineage)
            num_sampled += int(np.count_nonzero(sequence.loss_mask))
        if num_sampled != slot.num_output_tokens:
            raise WireError(f"{what}: got {num_sampled} sampled tokens, its header says {slot.num_output_tokens}")
        _check_info(trajectory.info, what)

    def check_image(self, image: ImageRef, data: bytes) -> None:
        """Hold an image's file against what its name says and the model takes. It takes as long as decoding does.

        Raises:
            WireError: it cannot be shown.
        """
        what = f"image {image.sha256}"
        if self._vision is None:
            raise WireError(f"{what}: got an image, which the model cannot see")
        try:
            height, width, _ = decode(data, self._vision).shape
        except ImageError as exc:
            raise WireError(f"{what}: {exc}") from exc
        if (width, height) != (image.width, image.height):
            raise WireError(f"{what}: got {width} x {height} pixels, need {image.width} x {image.height}")

    def _check_slot(self, slot: Slot, what: str) -> None:
        if not 0 < slot.num_tokens >= slot.num_output_tokens:
            raise WireError(f"{what}: got {slot.num_output_tokens} sampled tokens of {slot.num_tokens}")
        rewards = [slot.reward, *(credit.reward for credit in slot.credits)]
        beyond = next((reward for reward in rewards if not abs(reward) <= MAX_REWARD), None)
        if beyond is not None:
            raise WireError(f"{what}: got the reward {beyond:g}, need at most {MAX_REWARD:g} either way")
        if slot.credits and self._settings.algorithm.one_reward_for:
            raise WireError(
                f"{what}: got rewards for single replies with {self._settings.algorithm.one_reward_for}, which takes "
                "one for the whole trajectory"
            )

    def _check_sequence(self, sequence: Sequence, what: str) -> None:
        budget = self._settings.trainer.token_budget
        if sequence.num_tokens > budget:
            raise WireError(
                f"{what}: got a sequence of {sequence.num_tokens} tokens, need at most trainer.token_budget={budget}"
            )
        largest = int(sequence.token_ids.max())
        if self._vocab_size is not None and largest >= self._vocab_size:
            raise WireError(
                f"{what}: got the token id {largest}, need at most {self._vocab_size - 1}, the model's last"
            )
        if sequence.loss_mask[0]:
            raise WireError(f"{what}: got a sampled token at the start of a sequence, where nothing predicts it")
        furthest = float(np.abs(sequence.logprobs).max())
        if furthest > MAX_LOGPROB:
            raise WireError(f"{what}: got a logprob of size {furthest:g}, need at most {MAX_LOGPROB:g}")
        self._check_images(sequence, what)

    def _check_images(self, sequence: Sequence, what: str) -> None:
        """Hold the tokens that stand for images against how many the model's images of these sizes have."""
        vision, images = self._vision, sequence.images or []
        if vision is None:
            if images:
                raise WireError(f"{what}: got {len(images)} images, which the model cannot see")
            return
        for image in images:
            most = MAX_FRAME_BYTES + MAX_BYTES_PER_PIXEL * image.width * image.height
            if image.num_bytes > most:
                raise WireError(
                    f"{what}: got an image of {image.num_bytes} bytes for {image.width} x {image.height} pixels, need "
                    f"at most {most}"
                )
        try:
            grids = [vision.grid_of(image.width, image.height) for image in images]
            check_grids(sequence.token_ids, grids, vision)
        except ValueError as exc:
            raise WireError(f"{what}: {exc}") from exc


def _check_ages(sequence: Sequence, what: str, *, cut: Cut, lineage: int) -> None:
    """Hold each version against the step: a header gives two of them, and not what lies between."""
    age_of = ages_in(cut, lineage)
    for packed in np.unique(sequence.versions[sequence.loss_mask]).tolist():
        version = Version.unpack(packed)
        try:
            age = age_of(version)
        except ValueError as exc:
            raise WireError(f"{what}: {exc}") from exc
        if age < 0:
            raise WireError(f"{what}: got a token of version {version}, which step {cut.step} comes before")
        if age > cut.max_staleness and not cut.masks_stale:
            raise WireError(f"{what}: got a token of age {age}, need at most {cut.max_staleness}")


def _check_info(info: dict[str, float], what: str) -> None:
    own = [key for key in info if key.startswith(OWN_INFO)]
    if max(len(own), len(info) - len(own)) > MAX_INFO_KEYS:
        raise WireError(f"{what}: got {len(info)} numbers in info, need at most {MAX_INFO_KEYS}")
    for key, value in info.items():
        if not is_info_key(key.removeprefix(OWN_INFO)):
            raise WireError(f"{what}: got {key!r:.100} in info, need a name of at most 64 letters, digits and ._/-")
        if not abs(value) <= MAX_INFO:
            raise WireError(f"{what}: got info {key} {value:g}, need at most {MAX_INFO:g} either way")
