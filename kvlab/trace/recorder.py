"""What happened, step by step: the recorder, and the trace that every picture is drawn from."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvlab.cache import events as ev

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvlab.cache.contract import Cache, Stopped
    from kvlab.cache.events import Event
    from kvlab.cache.state import State
    from kvlab.prompts import Part


@dataclass(slots=True)
class Step:
    """One forward pass. Times in seconds since the trace began.

    Attributes
    ----------
    index : int
        counts all steps of the trace, also those that it no longer keeps.
    prefilled : dict of str to int
        tokens computed of prompts (and of preempted answers), per request.
    decoded : tuple of str
        requests that got their next token's K/V.
    evicted : int
        tokens that were cached before and are no longer.
    reused : dict of str to int
        tokens that the requests admitted in this step found cached.
    prefill_seconds, decode_seconds : float
        of ``end - begin``; in a mixed step shared out by tokens, so an estimate.
    sampled : dict of str to int
        the tokens that came out of it.
    ended : dict of str to str
        requests that ended with it, and how.
    """

    index: int
    kind: Literal["prefill", "decode", "mixed"]
    begin: float
    end: float
    prefilled: dict[str, int]
    decoded: tuple[str, ...]
    evicted: int = 0
    reused: dict[str, int] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    sampled: dict[str, int] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)

    @property
    def estimated(self) -> bool:
        """The split into prefill and decode is not measured."""
        return self.kind == "mixed"


@dataclass(slots=True)
class Record:
    """One request as the pictures tell of it. Times in seconds since the trace began, None while they have not come.

    Attributes
    ----------
    tokens : list of int
        prompt and output so far.
    parts : tuple of Part
        where the prompt's tokens come from; the output is ``generated``.
    cached_tokens : int or None
        tokens that its first admission found cached; None while it waits.
    stopped : Stopped or None
        why the match ended there.
    outcome : str or None
        ``stop``, ``length``, ``abort``, ``refused`` or ``failed`` once it ended.
    prefill_seconds, decode_seconds : float
        time of its prefill steps (first scheduled to first token) and of its decode steps.
    estimated : bool
        some of its decode steps also prefilled, so that only a share of them counts.
    reason : str
        in words, unless it ended by itself.
    """

    id: str
    tokens: list[int]
    prompt_tokens: int
    parts: tuple[Part, ...] = ()
    cached_tokens: int | None = None
    stopped: Stopped | None = None
    submitted: float = 0.0
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    outcome: str | None = None
    estimated: bool = False
    reason: str = ""

    @property
    def output_tokens(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - self.prompt_tokens

    def source(self, position: int) -> str:
        """Return where the token at `position` comes from."""
        if position >= self.prompt_tokens:
            return "generated"
        return next((p.source for p in self.parts if p.start <= position < p.stop), "question")


@dataclass
class Trace:
    """A base state and all events since, the steps and the requests; `at` folds the state after a step."""

    base: State
    events: list[Event] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    records: dict[str, Record] = field(default_factory=dict)

    def at(self, index: int) -> State:
        """Return the state after the step of this `Step.index` (-1: before the first).

        Raises
        ------
        IndexError
            for a step that is not there: never run, or so old that its events are folded away.
        """
        place = bisect_right(self.steps, index, key=lambda step: step.index)
        there = place > 0 and self.steps[place - 1].index == index
        first = self.steps[0].index if self.steps else 0
        if not there and index != first - 1:
            kept = f"steps {first} to {self.steps[-1].index} are" if self.steps else "no step is"
            msg = f"step {index} is not in the trace: {kept} kept."
            raise IndexError(msg)
        return self.base.copy().fold(self.events[: self.marks[place - 1] if there else 0])

    def since(self, index: int) -> list[Event]:
        """Return the events after the step of this `index` (-1: all), as far as they are kept."""
        place = bisect_right(self.steps, index, key=lambda step: step.index)
        return self.events[self.marks[place - 1] if place else 0 :]

    @property
    def state(self) -> State:
        """The state after the last event."""
        return self.base.copy().fold(self.events)


class Recorder:
    """Listens to a cache and keeps what it says.

    Parameters
    ----------
    cache : Cache
    keep_events, keep_records : int
        at least so many of the last events and ended requests are kept; older events are folded into the trace's base, so that
        a long-lived engine does not grow for ever.
    """

    def __init__(self, cache: Cache, keep_events: int = 100_000, keep_records: int = 2_000) -> None:
        self.cache = cache
        self.keep_events, self.keep_records = keep_events, keep_records
        cache.events()  # from now on the cache builds events; what it did before is in the base
        self.trace = Trace(cache.snapshot())

    def pull(self) -> list[Event]:
        """Take over, and return, what the cache did since the last call."""
        new = self.cache.events()
        self.trace.events.extend(new)
        return new

    def mark(self, step: Step) -> None:
        """End a step: what the cache did until now belongs to it."""
        self.pull()
        trace = self.trace
        start = trace.marks[-1] if trace.marks else 0
        step.evicted = evicted_tokens(trace.events[start:], trace.base.unit)
        trace.steps.append(step)
        trace.marks.append(len(trace.events))
        if len(trace.events) > 2 * self.keep_events:
            self._fold()
        if len(trace.records) > 2 * self.keep_records:
            self._drop()

    def _fold(self) -> None:
        """Fold the oldest steps into the base; the last `keep_events` events stay whole steps."""
        trace = self.trace
        steps = bisect_right(trace.marks, len(trace.events) - self.keep_events)
        if not steps:
            return
        cut = trace.marks[steps - 1]
        trace.base = trace.base.copy().fold(trace.events[:cut])
        trace.events = trace.events[cut:]
        trace.steps = trace.steps[steps:]
        trace.marks = [mark - cut for mark in trace.marks[steps:]]

    def _drop(self) -> None:
        ended = [id for id, record in list(self.trace.records.items()) if record.outcome is not None]
        for id in ended[: -self.keep_records]:
            del self.trace.records[id]


def evicted_tokens(events: Iterable[Event], unit: int) -> int:
    """Tokens that `events` made uncached for want of room, in a cache of this unit."""
    count = 0
    for event in events:
        if isinstance(event, ev.Unkeyed) and event.why == "evicted":
            count += len(event.blocks) * unit
        elif isinstance(event, ev.Evicted):
            count += len(event.slots)
    return count
