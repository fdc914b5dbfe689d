"""Paging without reuse: the naive twin that answers the same calls and never hits. Short enough to be checked by reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvlab.cache import checks
from kvlab.cache import events as ev
from kvlab.cache.contract import EVERYONE, NO_SLOTS, CacheError, Grant, Match, Moved, Refused, ReleaseWhy, Sizes, Space
from kvlab.cache.free_list import FreeList
from kvlab.cache.operations import BlockOperations
from kvlab.cache.state import Row, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlab.cache.contract import RefusedWhy


class PlainCache(BlockOperations):
    """Blocks of `block_size` slots, given to one request each and taken back when it ends.

    Parameters
    ----------
    num_tokens : int or None
        slots; None: unlimited.
    block_size : int
        slots in a block.

    Raises
    ------
    CacheError
        for sizes that cannot be.
    """

    policy = "none"
    watermark = 0.0
    max_num_batched_tokens: int | None = None

    def __init__(self, num_tokens: int | None = None, block_size: int = 16) -> None:
        self.unit = self.block_size = checks.size(block_size, "block_size")
        self.num_tokens = checks.capacity(num_tokens, self.unit, "block size")
        self.num_blocks = None if self.num_tokens is None else self.num_tokens // self.unit + 1
        self._free = FreeList(None if self.num_blocks is None else self.num_blocks - 1)
        self._rows: dict[str, Row] = {}
        self._log: list[ev.Event] | None = None

    def add(
        self,
        id: str,
        tokens: Sequence[int] | np.ndarray,
        space: Space = EVERYONE,
        *,
        read: bool = True,
        priority: int = 0,
        max_new: int = 0,
    ) -> None:
        """Let a request wait."""
        array = checks.prompt(id, tokens, self._rows, priority, max_new)
        self._rows[id] = Row(id, array.tolist(), len(array), space, read, priority, max_new)
        self._say(ev.Queued(id, array, space, read, priority, max_new))

    def peek(self, tokens: Sequence[int] | np.ndarray, space: Space = EVERYONE, *, read: bool = True) -> Match:  # noqa: ARG002
        """Find nothing, ever."""
        checks.token_array(tokens, "the prompt looked up")
        return Match(0, NO_SLOTS, None, "skipped")

    match = peek

    def take(self, ids: Sequence[str], budget: int | None = None, headroom: int = 0) -> list[Grant | Refused]:
        """Give each id slots for what it has to compute, in order, while there are some."""
        left = checks.batch(ids, budget, headroom)
        out: list[Grant | Refused] = []
        for row in [self.row(id, copy=False) for id in ids]:
            if left <= 0 or (out and isinstance(out[-1], Refused)):
                out.append(self._refuse(row.id, "not_reached", None, 0))
                continue
            count = min(len(row.tokens) - len(row.slots), left)
            whole = count if row.running else len(row.tokens)  # an admission needs room for its whole prompt
            short = self._blocks(len(row.slots) + whole) - self._blocks(len(row.slots)) - len(self._free)
            short += 0 if row.running else self._blocks(headroom)
            if short > 0:
                fits = self.num_blocks is None or self._blocks(len(row.tokens)) < self.num_blocks
                out.append(self._refuse(row.id, "no_space" if fits else "never_fits", 0, short * self.unit))
                continue
            if not row.running:
                row.running = True
                self._say(ev.Admitted(row.id, 0, NO_SLOTS, counted=False))
            left -= count
            out.append(self._allot(row, count))
        return out

    def _allot(self, row: Row, count: int) -> Grant:
        start = len(row.slots)
        new = np.array(self._free.pop(self._blocks(start + count) - self._blocks(start)), dtype=np.int64)
        blocks = np.concatenate([row.slots[:: self.unit] // self.unit, new])
        position = np.arange(start, start + count)
        slots = blocks[position // self.unit] * self.unit + position % self.unit
        row.slots = np.concatenate([row.slots, slots])
        if count:
            self._say(ev.Taken(row.id, start, slots, new))
        return Grant(row.id, 0, start, slots, len(row.tokens) - len(row.slots))

    def commit(self, ids: Sequence[str]) -> list[Moved]:
        """K/V of all granted slots are written."""
        for row in [self._running(id, "commit") for id in ids]:
            if row.written < len(row.slots):
                row.written = len(row.slots)
                self._say(ev.Written(row.id, row.written))
        return []

    def append(self, id: str, token: int) -> None:
        """Add a sampled token."""
        row = self._running(id, "append to")
        token = checks.token(token, id)
        row.tokens.append(token)
        self._say(ev.Appended(id, token))

    def release(self, id: str, why: ReleaseWhy) -> None:
        """Take a request's blocks back; with ``preempt`` it waits again with all its tokens."""
        row = self.row(id, copy=False)
        checks.why(why)
        blocks = (row.slots[:: self.unit] // self.unit)[::-1]
        self._free.push_front(blocks.tolist())
        del self._rows[id]
        if why == "preempt":
            self._rows[id] = Row(id, row.tokens, row.prompt, row.space, row.read, row.priority, row.max_new)
        if len(blocks):
            self._say(ev.Dropped(blocks))
            self._say(ev.Freed(blocks, front=True))
        self._say(ev.Released(id, why))

    def evict(self, tokens: int) -> int:
        """Evict nothing: nothing is kept."""
        checks.size(tokens, "tokens", 0)
        return 0

    def reset(self) -> bool:
        """Tell whether the pool is idle; there is nothing to forget."""
        return not self.runs()

    def row(self, id: str, *, copy: bool = True) -> Row:
        """Return one request as it stands."""
        if id not in self._rows:
            msg = f"request {id!r} is not here: add it first, or it has ended already."
            raise CacheError(msg)
        row = self._rows[id]
        if not copy:
            return row
        again = Row(row.id, list(row.tokens), row.prompt, row.space, row.read, row.priority, row.max_new, row.running)
        again.slots, again.written = row.slots.copy(), row.written
        return again

    def sizes(self) -> Sizes:
        """Return free, evictable (none) and protected tokens."""
        held = self._held()
        return Sizes(None if self.num_tokens is None else self.num_tokens - held, 0, held)

    def snapshot(self) -> State:
        """Return the whole cache as a State of its own."""
        rows = {id: self.row(id) for id in self._rows}
        refs = {int(b): 1 for r in rows.values() for b in r.slots[:: self.unit] // self.unit}
        return State("none", self.unit, self.num_tokens, self._free.copy(), "lru", rows, refs)

    def events(self) -> list[ev.Event]:
        """Return what happened since the last call; the first call starts the listening."""
        log, self._log = self._log or [], []
        return log

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block is free or held by exactly one row."""
        held = [int(b) for r in self._rows.values() for b in r.slots[:: self.unit] // self.unit]
        free = list(self._free.used())
        assert len(set(held + free)) == len(held) + len(free), "a block has two places"
        assert self.num_blocks is None or len(self._free) + len(held) == self.num_blocks - 1, "blocks were lost or made"
        assert all(r.written <= len(r.slots) <= len(r.tokens) for r in self._rows.values()), "written, granted out of order"

    def waits(self, id: str) -> bool:
        """Tell whether `id` waits for slots."""
        return id in self._rows and not self._rows[id].running

    def runs(self) -> int:
        """Return how many requests hold slots or may take them."""
        return sum(r.running for r in self._rows.values())

    def _running(self, id: str, verb: str) -> Row:
        row = self.row(id, copy=False)
        if not row.running:
            msg = f"cannot {verb} request {id!r}: it still waits for slots; take it first."
            raise CacheError(msg)
        return row

    def _refuse(self, id: str, why: RefusedWhy, hit: int | None, short: int) -> Refused:
        self._say(ev.Refused(id, why, hit, short))
        return Refused(id, why, hit, short)

    def _held(self) -> int:
        return sum(self._blocks(len(r.slots)) for r in self._rows.values()) * self.unit

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.unit)

    def _say(self, event: ev.Event) -> None:
        if self._log is not None:
            self._log.append(event)
