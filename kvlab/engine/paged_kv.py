"""K and V of one step: where they are written, and how each request's queries read them through its slots."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvlab.engine.pool import Pool

SHORT = 512  # slots: shorter rows are gathered and padded into one call (measured on a CPU: above, a call a row is faster)
MEAN_RUN = 8  # slots: rows of longer runs are copied run by run, others slot by slot


class Span(NamedTuple):
    """One request's share of a step: its last `new` tokens are computed now.

    `slots` (int64) holds the slot of every token from 0 to the last new one; K and V of the new tokens are written to the
    last `new` of them.
    """

    slots: np.ndarray
    new: int

    @property
    def start(self) -> int:
        """Position of the first new token."""
        return len(self.slots) - self.new


class How(NamedTuple):
    """How a layer wants its scores: scale (None: 1/sqrt(head_dim)), soft cap, and how many tokens back a query sees."""

    scale: float | None
    softcap: float | None
    window: int | None


@dataclass(slots=True)
class _Rows:
    """Where a piece's keys stand in the pool: runs of neighbouring slots, or an index."""

    runs: list[tuple[int, int]]
    index: Tensor | None

    @classmethod
    def of(cls, slots: np.ndarray, device: torch.device) -> _Rows:
        cuts = np.flatnonzero(np.diff(slots) != 1) + 1
        if len(slots) < MEAN_RUN * (len(cuts) + 1) and len(cuts):
            return cls([], torch.as_tensor(slots).to(device))
        edges = [0, *cuts.tolist(), len(slots)]
        return cls([(int(slots[a]), int(slots[a]) + b - a) for a, b in pairwise(edges)], None)

    def read(self, pool: Tensor) -> Tensor:
        """Keys or values ``[length, kv_heads, dim]``: a view where the slots are neighbours, a copy otherwise."""
        if self.index is not None:
            return pool.index_select(0, self.index)
        if len(self.runs) == 1:
            return pool[self.runs[0][0] : self.runs[0][1]]
        return torch.cat([pool[a:b] for a, b in self.runs])


@dataclass(slots=True)
class _Alone:
    """One span: its queries are rows ``[begin, end)`` of the step. Without a mask: causal, or one query that sees all."""

    begin: int
    end: int
    rows: _Rows
    mask: Tensor | None

    def attend(self, out: Tensor, query: Tensor, k: Tensor, v: Tensor, how: How) -> None:
        k, v = self.rows.read(k).transpose(0, 1), self.rows.read(v).transpose(0, 1)
        heads, groups, new = query.shape[0], query.shape[0] // k.shape[0], self.end - self.begin
        q = query[:, self.begin : self.end]
        if new == 1:  # the query heads of a group stand in for queries: K and V are read once for all of them
            o = _attend(q.reshape(1, -1, groups, q.shape[-1]), k[None], v[None], self.mask, how)
            out[self.begin] = o.reshape(heads, -1)
            return
        # kv heads are the batch, and a group shares its K and V without copying them (stride 0)
        k, v = (x[:, None].expand(-1, groups, -1, -1) for x in (k, v))
        o = _attend(q.reshape(-1, groups, new, q.shape[-1]), k, v, self.mask, how, causal=self.mask is None)
        out[self.begin : self.end] = o.reshape(heads, new, -1).transpose(0, 1)


@dataclass(slots=True)
class _Together:
    """Several spans of one query each, gathered and padded to the longest: one call instead of many."""

    queries: Tensor
    index: Tensor
    mask: Tensor

    def attend(self, out: Tensor, query: Tensor, k: Tensor, v: Tensor, how: How) -> None:
        count, heads, kv_heads = len(self.queries), query.shape[0], k.shape[1]
        k, v = (x.index_select(0, self.index).view(count, -1, kv_heads, x.shape[-1]).transpose(1, 2) for x in (k, v))
        q = query.index_select(1, self.queries).transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, -1)
        out[self.queries] = _attend(q, k, v, self.mask, how).reshape(count, heads, -1)


