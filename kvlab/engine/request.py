"""What the engine is asked and what it answers: `Request`, `Sampling`, `Result`. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlab.cache.contract import Stopped
    from kvlab.prompts import Part


class EngineError(RuntimeError):
    """The engine cannot do what it was asked: one sentence that says what, where and what to do."""


class RequestError(EngineError, ValueError):
    """A request that cannot run; it was refused before anything changed."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The default is greedy.

    Attributes
    ----------
    temperature : float
        0 takes the likeliest token.
    top_p : float
        sample among the likeliest tokens that together have this probability, in (0, 1].
    top_k : int
        sample among this many likeliest tokens; 0: all.
    seed : int or None
        the same seed gives the same tokens, whatever else runs beside; None: other ones each time.

    Raises
    ------
    RequestError
        for a value that means nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, good, want in (
            (
                "temperature",
                _is_number(self.temperature) and 0 <= self.temperature < float("inf"),
                "a number from 0 (greedy)",
            ),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("top_k", _is_whole(self.top_k) and self.top_k >= 0, "a whole number, 0 for no limit"),
            ("seed", self.seed is None or (_is_whole(self.seed) and abs(self.seed) < 2**63), "a whole number of 64 bits or None"),
        ):
            if not good:
                msg = f"sampling: {name} is {getattr(self, name)!r} and must be {want}."
                raise RequestError(msg)


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_whole(value) or isinstance(value, (float, np.floating))


@dataclass(slots=True)
class Request:
    """A prompt and how to continue it.

    Attributes
    ----------
    prompt : token ids, str, list of chat messages, or kvlab.prompts.Prompt
        messages are rendered by the model's chat template with the generation prompt.
    max_new_tokens : int or None
        None: what `Engine.generate` was given.
    salt, lora, extra_key : str, str or (name, path), str
        K/V are shared only among requests that agree in these. No adapter is loaded: `lora` is a name in the cache's keys.
    priority : int
        kept by SGLang's tree for its eviction; vLLM's default order (first come, first served) does not look at it.
    read : bool
        False: does not read the cache, as vLLM's prompt_logprobs does.
    sampling : Sampling or mapping
        ``Sampling(temperature=0.8, seed=1)``, or the same as a dict.
    stop_token_ids : sequence of int
        end here, beside the model's own end tokens.
    ignore_eos : bool or None
        go on after the model's end tokens; None: what `Engine.generate` was given.
    parts : sequence of Part
        where the prompt's tokens come from, for the pictures.
    id : str or None
        its name in the trace; None: the engine counts, "1", "2" ...
    """

    prompt: Any
    max_new_tokens: int | None = None
    salt: str | None = None
    lora: str | tuple[str, str] | None = None
    extra_key: str | None = None
    priority: int = 0
    read: bool = True
    sampling: Sampling | Mapping[str, Any] = field(default_factory=Sampling)
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    parts: Sequence[Part] = ()
    id: str | None = None

    def __post_init__(self) -> None:
        if self.id is not None and (not isinstance(self.id, str) or not self.id):
            msg = f"a request's id is a text that is not empty, not {self.id!r}: give one, or none and the engine counts."
            raise RequestError(msg)
        if isinstance(self.sampling, Mapping):
            unknown = [name for name in self.sampling if name not in Sampling.__slots__]
            if unknown:
                msg = f"sampling: {unknown[0]!r} is unknown; it takes {', '.join(Sampling.__slots__)}."
                raise RequestError(msg)
            self.sampling = Sampling(**self.sampling)


@dataclass(slots=True)
class Result:
    """What became of a request. Times in seconds.

    Attributes
    ----------
    text : str
        the answer, without special tokens; empty if the model has no tokenizer.
    output_ids : list of int
        the answer's tokens, a stop token included.
    cached_tokens : int or None
        prompt tokens that its first admission found cached; None if it was never admitted.
    ttft : float or None
        submitted to first token.
    prefill_seconds : float or None
        first scheduled to first token.
    decode_seconds : float
        time of the steps that decoded for it; `estimated` if some of them also prefilled, so that only a share counts.
    outcome : "stop", "length", "abort", "refused" or "failed"
    stopped : Stopped or None
        why the match of its first admission ended where it did.
    reason : str
        in words, unless it ended by itself.
    """

    id: str
    text: str
    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int | None
    ttft: float | None
    prefill_seconds: float | None
    decode_seconds: float
    outcome: str
    stopped: Stopped | None = None
    reason: str = ""
    estimated: bool = False

    def rows(self) -> list[tuple[str, str]]:
        """Return the table that it shows itself as."""
        cached = "-" if self.cached_tokens is None else f"{self.cached_tokens:,} of {self.prompt_tokens:,}"
        return [
            ("cached tokens", cached),
            ("output tokens", f"{len(self.output_ids):,}"),
            ("time to first token", _seconds(self.ttft)),
            ("prefill", _seconds(self.prefill_seconds)),
            ("decode", _seconds(self.decode_seconds) + (" (estimated)" if self.estimated else "")),
            ("ended by", self.outcome + (f": {self.reason}" if self.reason else "")),
            ("text", self.text),
        ]

    def __repr__(self) -> str:
        """Say the same in a line."""
        return f"Result({self.id}: " + ", ".join(f"{name} {value!r}" for name, value in self.rows()) + ")"

    def _repr_html_(self) -> str:
        return html_table(f"Result {self.id}", self.rows())


def html_table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a two-column table in which everything shows as typed."""
    left = "style='text-align:left;white-space:pre-wrap' class='tex2jax_ignore mathjax_ignore'"  # so that $x$ stays as it is
    body = "".join(f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(title)}</caption><tbody>{body}</tbody></table>"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s" if value >= 0.1 else f"{value * 1000:.1f} ms"
