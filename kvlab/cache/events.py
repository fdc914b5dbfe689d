"""The vocabulary: everything that happens in a cache, as small records.

Folding them (`kvlab.cache.state.State.apply`) gives the state of the cache at any moment, so every picture can be drawn from a
live model, a replay, a recording or another server alike. An event carries arrays, one an operation, and says what is true
*afterwards*; caches build events only while somebody listens (after the first call of ``cache.events()``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

    from kvlab.cache.contract import RefusedWhy, ReleaseWhy, Space


@dataclass(frozen=True, slots=True)
class Queued:
    """A request waits; it has no slot yet."""

    id: str
    tokens: np.ndarray
    space: Space
    read: bool
    priority: int
    max_new: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request runs from now on; its first `hit` tokens are read from `slots`. `counted`: it enters the hit rate."""

    id: str
    hit: int
    slots: np.ndarray
    counted: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A request asked for slots and got none."""

    id: str
    why: RefusedWhy
    hit: int | None
    short: int


@dataclass(frozen=True, slots=True)
class Taken:
    """`units` (blocks or pages) left the free queue; `slots` joined the row of `id` at token `start`."""

    id: str
    start: int
    slots: np.ndarray
    units: np.ndarray


@dataclass(frozen=True, slots=True)
class Touched:
    """Hash blocks that were hit: one more holder each, and out of the free queue if they stood there."""

    blocks: np.ndarray


@dataclass(frozen=True, slots=True)
class Keyed:
    """Full hash blocks got their keys: vLLM's ``BlockStored``. `index`: place of the first block in its prompt."""

    id: str
    blocks: np.ndarray
    index: int
    hashes: tuple[int, ...]
    parent: int | None
    tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class Unkeyed:
    """Hash blocks lost their keys: vLLM's ``BlockRemoved``."""

    blocks: np.ndarray
    hashes: tuple[int, ...]
    why: Literal["evicted", "failed"]


@dataclass(frozen=True, slots=True)
class Freed:
    """Row slots were given up. `units` that nobody holds any more joined the free queue at its front or back."""

    units: np.ndarray
    front: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """Blocks lost one holder each (vLLM), whether or not that frees them."""

    blocks: np.ndarray


@dataclass(frozen=True, slots=True)
class Inserted:
    """A radix node was born below `parent`, holding `tokens` in `slots`. `hashes`: one a page, for SGLang's KV events."""

    node: int
    parent: int
    tokens: np.ndarray
    slots: np.ndarray
    space: Space
    hashes: tuple[int, ...]
    parent_hash: int | None


@dataclass(frozen=True, slots=True)
class Split:
    """Radix node `node` was cut at `at` tokens: `new` took its first `at` tokens and stands between it and its parent."""

    node: int
    new: int
    at: int


@dataclass(frozen=True, slots=True)
class Stamped:
    """Radix nodes and what they say now: last access, hit count, priority, creation (int64 arrays of equal length)."""

    nodes: np.ndarray
    accessed: np.ndarray
    hits: np.ndarray
    priority: np.ndarray
    created: np.ndarray


@dataclass(frozen=True, slots=True)
class Locked:
    """`node` and its ancestors below the root got `by` (+1 or -1) holders more."""

    node: int
    by: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """A whole radix leaf fell; its slots are free again."""

    node: int
    slots: np.ndarray
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """A part of the row of `id` points at the tree's slots now."""

    id: str
    start: int
    slots: np.ndarray


@dataclass(frozen=True, slots=True)
class Owned:
    """`id` reads its first `protected` tokens from the tree, through `node` (None: it reads nothing there)."""

    id: str
    node: int | None
    protected: int


@dataclass(frozen=True, slots=True)
class Written:
    """K/V of the first `written` tokens of `id` are in their slots."""

    id: str
    written: int


@dataclass(frozen=True, slots=True)
class Appended:
    """A sampled token joined the request; it has no K/V yet."""

    id: str
    token: int


@dataclass(frozen=True, slots=True)
class Released:
    """The request gave up its slots: it ended, or waits again (``preempt``)."""

    id: str
    why: ReleaseWhy


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache was emptied; `wire`: the engine says so to its listeners."""

    wire: bool = True


Event = (
    Queued
    | Admitted
    | Refused
    | Taken
    | Touched
    | Keyed
    | Unkeyed
    | Freed
    | Dropped
    | Inserted
    | Split
    | Stamped
    | Locked
    | Evicted
    | Moved
    | Owned
    | Written
    | Appended
    | Released
    | Cleared
)
