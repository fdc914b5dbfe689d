"""From logits to the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvlab.engine.request import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvlab.engine.request import Sampling

COLDEST = 1e-5  # below this temperature the division overflows and the likeliest token is certain anyway


class Sampler:
    """Draws one request's tokens; a generator of its own makes a seed mean the same in any company."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.generator = torch.Generator()
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        """The likeliest token, always."""
        return self.sampling.temperature < COLDEST

    def pick(self, logits: Tensor) -> int:
        """Draw from one row of logits, shape ``(vocabulary,)``: top-k first, then top-p of what is left."""
        scores = logits.float().cpu() / self.sampling.temperature
        scores, ids = scores.topk(min(self.sampling.top_k or len(scores), len(scores)))
        chance = scores.softmax(-1)
        chance[chance.cumsum(-1) - chance >= self.sampling.top_p] = 0
        return int(ids[torch.multinomial(chance, 1, generator=self.generator)])


def choose(logits: Tensor, names: Sequence[str], samplers: Sequence[Sampler | None]) -> dict[str, int]:
    """Choose the next token of each row that has a sampler.

    Parameters
    ----------
    logits : Tensor, shape (len(names), vocabulary)
    names : sequence of str
        ids of the requests.
    samplers : sequence of Sampler or None
        None: the prompt is not through yet, nothing is sampled; its logits must be sound all the same.

    Raises
    ------
    EngineError
        if a row holds NaN or infinity: its K/V cannot be trusted either.
    """
    likeliest, sound = torch.stack([logits.argmax(-1), logits.isfinite().all(-1).long()]).tolist()  # the one wait for the device
    wrong = [name for name, good in zip(names, sound, strict=True) if not good]
    if wrong:
        msg = f"the model's logits for {', '.join(wrong)} are not finite (NaN or infinity): try dtype float32, or another model."
        raise EngineError(msg)
    return {
        name: likeliest[row] if sampler.greedy else sampler.pick(logits[row])
        for row, (name, sampler) in enumerate(zip(names, samplers, strict=True))
        if sampler is not None
    }