class PagedKV:
    """K and V of one step: where its requests' tokens stand in `pool`, and how each of its queries reads them.

    In every layer all K and V of the step are written before any is read, so a request may read what another one writes in
    the same step (docs/vllm.md 12).

    Attributes
    ----------
    calls : list of int
        how often each layer came through; 1 everywhere after a forward.
    """

    def __init__(self, pool: Pool, spans: Sequence[Span]) -> None:
        self.pool = pool
        self.spans = spans
        self.calls = [0] * len(pool.k)
        self._write = _Rows.of(np.concatenate([span.slots[span.start :] for span in spans]), pool.k[0].device)
        self._plans: dict[int | None, list[_Alone | _Together]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Write this layer's K and V, then read: ``(1, heads, T, dim)`` in, ``(T, heads, dim)`` out."""
        k, v = self.pool.k[layer], self.pool.v[layer]
        self._put(k, key[0].transpose(0, 1))
        self._put(v, value[0].transpose(0, 1))
        if how.window not in self._plans:
            self._plans[how.window] = self._plan(how.window, query)
        out = query.new_empty(query.shape[2], query.shape[1], v.shape[2])
        for piece in self._plans[how.window]:
            piece.attend(out, query[0], k, v, how)
        return out

    def _put(self, pool: Tensor, new: Tensor) -> None:
        if self._write.index is not None:
            pool.index_copy_(0, self._write.index, new.to(pool.dtype))
            return
        at = 0
        for first, last in self._write.runs:
            pool[first:last] = new[at : at + last - first]
            at += last - first

    def _plan(self, window: int | None, query: Tensor) -> list[_Alone | _Together]:
        """Choose once, for all layers of this window, how each span reads its keys."""
        plan: list[_Alone | _Together] = []
        short: list[tuple[int, np.ndarray]] = []
        at = 0
        for span in self.spans:
            low = 0 if window is None else max(0, span.start - window + 1)  # the first key that the first new token sees
            slots = span.slots[low:]
            if span.new == 1 and (len(slots) <= SHORT or query.is_cuda):
                short.append((at, slots))
            else:
                plan.append(_Alone(at, at + span.new, _Rows.of(slots, query.device), _mask(span, low, window, query)))
            at += span.new
        if len(short) == 1:
            at, slots = short[0]
            plan.append(_Alone(at, at + 1, _Rows.of(slots, query.device), None))
        elif short:
            plan.append(_together(short, query))
        return plan


def _mask(span: Span, low: int, window: int | None, like: Tensor) -> Tensor | None:
    """0 where query i may see key ``low + j``, -inf elsewhere; None where causality (or nothing) says it all."""
    narrow = window is not None and len(span.slots) - low > window
    if span.new == 1 or (span.start == 0 and not narrow):
        return None
    i = torch.arange(span.start, len(span.slots), device=like.device)[:, None]
    j = torch.arange(low, len(span.slots), device=like.device)[None]
    hidden = j > i
    if narrow:
        hidden |= j <= i - window  # type: ignore[operator]
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


def _together(short: list[tuple[int, np.ndarray]], like: Tensor) -> _Together:
    longest = max(len(slots) for _, slots in short)
    lengths = np.array([len(slots) for _, slots in short])
    # padding repeats a slot of the row's own: 0 times whatever a never written slot holds could be NaN
    index = np.stack([np.pad(slots, (0, longest - len(slots)), mode="edge") for _, slots in short])
    hidden = torch.as_tensor(np.arange(longest)[None] >= lengths[:, None]).to(like.device)
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
    queries = torch.as_tensor(np.array([at for at, _ in short])).to(like.device)
    return _Together(queries, torch.as_tensor(index.reshape(-1)).to(like.device), mask[:, None, None])


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: How, *, causal: bool = False) -> Tensor:
    """SDPA, or written out where a layer caps its scores. Query dtype wins: a pool may hold another one."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    if how.softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=how.scale)
    scale = q.shape[-1] ** -0.5 if how.scale is None else how.scale
    scores = torch.tanh(q @ k.transpose(-1, -2) * scale / how.softcap) * how.softcap
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
