"""Prompts as token ids that know where they come from."""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = ("system", "timestamp", "tools", "history", "retrieved", "question", "generated")


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens ``[start, stop)`` of a prompt come from `source` (one of `SOURCES`).

    Raises
    ------
    ValueError
        for another source, or an impossible range.
    """

    source: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            msg = f"a part of a prompt comes from {self.source!r}: choose one of {', '.join(SOURCES)}."
            raise ValueError(msg)
        if not 0 <= self.start <= self.stop:
            msg = f"a part of a prompt reaches from token {self.start} to token {self.stop}: 0 <= start <= stop must hold."
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and the parts that they come from, in order and without gaps."""

    ids: tuple[int, ...]
    parts: tuple[Part, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)
