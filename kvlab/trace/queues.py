"""Recorded queue orders (tests/golden/schedule.jsonl): each line a cache, a queue, and the order that SGLang put it in."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlab.cache.contract import CacheError, Space
from kvlab.cache.radix_cache import RadixCache
from kvlab.schedule.queueing import Order, Waiting, arrange
from kvlab.trace.lines import Fields, Lines, Shape, short

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvlab.cache.events import Event

_QUERY = Shape(("policy", "queue"), ("page_size", "cached", "processed_tokens", "running_keys", "seed", "enable"))
_WAITING = Shape(("tokens",), ("salt", "max_new", "arrival", "routing_key"))


class Replayed(NamedTuple):
    """One line of a trace: what was asked, what came of it (`result`: the fields of ``expect``), and the cache's events."""

    line: int
    op: str
    result: Fields
    expect: Fields | None
    events: list[Event]


class Queues:
    """Queues on their way through SGLang's orders: iterate over it, one line at a time.

    Parameters
    ----------
    lines : Lines
        a query a line.

    Raises
    ------
    ReplayError
        while iterating, for a line that is no query.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._matched = self._asked = 0

    def __iter__(self) -> Iterator[Replayed]:
        while (line := self._lines.next()) is not None:
            expect = line.pop("expect", None)
            if expect is not None and not isinstance(expect, dict):
                self._lines.refuse("expect", f"is {short(expect)}, but must be an object")
            query = self._lines.fields(line, _QUERY)
            queue = [self._lines.fields(one, _WAITING) for one in query["queue"]]
            if not all(one["tokens"] for one in queue):
                self._lines.refuse("queue", "holds an empty prompt, but each must have tokens")
            order = self._arrange(query, queue)
            self._matched += sum(order.matched)
            self._asked += sum(len(one["tokens"]) for one in queue)
            result: Fields = {
                "active": order.active,
                "order": order.indices,
                "matched": order.matched,
                "deprioritized": sorted(order.late),
            }
            yield Replayed(self._lines.number, query["policy"], result, expect, [])

    def _arrange(self, query: Fields, queue: list[Fields]) -> Order:
        try:
            cache = RadixCache(None, query.get("page_size", 1), enable=query.get("enable", True))
            for number, tokens in enumerate(query.get("cached", [])):
                _run(cache, str(number), tokens)
            return arrange(
                query["policy"],
                [_waiting(number, one) for number, one in enumerate(queue)],
                cache,
                processed=query.get("processed_tokens", 0),
                running_keys=query.get("running_keys", ()),
                rng=Random(query.get("seed", 0)),  # noqa: S311 - a shuffle that can be repeated guards no secret
            )
        except CacheError as error:
            self._lines.refuse(None, str(error))

    def summary(self) -> str:
        """Return the share of cached tokens in words."""
        return f"{self._matched:,} of {self._asked:,} tokens that waited were found cached"


def _run(cache: RadixCache, id: str, tokens: list[int]) -> None:
    """Let a prompt run, so that the cache holds it."""
    cache.add(id, tokens)
    cache.take([id])
    cache.commit([id])
    cache.release(id, "length")


def _waiting(number: int, one: dict[str, Any]) -> Waiting:
    arrival = one.get("arrival", number)  # the recordings count time in processed tokens
    space = Space(salt=one.get("salt"))
    return Waiting(one["tokens"], space, one.get("max_new", 0), arrival, arrival, one.get("routing_key", ""))
