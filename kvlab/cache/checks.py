"""Questions that every cache asks of what it is given, before anything changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsInt, get_args

import numpy as np

from kvlab.cache.contract import CacheError, ReleaseWhy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

MAX_TOKEN = 2**31 - 1
MAX_PRIORITY = 2**31 - 1
NO_BUDGET = 1 << 62


def token_array(tokens: Sequence[int] | np.ndarray, what: str) -> np.ndarray:
    """Return `tokens` as an int32 array of its own; refuse what are no token ids, in words."""
    try:
        array = np.array(tokens) if len(tokens) else np.empty(0, dtype=np.int32)
    except (TypeError, ValueError):  # it has no length, or holds lists of unequal lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        msg = f"{what} must be a flat list of token ids (whole numbers)."
        raise CacheError(msg)
    if len(array) and (array.min() < 0 or array.max() > MAX_TOKEN):
        bad = int(np.flatnonzero((array < 0) | (array > MAX_TOKEN))[0])
        msg = f"{what} holds {array[bad]} at position {bad}: token ids run from 0 to {MAX_TOKEN:,}."
        raise CacheError(msg)
    return array.astype(np.int32)


def token(value: int, id: str) -> int:
    """Return the token that request `id` sampled, as an int; refuse what is none."""
    return size(value, f"the token appended to request {id!r}", 0, MAX_TOKEN)


def size(value: SupportsInt, name: str, least: int = 1, most: int | None = None) -> int:
    """Return `value` if it is a whole number within the bounds; refuse it in words otherwise."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or int(value) < least or (most is not None and int(value) > most):
        bounds = f"of at least {least:,}" if most is None else f"from {least:,} to {most:,}"
        msg = f"{name} is {value!r}: it must be a whole number {bounds}."
        raise CacheError(msg)
    return int(value)


def capacity(num_tokens: int | None, unit: int, name: str) -> int | None:
    """Return the tokens of a pool; refuse what whole blocks or pages cannot fill. None is unlimited."""
    if num_tokens is None:
        return None
    if size(num_tokens, "num_tokens") % unit:
        msg = f"num_tokens is {num_tokens:,}: make it a multiple of the {name} {unit}."
        raise CacheError(msg)
    return int(num_tokens)


def prompt(id: str, tokens: Sequence[int] | np.ndarray, here: Collection[str], priority: int, max_new: int) -> np.ndarray:
    """Return the prompt of a request that may join those that are `here` (int32); refuse it otherwise."""
    if id in here:
        msg = f"request {id!r} is here already: finish it first or choose another id."
        raise CacheError(msg)
    array = token_array(tokens, f"the prompt of request {id!r}")
    if not len(array):
        msg = f"the prompt of request {id!r} is empty: give it at least one token."
        raise CacheError(msg)
    size(priority, f"the priority of request {id!r}", -MAX_PRIORITY, MAX_PRIORITY)
    size(max_new, f"max_new of request {id!r}", 0)
    return array


def batch(ids: Collection[str], budget: int | None, headroom: int) -> int:
    """Return the budget of a batch as a number; refuse a batch that names a request twice, and limits below 0."""
    if len(set(ids)) != len(ids):
        msg = f"a batch names a request twice: {list(ids)}; name each once."
        raise CacheError(msg)
    size(headroom, "headroom", 0)
    return NO_BUDGET if budget is None else size(budget, "budget", 0)


def why(value: str) -> None:
    """Refuse an end that the contract does not know."""
    if value not in get_args(ReleaseWhy):
        msg = f"a request cannot be released for {value!r}: choose one of {', '.join(get_args(ReleaseWhy))}."
        raise CacheError(msg)
