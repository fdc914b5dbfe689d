"""Questions that every cache asks of what it is given, before anything changes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvlab.cache.contract import CacheError

MAX_TOKEN = 2**31 - 1


def token_array(tokens: Sequence[int] | np.ndarray, what: str) -> np.ndarray:
    """Return `tokens` as an int32 array of its own; refuse what are no token ids, in words."""
    array = np.array(tokens) if len(tokens) else np.empty(0, dtype=np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        msg = f"{what} must be a flat list of token ids (whole numbers)."
        raise CacheError(msg)
    if len(array) and (array.min() < 0 or array.max() > MAX_TOKEN):
        bad = int(np.flatnonzero((array < 0) | (array > MAX_TOKEN))[0])
        msg = f"{what} holds {array[bad]} at position {bad}: token ids run from 0 to {MAX_TOKEN:,}."
        raise CacheError(msg)
    return array.astype(np.int32)


def size(value: object, name: str, least: int = 1) -> int:
    """Return `value` if it is a whole number of at least `least`; refuse it in words otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        msg = f"{name} is {value!r}: it must be a whole number of at least {least}."
        raise CacheError(msg)
    return int(value)


def distinct(ids: Collection[str]) -> None:
    """Refuse a batch that names a request twice."""
    if len(set(ids)) != len(ids):
        msg = f"a batch names a request twice: {list(ids)}; name each once."
        raise CacheError(msg)
