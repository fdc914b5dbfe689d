"""SGLang's eviction keys: which unlocked leaf falls first (docs/sglang.md 17). Smallest key first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvlab.cache.contract import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable


class Leaf(Protocol):
    """What an eviction key may look at."""

    hits: int
    priority: int
    accessed: int
    created: int


SLRU_PROTECTED = 2  # hits from which a node counts as protected

POLICIES: dict[str, Callable[[Leaf], tuple[int, ...]]] = {
    "lru": lambda n: (n.accessed,),
    "lfu": lambda n: (n.hits, n.accessed),
    "slru": lambda n: (int(n.hits >= SLRU_PROTECTED), n.accessed),
    "priority": lambda n: (n.priority, n.accessed),
    "fifo": lambda n: (n.created,),
    "mru": lambda n: (-n.accessed,),
    "filo": lambda n: (-n.created,),
}


def eviction_key(policy: str) -> Callable[[Leaf], tuple[int, ...]]:
    """Return the key function of `policy`.

    Raises
    ------
    CacheError
        for a policy that SGLang does not know.
    """
    if policy not in POLICIES:
        msg = f"eviction policy {policy!r} is not one of SGLang's: choose one of {', '.join(POLICIES)}."
        raise CacheError(msg)
    return POLICIES[policy]
