"""The probe: whether a model, run through kvlab's paged attention, gives transformers' own logits.

Most causal models of transformers let their attention be replaced; some raise, and some (Bloom) silently go on with their own, so
that nothing reaches the pool. So before an engine uses a model, two sequences go through ours and through eager attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvlab.engine.attention import TURN, PagedKV, Span, forward, kv_shapes
from kvlab.engine.errors import ModelError
from kvlab.engine.pool import Pool
from kvlab.engine.request import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from kvlab.engine.models import Loaded
    from kvlab.engine.pool import KVShape

LENGTHS = (21, 13)
CUTS = (20, 7)  # tokens of each in the first step: the second step decodes one of the first and resumes the second
SLOTS = 48


def probe(loaded: Loaded) -> None:
    """Refuse `loaded` unless two packed sequences come out as transformers' eager attention computes them.

    They are prefilled in one step, then continued in another (a decode beside a resumed prefill), over scattered slots of a pool
    full of NaN. Each layer must run our attention exactly once a step.

    Tolerance: in float32 the largest difference may be 1e-4 of the largest logit. In 16 bits transformers' own attention (as the
    model was loaded, usually SDPA) differs from eager too: ours may differ by twice that, or by four roundings of the largest
    logit if that is more. A wrong attention is off by a good part of the largest logit.

    Raises
    ------
    ModelError
        names the model and the reason.
    """
    model: Any = loaded.model
    who = f"{loaded.name} ({type(model).__name__})"
    advice = "choose a model of another architecture, such as Llama, Qwen, Gemma or Mistral."
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, loaded.vocab_size, length) for length in LENGTHS]
    try:
        eager = _plain(model, prompts, "eager")
        ours = _paged(model, kv_shapes(model), prompts)
        apart = _distance(ours, eager)
        allowed = _allowed(model, prompts, eager, loaded.dtype)
    except (MemoryError, torch.OutOfMemoryError) as error:
        msg = f"{who} is loaded, but the memory of {loaded.device} ended in its first step: take a smaller model or dtype."
        raise ModelError(msg) from error
    except EngineError as error:
        msg = f"{who} is refused: {error}"
        raise ModelError(msg) from error
    except Exception as error:
        msg = f"{who} is refused: its attention cannot be replaced by kvlab's ({type(error).__name__}: {error}); {advice}"
        raise ModelError(msg) from error
    if not apart <= allowed:  # NaN is not
        msg = (
            f"{who} is refused: its logits through kvlab's paged attention are {apart:.3g} away from eager attention's, "
            f"and rounding explains {allowed:.3g}; {advice}"
        )
        raise ModelError(msg)


def _paged(model: Any, shapes: list[KVShape], prompts: list[np.ndarray]) -> Tensor:  # noqa: ANN401 - any causal model
    """Logits of all tokens of both prompts, computed by ours in two steps."""
    pool = Pool(shapes, SLOTS, model.device, poison=True)
    slots = np.random.default_rng(1).permutation(SLOTS)
    tables = [slots[: LENGTHS[0]], slots[LENGTHS[0] : sum(LENGTHS)]]

    def step(starts: tuple[int, ...], stops: tuple[int, ...]) -> list[Tensor]:
        spans = [Span(table[:b], b - a) for table, a, b in zip(tables, starts, stops, strict=True)]
        ids = np.concatenate([ids[a:b] for ids, a, b in zip(prompts, starts, stops, strict=True)])
        logits = forward(model, ids, PagedKV(pool, spans), range(len(ids))).float()
        return list(torch.split(logits, [span.new for span in spans]))

    first, second = step((0, 0), CUTS), step(CUTS, LENGTHS)
    return torch.cat([first[0], second[0], first[1], second[1]])


def _plain(model: Any, prompts: list[np.ndarray], attention: str) -> Tensor:  # noqa: ANN401 - any causal model
    """Logits of all tokens of both prompts, each computed alone by transformers with one of its own attentions."""
    with TURN, torch.inference_mode():  # the same switch as forward's
        before = model.config._attn_implementation  # noqa: SLF001 - see attention.py
        try:
            model.config._attn_implementation = attention  # noqa: SLF001
            rows = [torch.as_tensor(ids).to(model.device)[None] for ids in prompts]
            return torch.cat([model(input_ids=row, use_cache=False).logits[0].float() for row in rows])
        finally:
            model.config._attn_implementation = before  # noqa: SLF001


def _allowed(model: Any, prompts: list[np.ndarray], eager: Tensor, dtype: torch.dtype) -> float:  # noqa: ANN401
    largest = float(eager.abs().max())
    if dtype is torch.float32:
        return 1e-4 * largest
    own = _plain(model, prompts, model.config._attn_implementation)  # noqa: SLF001
    return max(2 * _distance(own, eager), 4 * torch.finfo(dtype).eps * largest)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
