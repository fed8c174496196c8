"""Requests to JetStream, retried until they are answered: through lost connections and restarts of the broker.

Whatever is retried here is safe to carry out twice: reads, declarations, and writes that carry an id by
which the broker drops the second copy.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import uuid4

import anyio
import msgspec

from areal_async.bus.connection import NO_RESPONDERS, Connection, ConnectionLostError, NoAnswerError, Received
from areal_async.bus.seen import Seen
from areal_async.errors import BusError, StreamFullError, WireError
from areal_async.protocol import wire

TRY_DEADLINE_S = 5.0
"""One try; the connection's loss ends it sooner."""
CLUSTER_TRY_S = 3.0
"""One try at a cluster, which drops what is asked of a stream that is electing its leader, for 4 to 7 seconds."""
SILENT_TRIES = 3
"""Tries of one request without an answer, in a row, before another server is asked: longer than any election."""
FIRST_DELAY_S = 0.01
MAX_DELAY_S = 1.0

WRONG_LAST_SEQUENCE = (10071, 10164)
STORE_FAILED = 10077
"""Also what a full stream answers, with a description that says so."""
STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
IN_PROCESS = 10158
"""What a cluster answers to a message of which it is just storing another copy."""
NOT_LEADER, STREAM_OFFLINE, CONSUMER_OFFLINE = 10009, 10118, 10119
PASSING = (IN_PROCESS, NOT_LEADER, STREAM_OFFLINE, CONSUMER_OFFLINE)
"""Errors of a cluster that pass by themselves, beside those of the codes 429 and 503."""


class Published(NamedTuple):
    """The broker's word that a message is stored."""

    sequence: int
    is_duplicate: bool
    """It was stored before, under the same id."""


class ApiError(BusError):
    """The broker answered with an error that a retry would not mend."""

    def __init__(self, subject: str, error: Mapping[str, Any]) -> None:
        self.err_code = int(error.get("err_code", 0))
        self.description = str(error.get("description", "no description"))
        super().__init__(f"{subject}: {self.description} (error {self.err_code})")

    @property
    def is_full(self) -> bool:
        """The stream holds as much as it may."""
        return self.err_code == STORE_FAILED and "exceeded" in self.description


class MissingError(ApiError):
    """There is no such stream, or no such consumer."""


def decode_answer(subject: str, data: bytes) -> dict[str, Any]:
    """Return the broker's JSON answer.

    Raises:
        BusError: somebody answered who is not JetStream.
    """
    try:
        return wire.decode_json(data, dict[str, Any], what=f"answer to {subject}")
    except WireError as exc:
        raise BusError(f"{exc}; only JetStream may answer there: check who else subscribes") from exc


class Retry:
    """The pauses between tries, up to a deadline; names in its error what was last seen."""

    def __init__(self, what: str, deadline_s: float) -> None:
        self._what = what
        self._deadline_s = deadline_s
        self._ends_at = anyio.current_time() + deadline_s
        self._delay_s = FIRST_DELAY_S
        self.last_seen = "no connection"

    @property
    def remaining_s(self) -> float:
        """Time left, at least 0."""
        return max(0.0, self._ends_at - anyio.current_time())

    async def pause(self) -> None:
        """Wait before the next try, a little longer each time.

        Raises:
            BusError: the deadline has passed.
        """
        self.check()
        await anyio.sleep(min(self._delay_s, self.remaining_s))
        self._delay_s = min(MAX_DELAY_S, 2 * self._delay_s)

    def check(self) -> None:
        """Raise BusError when no time is left."""
        if not self.remaining_s:
            raise BusError(f"{self._what}: no success within {self._deadline_s:g} s; last seen: {self.last_seen}")


