"""What a process has seen of the streams of a cluster: whoever answers it and knows less is not up to date."""


class Seen:
    """How far this process knows that streams have come: an answer that knows less comes from an old leader."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._newest: dict[tuple[str, str], int] = {}
        self._created: dict[str, str] = {}

    def note(self, stream: str, sequence: int) -> None:
        """Take in that a message was stored."""
        self._last[stream] = max(sequence, self._last.get(stream, 0))

    def note_newest(self, stream: str, subject: str, sequence: int) -> None:
        """Take in that a message is, or was, the newest of its subject."""
        self.note(stream, sequence)
        self._newest[stream, subject] = max(sequence, self.newest(stream, subject))

    def forget(self, stream: str, subject: str) -> None:
        """Let go of a subject that is not asked for again, where there are more and more of them."""
        self._newest.pop((stream, subject), None)

    def last(self, stream: str) -> int:
        """Return the highest sequence that was ever stored, as far as is known."""
        return self._last.get(stream, 0)

    def newest(self, stream: str, subject: str) -> int:
        """Return the sequence of a subject's newest message, as far as is known of one that was asked for."""
        return self._newest.get((stream, subject), 0)

    def is_reached(self, stream: str, created: str, last: int) -> bool:
        """Say whether a stream that has come so far holds all that was seen, and take it in.

        Args:
            created: when the stream was made; of one that was made anew nothing has been seen yet.
        """
        if self._created.setdefault(stream, created) != created:
            self._created[stream], self._last[stream] = created, 0
            self._newest = {key: sequence for key, sequence in self._newest.items() if key[0] != stream}
        is_reached = last >= self.last(stream)
        self.note(stream, last)
        return is_reached
