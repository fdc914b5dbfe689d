"""What happened, step by step: the recorder, and the trace that every picture is drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvlab.cache.contract import Cache, Stopped
    from kvlab.cache.events import Event
    from kvlab.cache.state import State
    from kvlab.prompts import Part


@dataclass(slots=True)
class Step:
    """One forward pass. Times in seconds since the trace began."""

    index: int
    kind: Literal["prefill", "decode", "mixed"]
    begin: float
    end: float
    prefilled: dict[str, int]
    decoded: tuple[str, ...]
    evicted: int = 0


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
    """A base state and all events since, the steps and the requests. ``at(step)`` folds the state after that step."""

    base: State
    events: list[Event] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    records: dict[str, Record] = field(default_factory=dict)

    def at(self, step: int) -> State:
        """Return the state after step `step` (-1: before the first)."""
        count = 0 if step < 0 else self.marks[step]
        return self.base.copy().fold(self.events[:count])

    @property
    def state(self) -> State:
        """The state after the last event."""
        return self.base.copy().fold(self.events)


class Recorder:
    """Listens to a cache and keeps what it says."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.trace = Trace(cache.snapshot())
        cache.events()  # from now on the cache builds events

    def pull(self) -> None:
        """Take over what the cache did since the last call."""
        self.trace.events.extend(self.cache.events())

    def mark(self, step: Step) -> None:
        """End a step: what the cache did until now belongs to it."""
        self.pull()
        self.trace.steps.append(step)
        self.trace.marks.append(len(self.trace.events))
