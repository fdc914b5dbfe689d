"""Paged attention for transformers' own models: K and V go to and come from a pool, through each request's slots.

A step packs the new tokens of all its requests into ONE row ``(1, T)``. transformers' `AttentionInterface` calls
`paged_attention` in each layer with the keyword `kv` that `forward` passed in, so nothing global belongs to a step and engines
may share a model. The interface is switched to ours only inside `forward`: otherwise a model has its own attention and logits.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlab.engine.pool import KVShape
from kvlab.engine.request import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from kvlab.engine.pool import Pool

NAME = "kvlab"
SHORT = 512  # slots: shorter rows are gathered and padded into one call (measured on a CPU: above, a call a row is faster)
MEAN_RUN = 8  # slots: rows of longer runs are copied run by run, others slot by slot

_TURN = threading.RLock()  # the switch is a field of the model's config: one forward at a time
_here = threading.local()


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


class KV(Protocol):
    """What travels with a forward as the keyword `kv`."""

    calls: list[int]

    @property
    def spans(self) -> Sequence[Span]: ...  # noqa: D102
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor: ...  # noqa: D102


class How(NamedTuple):
    """How a layer wants its scores: scale (None: 1/sqrt(head_dim)), soft cap, and how many tokens back a query sees."""

    scale: float | None
    softcap: float | None
    window: int | None


def forward(model: nn.Module, ids: np.ndarray, kv: KV, keep: Sequence[int]) -> Tensor:
    """Run `model` once over the packed row `ids`, reading and writing K and V through `kv`.

    Parameters
    ----------
    model : PreTrainedModel
        a causal LM of transformers, in eval mode.
    ids : int64 array, shape (T,)
        the new tokens of all spans, in the order of ``kv.spans``.
    kv : KV
        a `PagedKV`, made for this one step.
    keep : sequence of int
        rows of the step whose logits are wanted.

    Returns
    -------
    Tensor, shape (len(keep), vocabulary)
        on the model's device, in its dtype.

    Raises
    ------
    EngineError
        if a layer did not run our attention exactly once: its K and V would be missing in the pool, its logits wrong.
    """
    device = next(model.parameters()).device
    positions = np.concatenate([np.arange(span.start, len(span.slots)) for span in kv.spans])
    rows = torch.as_tensor(np.asarray(keep, dtype=np.int64)).to(device)
    with _ours(model), torch.inference_mode():
        logits: Tensor = model(
            input_ids=torch.as_tensor(ids).to(device)[None],
            position_ids=torch.as_tensor(positions).to(device)[None],
            use_cache=False,
            kv=kv,
            logits_to_keep=rows,
        ).logits[0]
    if any(count != 1 for count in kv.calls):
        layer, calls = next((i, count) for i, count in enumerate(kv.calls) if count != 1)
        msg = (
            f"{type(model).__name__} cannot run here: its layer {layer} called kvlab's attention {calls} times instead of once, "
            "so its K and V would not reach the pool; choose another model."
        )
        raise EngineError(msg)
    return logits if len(logits) == len(keep) else logits[rows]  # some models ignore logits_to_keep


def kv_shapes(model: nn.Module) -> list[KVShape]:
    """Ask the model itself, with one token, what its K and V look like in each layer."""
    seen = _Shapes(model.config.get_text_config().num_hidden_layers)  # type: ignore[union-attr, operator]
    forward(model, np.zeros(1, dtype=np.int64), seen, [0])
    return [shape for shape in seen.shapes if shape is not None]


def paged_attention(  # noqa: PLR0917 - transformers calls it so
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    kv: KV | None = None,
    **options: Any,  # noqa: ANN401 - whatever a model's attention passes on
) -> tuple[Tensor, None]:
    """Attend over paged K and V; the function behind ``attn_implementation="kvlab"``.

    Parameters
    ----------
    query : Tensor, shape (1, heads, T, head_dim)
    key, value : Tensor, shape (1, kv_heads, T, head_dim)
        of the packed row.
    kv : KV or None
        None: somebody else's call of the model while a step runs in another thread; it gets plain attention.

    Returns
    -------
    (Tensor, None)
        shape (1, T, heads, head_dim).
    """
    if kv is None:
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return plain(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options)  # type: ignore[no-any-return]
    strange = [name for name in ("s_aux", "position_bias") if options.get(name) is not None]
    if strange:
        msg = f"{type(module).__name__} needs {strange[0]}, which kvlab's paged attention lacks: choose another model."
        raise EngineError(msg)
    layer: int = module.layer_idx  # type: ignore[assignment]
    how = How(scaling, options.get("softcap"), options.get("sliding_window"))
    kv.calls[layer] += 1
    return kv.attend(layer, query, key, value, how)[None], None


def _no_mask(*args: Any, **kwargs: Any) -> Tensor | None:  # noqa: ANN401 - transformers' own signature, passed through
    """Each span masks for itself; only other people's calls need transformers' mask."""
    if getattr(_here, "inside", False):
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)  # type: ignore[no-any-return]


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, _no_mask)


@contextmanager
def _ours(model: nn.Module) -> Iterator[None]:
    """Let `model` run our attention in this thread, and its own again afterwards."""
    config: Any = model.config
    with _TURN:
        before = config._attn_implementation  # noqa: SLF001 - transformers' switch has no public setter without a warning
        try:
            _here.inside = True
            config._attn_implementation = NAME  # noqa: SLF001
            yield
        finally:
            config._attn_implementation = before  # noqa: SLF001
            _here.inside = False


class _Shapes:
    """Stands in for a pool to learn the shapes: one token attends to itself, so the output is its own V."""

    def __init__(self, layers: int) -> None:
        self.spans = [Span(np.zeros(1, dtype=np.int64), 1)]
        self.calls = [0] * layers
        self.shapes: list[KVShape | None] = [None] * layers

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:  # noqa: ARG002
        self.shapes[layer] = KVShape(key.shape[1], key.shape[3], value.shape[3], key.dtype)
        return value[0].repeat_interleave(query.shape[1] // key.shape[1], dim=0).transpose(0, 1)


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
    the same step (semantics/vllm.md 12).

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
