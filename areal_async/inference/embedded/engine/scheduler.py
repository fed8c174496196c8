"""Who runs next: continuous batching over the slots of one model.

Sequences wait in order of arrival; a step admits what fits, computes the admitted prompts in one packed forward pass,
then decodes one token for every running sequence. What any slot holds of a prompt, of a running sequence or of one that
has ended, is copied instead of computed again, within one version of the weights.

Invariants: running sequence i is in slot i; weights, pauses and aborts act between steps only, so each token has
exactly one version; a sequence is admitted only with room for the longest it may become, so none is ever evicted.

Everything here is synchronous and belongs to the model thread.
"""

import enum
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from areal_async.inference.embedded.engine.batch import DecodeBatch
from areal_async.inference.embedded.engine.compute.bands import Band, cut
from areal_async.inference.embedded.engine.compute.held import LEAST_SHARED
from areal_async.inference.embedded.engine.options import EngineOptions
from areal_async.inference.embedded.engine.runner import ModelRunner
from areal_async.inference.embedded.engine.sampling import Drawn
from areal_async.inference.embedded.engine.sequence import Piece, RunningSequence, TopLogprobs, abort_reason
from areal_async.inference.embedded.engine.weights import StagedWeights

Emission = tuple[RunningSequence, Piece]


class PauseMode(enum.StrEnum):
    """What a pause does to the running sequences."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


@dataclass(slots=True)
class _Admitted:
    """A sequence that takes a slot in this step."""

    sequence: RunningSequence
    source: int
    """Slot that holds the beginning of its tokens."""
    num_held: int
    """How many of them; 0 for none."""

    @property
    def num_left(self) -> int:
        return self.sequence.num_tokens - self.num_held

    @property
    def is_whole(self) -> bool:
        """Whether only the last token is left: a decoding step computes it."""
        return self.num_held > 0 and self.num_left == 1


class Scheduler:
    """The waiting line, the running batch and the version they run under."""

    def __init__(self, runner: ModelRunner, options: EngineOptions) -> None:
        self._runner = runner
        self._max_running = options.max_running_requests
        self._max_prefill_tokens = options.max_prefill_tokens
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []
        self._batch: DecodeBatch | None = None
        self._is_paused = False
        self.is_released = False
        """The cache's memory is given back; nobody runs until it is taken again."""
        self._epoch = self._num_arrived = 0
        self._emissions: list[Emission] = []
        self.weight_version = options.weight_version
        self.num_generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return not (self._is_paused or self.is_released) and bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one."""
        return len(self._waiting)

    @property
    def num_used_tokens(self) -> int:
        """Positions of the cache that running sequences fill."""
        return sum(sequence.num_tokens for sequence in self._running)

    def submit(self, sequence: RunningSequence) -> None:
        """Queue one sequence."""
        if sequence.max_new_tokens == 0:
            sequence.finish_reason = {"type": "length", "length": 0}
            self._emit(sequence)
        else:
            self._num_arrived += 1
            sequence.arrival = self._num_arrived
            self._waiting.append(sequence)

    def take_emissions(self) -> list[Emission]:
        """Return the pieces produced since the last call, in order."""
        taken, self._emissions = self._emissions, []
        return taken

    def step(self) -> None:
        """Admit and prefill what fits, then decode one token for every running sequence."""
        if self._waiting and len(self._running) < self._max_running:
            self._admit()
        if self._running:
            self._decode()

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping, after doing to the sequences what ``mode`` says."""
        self._is_paused = True
        if mode is PauseMode.ABORT:
            self.abort_all()
        elif mode is PauseMode.RETRACT:
            for sequence in self._running:
                self._keep(sequence)
                sequence.slot = -1
                sequence.num_retractions += 1
            self._waiting.extendleft(sorted(self._running, key=lambda sequence: sequence.arrival, reverse=True))
            self._running, self._batch = [], None

    def resume(self) -> None:
        """Step again."""
        self._is_paused = False

    def abort(self, rid: str) -> None:
        """End one sequence, wherever it is; an unknown id is no error, it may just have finished."""
        self._abort_where(lambda sequence: sequence.rid == rid)

    def abort_all(self) -> None:
        """End every sequence."""
        self._abort_where(lambda sequence: True)

    def flush_cache(self) -> bool:
        """Forget all cached keys and values; refused while a sequence needs its own."""
        if self._running or (self._waiting and not self._is_paused):
            return False
        self._runner.cache.clear()
        return True

    def release_memory(self) -> bool:
        """Give the cache's memory back to the device, and run nobody until it is resumed; refused as a flush is."""
        if not self.flush_cache():
            return False
        self._runner.release_memory()
        self.is_released = True
        return True

    def resume_memory(self) -> bool:
        """Let the cache grow again; refused where it was not released."""
        was_released, self.is_released = self.is_released, False
        return was_released

    def apply_weights(self, staged: StagedWeights, weight_version: str | None) -> None:
        """Swap the weights; sequences with output remember which of their tokens came before."""
        self._runner.swap_weights(staged)
        self._epoch += 1
        if weight_version is None or weight_version == self.weight_version:
            return
        for sequence in (*self._running, *self._waiting):
            if sequence.output_ids:
                sequence.version_changes.append((self.weight_version, len(sequence.output_ids)))
        self.weight_version = weight_version

    def _admit(self) -> None:
        """Give slots to waiting sequences, in order, and compute of their prompts what no slot holds.

        Who goes on from a prompt that a pass computes is in a second one, so that groups begin together.
        """
        self._reserve()
        later: deque[RunningSequence] = deque()
        self._admit_pass(self._waiting, later)
        if later:
            self._admit_pass(later, None)
            self._waiting.extendleft(reversed(later))

    def _admit_pass(self, coming: deque[RunningSequence], later: deque[RunningSequence] | None) -> None:
        """Admit who fits into one forward pass.

        Args:
            later: takes who goes on from it; None for the second pass, whose members the first one had room for.
        """
        new: list[_Admitted] = []
        longest = max((sequence.longest_tokens for sequence in self._running), default=0)
        budget = self._max_prefill_tokens
        first_new = len(self._running)
        while coming:
            sequence = coming[0]
            longest = max(longest, sequence.longest_tokens)
            num_slots = len(self._running) + len(later or ()) + 1
            has_room = num_slots == 1 or num_slots * longest <= self._runner.max_total_tokens
            if num_slots > self._max_running or not has_room:
                break
            # Before the search: a cache at the end of its budget has fewer slots when they are longer.
            self._runner.reserve(num_slots, longest, spare_slots=num_slots)
            one = _Admitted(sequence, *self._find_held(sequence))
            is_of_this_pass = first_new <= one.source < len(self._running)
            goes_on = bool(one.num_held) and not one.is_whole and is_of_this_pass
            if goes_on and later is None:
                break
            cost = 0 if one.is_whole else one.num_left
            is_charged = budget < self._max_prefill_tokens
            if later is not None and cost > budget and is_charged:
                break
            coming.popleft()
            budget -= cost
            if goes_on and later is not None:
                later.append(sequence)
                continue
            self._place(one, is_computed=not is_of_this_pass)
            new.append(one)
        if new:
            self._fill(new)
            self._batch = None

    def _reserve(self) -> None:
        """Make room for all that may run next at once: a cache that grows as each of them comes is copied each time."""
        next_ones = islice(self._waiting, self._max_running - len(self._running))
        lengths = [sequence.longest_tokens for sequence in chain(self._running, next_ones)]
        num_slots = min(len(lengths), self._runner.max_total_tokens // max(lengths))
        if num_slots > self._runner.cache.num_slots:  # else what ended sequences have left may still be of use
            self._runner.reserve(num_slots, max(lengths[:num_slots]), spare_slots=num_slots)

    def _find_held(self, sequence: RunningSequence) -> tuple[int, int]:
        """Return a slot and how much it holds of the sequence's tokens, at most all but the last; 0 if not worth it."""
        tokens = sequence.tokens
        source, num_held = self._runner.cache.held.find(tokens, sequence.shown)
        most = len(tokens) - 1
        num_held = min(num_held, most)
        # The images' part of a pass is computed for whole prompts.
        is_enough = num_held == most or (num_held >= LEAST_SHARED and sequence.images is None)
        return source, num_held if is_enough else 0

    def _place(self, one: _Admitted, *, is_computed: bool) -> None:
        """Give a sequence the next slot, with what another holds of its tokens; what the slot held goes elsewhere."""
        cache, sequence, slot = self._runner.cache, one.sequence, len(self._running)
        sequence.slot, sequence.prompt_epoch = slot, self._epoch
        self._running.append(sequence)
        oldest = cache.held.oldest(slot)
        is_own = one.num_held and one.source == slot
        if oldest != slot and not is_own and (num_kept := cache.held.length(slot)):
            cache.copy_slot(slot, oldest, num_kept)
        if not sequence.output_ids:
            sequence.cached_tokens = one.num_held
        if one.num_held and one.source != slot and is_computed:
            cache.copy_slot(one.source, slot, one.num_held)
            one.source = slot
        tokens = sequence.tokens
        cache.held.put(slot, tokens[:-1] if one.is_whole else tokens, sequence.shown)

    def _fill(self, new: list[_Admitted]) -> None:
        logits = None
        to_prefill = [one for one in new if not one.is_whole]
        if to_prefill:
            tokens = [one.sequence.tokens[one.num_held :] for one in to_prefill]
            images = [one.sequence.images for one in to_prefill]
            slots, cached = [one.sequence.slot for one in to_prefill], [one.num_held for one in to_prefill]
            logits = self._runner.prefill(tokens, slots, images, cached)
        for one in new:
            # All but the last token: decoding that one is what yields the first logits.
            if one.is_whole and one.source != one.sequence.slot:
                self._runner.cache.copy_slot(one.source, one.sequence.slot, one.num_held)
        if logits is not None:
            sequences = [one.sequence for one in to_prefill]
            self._take_tokens(sequences, self._batch_of(sequences).sample(logits))

    def _decode(self) -> None:
        batch = self._batch
        if batch is None:
            batch = self._batch = self._batch_of(self._running, self._cut_bands())
        drawn = batch.sample(self._runner.decode(batch.ids_N, batch.positions_N, batch.bands, batch.deltas_N))
        batch.advance(drawn.ids_N)
        self._take_tokens(self._running, drawn)

    def _cut_bands(self) -> list[Band]:
        """Return what attends together, after the slots are brought into its order."""
        lengths = [sequence.num_tokens for sequence in self._running]
        if self._runner.device.type != "cpu":  # there a launch costs more than what it would save of the reading
            return [Band(len(lengths), max(lengths))]
        bands, exchanges = cut(lengths)
        for one, other in exchanges:
            self._exchange(one, other)
        return bands

    def _exchange(self, one: int, other: int) -> None:
        """Have two running sequences exchange their slots."""
        running = self._running
        self._runner.cache.exchange_slots(one, other, max(running[one].num_tokens, running[other].num_tokens))
        running[one], running[other] = running[other], running[one]
        running[one].slot, running[other].slot = one, other

    def _batch_of(self, sequences: list[RunningSequence], bands: Sequence[Band] = ()) -> DecodeBatch:
        return DecodeBatch(sequences, self._runner.vocab_size, self._runner.device, bands)

    def _take_tokens(self, sequences: list[RunningSequence], drawn: Drawn) -> None:
        self.num_generated_tokens += len(sequences)
        finished = []
        for sequence, token_id, logprob, top in zip(
            sequences, drawn.ids_N.tolist(), drawn.logprobs_N.tolist(), _top_logprobs(drawn), strict=True
        ):
            if sequence.append(token_id, logprob, top):
                self._emit(sequence)
                if sequence.finish_reason is not None:
                    finished.append(sequence)
        if finished:
            self._vacate(finished)

    def _emit(self, sequence: RunningSequence) -> None:
        self._emissions.append((sequence, sequence.take_piece(self.weight_version)))

    def _vacate(self, leaving: Iterable[RunningSequence]) -> None:
        """Free slots; the last sequences move into the holes, so that the batch stays dense."""
        cache = self._runner.cache
        for sequence in sorted(leaving, key=lambda sequence: sequence.slot, reverse=True):
            hole = sequence.slot
            if sequence.is_poisoned:
                cache.clear_slot(hole)
            else:
                self._keep(sequence)
            last = len(self._running) - 1
            if hole != last:
                self._exchange(hole, last)
            self._running.pop()
            sequence.slot = -1
        self._batch = None

    def _keep(self, sequence: RunningSequence) -> None:
        """Let others go on from all that a leaving sequence computed, if one version of the weights computed it."""
        if sequence.prompt_epoch == self._epoch and sequence.images is None:
            self._runner.cache.held.put(sequence.slot, sequence.tokens[:-1])

    def _abort_where(self, is_meant: Callable[[RunningSequence], bool]) -> None:
        running = [sequence for sequence in self._running if is_meant(sequence)]
        waiting = [sequence for sequence in self._waiting if is_meant(sequence)]
        self._vacate(running)
        self._waiting = deque(sequence for sequence in self._waiting if not is_meant(sequence))
        for sequence in running:
            sequence.finish_reason = abort_reason()
            self._emit(sequence)
        for sequence in waiting:
            sequence.finish_reason = {"type": "abort", "message": "Abort in waiting queue"}
            self._emit(sequence)


def _top_logprobs(drawn: Drawn) -> list[TopLogprobs]:
    """Return the likeliest tokens of each sequence; none where nobody asked."""
    if drawn.top_logprobs_NK is None or drawn.top_ids_NK is None:
        return [[]] * len(drawn.ids_N)
    return [
        list(zip(logprobs, ids, strict=True))
        for logprobs, ids in zip(drawn.top_logprobs_NK.tolist(), drawn.top_ids_NK.tolist(), strict=True)
    ]
