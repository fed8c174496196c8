"""The controller's snapshots: its books, and what a curriculum knows, up to an entry of the log."""

import msgspec

from areal_async.bus import Bus, Message, Snapshots, decode_state, restored
from areal_async.controller.accounts import Accounts, AccountsState
from areal_async.controller.curriculum import Visits
from areal_async.errors import WireError
from areal_async.protocol.subjects import ACCOUNTS


class BooksState(msgspec.Struct, kw_only=True):
    """What a snapshot of the books holds."""

    accounts: AccountsState
    visits: list[tuple[int, float]] | None
    """None where no curriculum was asked for."""


class BooksSnapshots(Snapshots):
    """Snapshots of these books."""

    def __init__(self, bus: Bus, accounts: Accounts, visits: Visits) -> None:
        super().__init__(bus, ACCOUNTS)
        self._accounts = accounts
        self._visits = visits

    async def restore(self, *, has_curriculum: bool) -> int:
        """Take over the newest; return the entry up to which the books are read: 0 where all is still to be read."""

        async def decode_books(data: bytes) -> BooksState:
            state = decode_state(data, BooksState)
            if has_curriculum and state.visits is None:
                raise WireError("it was kept without a curriculum")
            restored(self._accounts.restore, state.accounts)
            return state

        state, sequence = await self.load(decode_books)
        if state is not None and has_curriculum:
            self._visits.extend(state.visits or ())
        return sequence

    async def offer(self, entry: Message, *, has_curriculum: bool) -> None:
        """Keep what the books have come to with this entry, if it is time."""
        if self.is_due(entry.sequence) and (accounts := self._accounts.state()) is not None:
            visits = list(self._visits) if has_curriculum else None
            await self.save(entry, msgspec.msgpack.encode(BooksState(accounts=accounts, visits=visits)))
