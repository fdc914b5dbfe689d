"""The free list: units (blocks or pages) in the order in which they will be taken."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

UNLIMITED = 1 << 40


class FreeList:
    """A queue of free units: popped at the front, joined at either end, left from anywhere in O(1).

    Units that were never used stand between those that were put in front and those at the back, so they are kept as a mere
    range: a list of a million fresh units, or of unlimited ones, costs nothing.

    Parameters
    ----------
    num_units : int or None
        ids 1 .. num_units are free at the start (0 is the null block or dummy page of both engines); None: no end.
    """

    __slots__ = ("_back", "_fresh", "_front", "num_units")

    def __init__(self, num_units: int | None) -> None:
        self.num_units = num_units
        self.renew()

    def renew(self) -> None:
        """Make all units free again, in the order of their ids."""
        self._front: OrderedDict[int, None] = OrderedDict()
        self._fresh = range(1, (UNLIMITED if self.num_units is None else self.num_units) + 1)
        self._back: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._front) + len(self._fresh) + len(self._back)

    def __iter__(self) -> Iterator[int]:
        yield from self._front
        yield from self._fresh
        yield from self._back

    def __contains__(self, unit: int) -> bool:
        return unit in self._fresh or unit in self._back or unit in self._front

    def __eq__(self, other: object) -> bool:
        """Equal when the same units stand in the same order."""
        return self.runs() == other.runs() if isinstance(other, FreeList) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def runs(self) -> list[tuple[int, int]]:
        """Return the queue as runs of ascending ids, ``[(first, last), ...]``."""
        out: list[tuple[int, int]] = []
        parts: Iterable[tuple[int, int]] = (
            *((u, u) for u in self._front),
            *([(self._fresh[0], self._fresh[-1])] if self._fresh else []),
            *((u, u) for u in self._back),
        )
        for first, last in parts:
            if out and out[-1][1] + 1 == first:
                out[-1] = (out[-1][0], last)
            else:
                out.append((first, last))
        return out

    def copy(self) -> FreeList:
        """Return an equal list of its own."""
        other = FreeList(self.num_units)
        other._front, other._fresh, other._back = self._front.copy(), self._fresh, self._back.copy()
        return other

    def assign(self, front: Iterable[int], fresh: range, back: Iterable[int]) -> None:
        """Become the queue of `front`, then `fresh`, then `back`."""
        self._front, self._fresh, self._back = OrderedDict.fromkeys(front), fresh, OrderedDict.fromkeys(back)

    def plain(self) -> dict[str, list[int] | int | None]:
        """Return the queue as plain data, for files."""
        fresh = [self._fresh.start, self._fresh.stop]
        return {"num_units": self.num_units, "front": list(self._front), "fresh": fresh, "back": list(self._back)}

    @classmethod
    def of_plain(cls, data: dict[str, Any]) -> FreeList:
        """Return the queue that `plain` described."""
        queue = cls(data["num_units"])
        queue.assign(data["front"], range(*data["fresh"]), data["back"])
        return queue

    def used(self) -> Iterator[int]:
        """Iterate over the units that were in use before, next to be taken first: those that may still hold something."""
        yield from self._front
        yield from self._back

    def pop(self, count: int) -> list[int]:
        """Take `count` units from the front; the caller knows that they are there."""
        assert count <= len(self), "more units popped than are free"
        out: list[int] = []
        while self._front and len(out) < count:
            out.append(self._front.popitem(last=False)[0])
        fresh = self._fresh[: count - len(out)]
        self._fresh = self._fresh[len(fresh) :]
        out.extend(fresh)
        while len(out) < count:
            out.append(self._back.popitem(last=False)[0])
        return out

    def push_front(self, units: Sequence[int]) -> None:
        """Put `units` before all others, in the given order."""
        for unit in reversed(units):
            self._front[unit] = None
            self._front.move_to_end(unit, last=False)

    def push_back(self, units: Iterable[int]) -> None:
        """Put `units` after all others, in the given order."""
        for unit in units:
            self._back[unit] = None

    def remove(self, unit: int) -> None:
        """Take `unit` out, wherever it stands (a fresh one only from the front of its range)."""
        if unit in self._back:
            del self._back[unit]
        elif unit in self._front:
            del self._front[unit]
        else:
            assert unit in self._fresh[:1], "only the next fresh unit can be taken"
            self._fresh = self._fresh[1:]
