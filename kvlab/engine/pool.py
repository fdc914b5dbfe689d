"""The K/V pool: one K and one V tensor a layer, a row a slot. It knows nothing of requests, blocks or caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kvlab.engine.memory import free_memory, in_words
from kvlab.engine.request import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_TOKENS = 16_384
SHARE = 0.5  # of the free memory that a pool of no given size may take: the rest is for activations and the notebook itself


class KVShape(NamedTuple):
    """What one token's K and V look like in one layer."""

    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of one token in this layer."""
        return self.kv_heads * (self.k_dim + self.v_dim) * self.dtype.itemsize


class Pool:
    """Room for the K and V of `num_slots` tokens.

    Parameters
    ----------
    shapes : sequence of KVShape
        one a layer.
    num_slots : int
        slots 0 .. num_slots - 1; a cache's first unit is its null block or dummy page, so it needs ``num_tokens + unit``.
    device : torch.device
    poison : bool
        fill with NaN, so that reading a slot that was never written shows in the logits (for tests).

    Attributes
    ----------
    k, v : list of Tensor
        per layer, ``[num_slots, kv_heads, head_dim]`` in the layer's dtype.

    Raises
    ------
    EngineError
        if the device's free memory cannot hold it; nothing was allocated then.
    """

    def __init__(self, shapes: Sequence[KVShape], num_slots: int, device: torch.device, *, poison: bool = False) -> None:
        need = num_slots * bytes_per_token(shapes)
        free = free_memory(device)
        if need > free:
            some = int(free * SHARE) // bytes_per_token(shapes)
            some -= some % (1024 if some > 1024 else 1)  # every usual block or page divides it
            what_else = f"ask for fewer tokens, such as num_tokens={some}" if some else "end what else uses the memory"
            msg = (
                f"a pool of {num_slots:,} slots needs {in_words(need)} ({bytes_per_token(shapes):,} bytes a token) and "
                f"{in_words(free)} are free on {device}: {what_else}."
            )
            raise EngineError(msg)
        self.num_slots = num_slots
        self.bytes = need
        # empty, not zeros: memory that no request ever touches is then never claimed from the system
        self.k = [torch.empty(num_slots, s.kv_heads, s.k_dim, dtype=s.dtype, device=device) for s in shapes]
        self.v = [torch.empty(num_slots, s.kv_heads, s.v_dim, dtype=s.dtype, device=device) for s in shapes]
        if poison:
            self.poison()

    def poison(self, slots: Sequence[int] | None = None) -> None:
        """Fill `slots` (all, if None) with NaN: whoever reads them before they are written gets NaN logits."""
        where: slice | list[int] = slice(None) if slots is None else list(slots)
        for tensor in (*self.k, *self.v):
            tensor[where] = float("nan")


def bytes_per_token(shapes: Sequence[KVShape]) -> int:
    """Bytes of K and V of one token over all layers."""
    return sum(s.bytes for s in shapes)


def default_tokens(shapes: Sequence[KVShape], device: torch.device, unit: int) -> int:
    """Return the size of a pool that nobody chose: 16,384 tokens, or half of the free memory if that is less.

    Whole units (blocks or pages), at least one.
    """
    tokens = min(DEFAULT_TOKENS, int(free_memory(device) * SHARE) // bytes_per_token(shapes))
    return max(tokens // unit, 1) * unit
