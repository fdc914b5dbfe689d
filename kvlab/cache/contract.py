"""The contract of a cache: what it is asked, what it answers, and nothing about how it does it.

A cache owns *slots*: places for the K and V of one token. ``slot = block * unit + offset``. It never sees K, V, a model or a
clock. A token is cached only once its K/V have been granted a slot (`Cache.take`) AND written there (`Cache.commit`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlab.cache.events import Event
    from kvlab.cache.state import Row, State

Stopped = Literal["diverged", "unit", "last_token", "skipped", "end"]
RefusedWhy = Literal["no_space", "not_reached", "never_fits"]
ReleaseWhy = Literal["stop", "length", "abort", "preempt", "failed"]

NO_SLOTS = np.empty(0, dtype=np.int64)


class CacheError(ValueError):
    """A cache was asked for something that cannot be: one sentence that says what, where and what to do."""


@dataclass(frozen=True, slots=True)
class Space:
    """What must be equal, beside the tokens, for two prompts to share K/V.

    Attributes
    ----------
    salt : str or None
        ``cache_salt`` of both engines; an empty salt is no salt (docs/sglang.md 18).
    lora : (name, path) or None
        the adapter that computed the K/V.
    extra_key : str or None
        SGLang's free extra key.
    items : tuple of (identifier, start, length)
        images or audio whose embeddings stand at these token positions, in order, none over another.
    embeds : tuple of bytes, or None
        prompt embeddings, the raw bytes of one position each, where the prompt is not made of token ids (which are 0 then).
    """

    salt: str | None = None
    lora: tuple[str, str] | None = None
    extra_key: str | None = None
    items: tuple[tuple[str, int, int], ...] = ()
    embeds: tuple[bytes, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse keys that cannot be hashed before anything depends on them."""
        lora: object = self.lora
        if lora is not None and not (isinstance(lora, tuple) and len(lora) == 2):
            msg = f"lora is {lora!r}: give its name and its path, both text."
            raise CacheError(msg)
        for key in (self.salt, self.extra_key, *(self.lora or ())):
            try:
                str.encode(key or "")
            except (TypeError, UnicodeEncodeError):  # no text, or half of a surrogate pair
                msg = f"{key!r} cannot be part of a namespace: salt, extra_key and LoRA must be text that UTF-8 can write."
                raise CacheError(msg) from None
        if self.embeds is not None and not (isinstance(self.embeds, tuple) and all(type(row) is bytes for row in self.embeds)):
            msg = "embeds must be a tuple of bytes, one a position of the prompt."
            raise CacheError(msg)
        end = 0
        for item in self.items:
            name, start, length = item if isinstance(item, tuple) and len(item) == 3 else (None, -1, 0)
            if not (isinstance(name, str) and isinstance(start, int) and isinstance(length, int) and length > 0 and start >= end):
                msg = f"item {item!r} must be (identifier, start, length) and begin where the one before has ended, or later."
                raise CacheError(msg)
            end = start + length


EVERYONE = Space()


@dataclass(frozen=True, slots=True)
class Match:
    """What a look-up found: the first `tokens` tokens stand in `slots`.

    `stopped` says why it ends there: ``diverged`` (other or no cached tokens), ``unit`` (less than a unit of the prompt is
    left), ``last_token`` (the last token is always computed), ``skipped`` (the request does not read the cache), ``end``.
    `node` is the id of the last radix node; None for blocks.
    """

    tokens: int
    slots: np.ndarray
    node: int | None
    stopped: Stopped


class Grant(NamedTuple):
    """Compute K/V of tokens ``[start, start + len(slots))`` of request `id` into `slots` (int64).

    `hit` is what the look-up found (0 for running ids); `todo` counts known tokens still without a slot, so ``todo == 0``
    tells that the step ends with logits to sample from.
    """

    id: str
    hit: int
    start: int
    slots: np.ndarray
    todo: int


class Refused(NamedTuple):
    """No slots for `id`. `hit`: what the look-up found, None if it was not reached. `short`: slots missing."""

    id: str
    why: RefusedWhy
    hit: int | None
    short: int


class Moved(NamedTuple):
    """Tokens ``[start, start + len(slots))`` of `id` now stand in the tree's `slots`; its own duplicates are free."""

    id: str
    start: int
    slots: np.ndarray


class Sizes(NamedTuple):
    """Tokens that are free, cached but evictable, and in use. Unlimited caches say None for `free`."""

    free: int | None
    evictable: int
    protected: int


@dataclass(slots=True)
class Answer:
    """What a golden-style operation (`start`, `decode` ...) reports; `hit_tokens` is None where no look-up happened."""

    ok: bool
    hit_tokens: int | None = None
    slots: np.ndarray = field(default_factory=lambda: NO_SLOTS)
    why: str | None = None


class Cache(Protocol):
    """The calls through which schedule/ and engine/ drive any cache."""

    policy: str
    unit: int
    num_tokens: int | None

    def add(  # noqa: D102 - described in ARCHITECTURE.md and by each cache
        self,
        id: str,
        tokens: Sequence[int] | np.ndarray,
        space: Space = EVERYONE,
        *,
        read: bool = True,
        priority: int = 0,
        max_new: int = 0,
    ) -> None: ...
    def peek(self, tokens: Sequence[int] | np.ndarray, space: Space = EVERYONE, *, read: bool = True) -> Match: ...  # noqa: D102
    def match(self, tokens: Sequence[int] | np.ndarray, space: Space = EVERYONE) -> Match: ...  # noqa: D102
    def take(self, ids: Sequence[str], budget: int | None = None, headroom: int = 0) -> list[Grant | Refused]: ...  # noqa: D102
    def commit(self, ids: Sequence[str]) -> list[Moved]: ...  # noqa: D102
    def append(self, id: str, token: int) -> None: ...  # noqa: D102
    def release(self, id: str, why: ReleaseWhy) -> None: ...  # noqa: D102
    def evict(self, tokens: int) -> int: ...  # noqa: D102
    def reset(self) -> bool: ...  # noqa: D102
    def row(self, id: str) -> Row: ...  # noqa: D102
    def sizes(self) -> Sizes: ...  # noqa: D102
    def snapshot(self) -> State: ...  # noqa: D102
    def events(self) -> list[Event]: ...  # noqa: D102
    def check_integrity(self) -> None: ...  # noqa: D102
