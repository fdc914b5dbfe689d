"""The article's four situations on a live model, under both caches: what `kvlab demo` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlab.engine.engine import Engine
from kvlab.engine.request import EngineError, Request
from kvlab.situations import Layout, Writer
from kvlab.views.strings import POLICY
from kvlab.views.summary import why

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvlab.engine.models import Loaded
    from kvlab.engine.request import Result

__all__ = ["POLICY", "Side", "Situation", "situations"]

POLICIES = ("vllm", "sglang")
POOL = 4096  # tokens
WARM_ANSWER = 1  # token; the first request only fills the cache
ANSWER = 4
LONG_ANSWER = {"cpu": 200, "cuda": 2000, "mps": 2000}
FULL_ANSWER = 2000

# the article's "after" is after the shared part: what a Layout calls between
LAYOUTS = {
    "shared_first": Layout("none"),
    "timestamp_first": Layout("before"),
    "timestamp_after": Layout("between"),
    "long_answer": Layout("none"),
}


@dataclass(frozen=True, slots=True)
class Side:
    """The second request of a situation under one policy. `full_seconds`: of an equally long prompt that reused nothing."""

    cached_tokens: int
    prefill_seconds: float
    decode_seconds: float
    output_tokens: int
    full_seconds: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Situation:
    """One row of the demo."""

    name: str
    prompt_tokens: int
    sides: dict[str, Side]

    def plain(self) -> dict[str, Any]:
        """Return the object that ``kvlab demo --json`` prints."""
        keys = ("cached_tokens", "prefill_seconds", "decode_seconds", "output_tokens")
        sides = {p: {k: getattr(side, k) for k in keys} for p, side in self.sides.items()}
        return {"situation": self.name, "prompt_tokens": self.prompt_tokens, **sides}


def situations(
    loaded: Loaded, *, long_answer: int | None = None, tell: Callable[[str], None] = lambda _: None
) -> Iterator[Situation]:
    """Run the four situations, one after the other, and yield each as it is measured.

    The caches stay as they are in between, as a server's do: what one situation has computed, the next one may reuse.

    Parameters
    ----------
    loaded : Loaded
        the model; both engines share its weights.
    long_answer : int, optional
        tokens of the long answer; 200 on a CPU and 2,000 on a GPU unless given.
    tell : callable
        is told in a few words what is being done.

    Raises
    ------
    EngineError
        for a model that the engine cannot run, or a request that failed, with the reason.
    """
    try:
        writer = Writer(loaded.tokenizer, loaded.vocab_size)
    except ValueError as error:
        raise EngineError(str(error)) from None
    engines = {policy: Engine(loaded, cache=policy, num_tokens=POOL) for policy in POLICIES}
    for engine in engines.values():  # the very first pass pays for things that have nothing to do with caching
        tell("warming up")
        engine.generate([list(range(64))], max_new_tokens=2, ignore_eos=True)
        engine.reset()
    full: dict[tuple[str, int], float] = {}  # seconds of prefill that found nothing, by policy and length
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        answer = (long_answer or LONG_ANSWER[loaded.device.type]) if name == "long_answer" else ANSWER
        sides = {}
        for policy, engine in engines.items():
            tell(f"{name}: {policy}")
            for which, length in ((2 * number, WARM_ANSWER), (2 * number + 1, answer)):
                result = _ask(engine, writer, layout, which, length)
                if not result.cached_tokens:
                    full[policy, result.prompt_tokens] = result.prefill_seconds or 0.0
            records = list(engine.trace.records.values())
            reason = why(records[-1], engine.cache.unit, policy, records[:-1])
            sides[policy] = Side(
                result.cached_tokens or 0,
                result.prefill_seconds or 0.0,
                result.decode_seconds,
                len(result.output_ids),
                full.get((policy, result.prompt_tokens)),
                reason,
            )
        yield Situation(name, result.prompt_tokens, sides)


def _ask(engine: Engine, writer: Writer, layout: Layout, number: int, answer: int) -> Result:
    prompt = writer.prompt(layout, number)
    (result,) = engine.generate([Request(prompt, max_new_tokens=answer, ignore_eos=True)])
    if result.outcome != "length":
        raise EngineError(result.reason)
    return result