class JetStreamApi:
    """JetStream's requests over one connection."""

    def __init__(self, connection: Connection, operation_deadline_s: float) -> None:
        self.connection = connection
        self.operation_deadline_s = operation_deadline_s
        self.seen = Seen()
        self.answering_since_s = anyio.current_time()
        """Since when each request has been answered at its first try, by this loop's clock: a key that did not change
        while the broker did not answer is nobody's silence."""

    def note_trouble(self) -> None:
        """Take in that a request was not answered as it should be: a broker restarts, a leader is elected."""
        self.answering_since_s = anyio.current_time()

    def retry(self, what: str) -> Retry:
        """Start the clock of one operation."""
        return Retry(what, self.operation_deadline_s)

    @property
    def try_s(self) -> float:
        """How long one try waits for its answer."""
        return CLUSTER_TRY_S if self.connection.is_clustered else TRY_DEADLINE_S

    async def wait_connected(self, retry: Retry) -> None:
        """Wait for the connection, within the operation's deadline."""
        if self.connection.is_connected:
            return
        with anyio.move_on_after(retry.remaining_s):
            await self.connection.wait_connected()
            return
        retry.check()

    async def request(self, subject: str, payload: bytes = b"", headers: Mapping[str, str] | None = None) -> Received:
        """Return the answer of the service at ``subject``, however often it must be asked.

        Raises:
            BusError: no answer within the operation's deadline, or the subject is denied.
        """
        retry = self.retry(f"request to {subject}")
        num_silent = 0
        while True:
            await self.wait_connected(retry)
            num_losses = self.connection.num_losses
            try:
                answer = await self.connection.request(
                    subject, payload, deadline_s=min(self.try_s, retry.remaining_s), headers=headers
                )
                if answer.status != NO_RESPONDERS:
                    return answer
                retry.last_seen = "nothing listens there: the stream does not exist, or is electing its leader"
            except NoAnswerError as exc:
                retry.last_seen = str(exc)
                num_silent += 1
                await self.leave_silent_server(num_losses, num_silent)
            except ConnectionLostError as exc:
                retry.last_seen = str(exc)
                num_silent = 0
            self.note_trouble()
            await retry.pause()

    async def leave_silent_server(self, num_losses: int, num_silent: int = SILENT_TRIES) -> None:
        """Connect to another server of the cluster after tries that this one has not answered.

        Args:
            num_losses: the connection's count when the request was sent: of many at once, the first one leaves.
            num_silent: how many tries there were in a row.
        """
        if num_silent % SILENT_TRIES == 0 and self.connection.num_losses == num_losses:
            await self.connection.go_elsewhere()

    async def ask(
        self, subject: str, body: Mapping[str, Any] | bytes = b"", headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the JSON answer; errors that pass by themselves (still starting, too busy) are waited out.

        Raises:
            StreamFullError: nothing was stored.
            MissingError: there is no such stream or consumer.
            ApiError: the broker refuses.
            BusError: no answer within the operation's deadline, or the subject is denied.
        """
        payload = body if isinstance(body, bytes) else msgspec.json.encode(body)
        retry = self.retry(f"request to {subject}")
        while True:
            answer = decode_answer(subject, (await self.request(subject, payload, headers)).data)
            if "error" not in answer:
                return answer
            is_missing = answer["error"].get("err_code") in (STREAM_NOT_FOUND, CONSUMER_NOT_FOUND)
            error = (MissingError if is_missing else ApiError)(subject, answer["error"])
            if error.is_full:
                raise StreamFullError(f"message to {subject}: {error.description}; wait until some are gone") from error
            if answer["error"].get("code") not in (429, 503) and error.err_code not in PASSING:
                raise error
            retry.last_seen = str(error)
            self.note_trouble()
            await retry.pause()

    async def store(
        self, subject: str, data: bytes, *, msg_id: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Published:
        """Store a message once, however often it must be sent; without an id it is given one.

        Raises:
            BusError: as ``ask``.
        """
        answer = await self.ask(subject, data, {**(headers or {}), "Nats-Msg-Id": msg_id or uuid4().hex})
        sequence = int(answer["seq"])
        self.seen.note(str(answer["stream"]), sequence)
        return Published(sequence, bool(answer.get("duplicate")))
