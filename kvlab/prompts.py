"""From chat messages to token ids, each token knowing where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = ("system", "timestamp", "tools", "history", "retrieved", "question", "generated")


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens ``[start, stop)`` of a prompt come from `source` (one of `SOURCES`)."""

    source: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and the parts that they come from, in order and without gaps."""

    ids: tuple[int, ...]
    parts: tuple[Part, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)
