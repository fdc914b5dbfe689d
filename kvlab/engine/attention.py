"""Paged attention for transformers' own models: K and V go to and come from a pool, through each request's slots.

A step packs the new tokens of all its requests into ONE row ``(1, T)``. transformers' `AttentionInterface` calls
`paged_attention` in each layer with the keyword `kv` that `forward` passed in, so nothing global belongs to a step and engines
may share a model. The interface is switched to ours only inside `forward`: otherwise a model has its own attention and logits.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlab.engine.paged_kv import How, PagedKV, Span
from kvlab.engine.pool import KVShape
from kvlab.engine.request import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

__all__ = ["NAME", "TURN", "PagedKV", "Span", "forward", "kv_shapes", "paged_attention"]

NAME = "kvlab"

TURN = threading.RLock()  # the switch is a field of the model's config: one forward at a time
_here = threading.local()


class KV(Protocol):
    """What travels with a forward as the keyword `kv`."""

    calls: list[int]

    @property
    def spans(self) -> Sequence[Span]: ...
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor: ...


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
    with TURN:
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
