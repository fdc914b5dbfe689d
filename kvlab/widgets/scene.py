"""What a lab shows at one moment, and where it comes from: a live engine or a recorded run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvlab.cache import events as ev
from kvlab.situations import Layout, Timestamp, Writer
from kvlab.trace.files import RECORDED, load_traces
from kvlab.widgets import words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from threading import Event as StopEvent

    from kvlab.cache.events import Event
    from kvlab.cache.state import State
    from kvlab.engine.engine import Engine
    from kvlab.engine.models import Loaded
    from kvlab.prompts import Prompt
    from kvlab.trace.recorder import Record, Step, Trace

POLICIES = ("vllm", "sglang")
POOL = 4096  # tokens


@dataclass(frozen=True, slots=True)
class Settings:
    """What the controls say. Lengths in tokens."""

    timestamp: Timestamp = "none"
    shared: int = 1000
    question: int = 40
    answer: int = 32
    block_size: int = 16
    page_size: int = 1

    @property
    def layout(self) -> Layout:
        """The prompt's part of it."""
        return Layout(self.timestamp, self.shared, self.question)


@dataclass(frozen=True, slots=True)
class Side:
    """One policy: its requests and its cache.

    Attributes
    ----------
    evicted : tuple of int
        units whose content fell in the last run.
    texts : dict of id to list of str
        text of every token; empty where no tokenizer is at hand.
    """

    policy: str
    state: State
    records: list[Record]
    evicted: tuple[int, ...] = ()
    texts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def full_seconds(self) -> dict[str, float]:
        """Seconds of prefill without reuse, by request, measured: of the latest equally long prompt that hit nothing."""
        out: dict[str, float] = {}
        measured: dict[int, float] = {}
        for record in self.records:
            if record.first_token is None:
                continue
            if not record.cached_tokens:
                measured[record.prompt_tokens] = record.prefill_seconds
            elif record.prompt_tokens in measured:
                out[record.id] = measured[record.prompt_tokens]
        return out

    def last(self, count: int) -> list[Record]:
        """Return the last `count` requests."""
        return self.records[-count:]

    @property
    def saved_seconds(self) -> dict[str, float]:
        """Seconds of prefill that caching removed, by request, where `full_seconds` knows."""
        full = self.full_seconds
        return {r.id: full[r.id] - r.prefill_seconds for r in self.records if r.id in full}


@dataclass(frozen=True, slots=True)
class Scene:
    """All policies side by side."""

    sides: dict[str, Side] = field(default_factory=dict)
    about: str = ""

    @property
    def latest(self) -> dict[str, Record]:
        """The latest request, by policy; only those policies that were sent it (Stop may come between)."""
        last = {policy: side.records[-1] for policy, side in self.sides.items() if side.records}
        sent = next((record.id for record in last.values()), None)  # the first policy gets every request before the others do
        return {policy: record for policy, record in last.items() if record.id == sent}


def evicted_units(events: list[Event], unit: int) -> tuple[int, ...]:
    """Return the blocks or pages whose content fell during `events`."""
    units: list[int] = []
    for event in events:
        if isinstance(event, ev.Unkeyed) and event.why == "evicted":
            units += event.blocks.tolist()
        elif isinstance(event, ev.Evicted):
            units += [s // unit for s in event.slots[::unit].tolist()]
    return tuple(units)


def recorded_scene(path: Path = RECORDED / "four_situations.jsonl.gz") -> Scene:
    """Return a recorded run, as a lab shows it until its model is there."""
    sides = {}
    for policy, trace in load_traces(path).items():
        sides[policy] = Side(policy, trace.state, list(trace.records.values()))
    return Scene(sides, about=words.RECORDED)


class LiveSource:
    """A model under both caches, side by side, sharing its weights.

    Parameters
    ----------
    model : None, str, path or Loaded
        as `kvlab.load_model` takes it.
    num_tokens : int
        slots of each pool.
    """

    def __init__(self, model: Any = None, num_tokens: int = POOL) -> None:  # noqa: ANN401 - a name, a path or a Loaded
        self.model, self.num_tokens = model, num_tokens
        self.loaded: Loaded | None = None
        self.engines: dict[str, Engine] = {}
        self._built: tuple[int, int] | None = None
        self._number = 0
        self._warm: set[Layout] = set()
        self._seen: dict[str, int] = {}  # by policy, the last step before the last run
        self._texts: dict[tuple[int, ...], list[str]] = {}  # by tokens

    # ------------------------------------------------------------------ the model
    def load(self, progress: Callable[[float, str], None]) -> None:
        """Load the model and build both engines; what goes wrong is raised in words (ModelError)."""
        from kvlab.engine.models import Loaded, load_model

        self.loaded = self.model if isinstance(self.model, Loaded) else load_model(self.model, progress=progress)
        self.build(Settings())

    def build(self, settings: Settings) -> None:
        """Build the engines for these unit sizes, unless they stand; refused sizes leave the old ones as they were."""
        from kvlab.engine.engine import Engine

        sizes = settings.block_size, settings.page_size
        if sizes == self._built:
            return
        assert self.loaded is not None, "the model is loaded before engines are built"
        options: Mapping[str, dict[str, Any]] = {"vllm": {"block_size": sizes[0]}, "sglang": {"page_size": sizes[1]}}
        engines = {p: Engine(self.loaded, cache=p, num_tokens=self.num_tokens, **options[p]) for p in POLICIES}
        for engine in engines.values():  # the very first pass pays for things that have nothing to do with caching
            engine.generate([list(range(64))], max_new_tokens=2, ignore_eos=True)
            engine.reset()
        self.engines, self._built = engines, sizes
        self._forget()

    # ------------------------------------------------------------------ requests
    def run(self, settings: Settings, tell: Callable[[float, str], None], changed: Callable[[], None], stop: StopEvent) -> None:
        """Send requests to both engines: two when the layout is new (one fills the cache, one reuses it), else one.

        Parameters
        ----------
        settings : Settings
        tell : callable
            is told how far the work is (0 to 1) and what is being done.
        changed : callable
            is called at the end, when there is something new to see.
        stop : Event
            set from another thread: the request under way ends, its blocks are freed.

        Raises
        ------
        ValueError, EngineError
            for settings that cannot be, and nothing has changed then; for a request that the model refused or that failed.
        """
        assert self.loaded is not None, "the model is loaded before requests are sent"
        self._check_length(settings.shared + settings.question + settings.answer)  # before such a prompt is written
        writer = Writer(self.loaded.tokenizer, self.loaded.vocab_size)
        # SGLang's admission wants a page and a token more than the request can use
        self._check_length(len(writer.prompt(settings.layout, 0)) + settings.answer + settings.page_size + 1)
        self.build(settings)  # other unit sizes begin with empty caches, where no layout is known
        new = settings.layout not in self._warm
        prompts = [writer.prompt(settings.layout, self._number + i) for i in range(1 + new)]
        self._seen = {policy: engine.trace.steps[-1].index for policy, engine in self.engines.items() if engine.trace.steps}
        try:
            self._send(prompts, settings.answer, tell, stop)
        finally:
            changed()  # once: a browser that draws meanwhile would share the cores with what is being measured
        if not stop.is_set():
            self._warm.add(settings.layout)

    def _check_length(self, asked: int) -> None:
        if asked > self.num_tokens:
            raise ValueError(words.TOO_LONG.format(asked=asked, pool=self.num_tokens))

    def _send(self, prompts: list[Prompt], answer: int, tell: Callable[[float, str], None], stop: StopEvent) -> None:
        """Let each prompt run under every policy, until somebody stops it."""
        from kvlab.engine.request import EngineError, Request

        jobs = [(prompt, policy) for prompt in prompts for policy in POLICIES]
        for done, (prompt, policy) in enumerate(jobs):
            if policy == POLICIES[0]:
                self._number += 1  # a prompt that was stopped half way is not sent again: the cache may hold it
            # both caches know a request by the same id, also after one was stopped before the other cache got it
            ask = Request(prompt, max_new_tokens=answer, ignore_eos=True, id=str(self._number))
            what = words.SENDING.format(number=self._number, policy=words.POLICY[policy])
            tell(done / len(jobs), what)
            steps = itertools.count(1)

            def progress(_step: Step, n: int = done, w: str = what, steps: itertools.count[int] = steps) -> None:
                tell((n + min(1.0, next(steps) / answer)) / len(jobs), w)

            (result,) = self.engines[policy].generate([ask], stop=stop, progress=progress)
            if stop.is_set():
                return
            if result.outcome in ("refused", "failed", "abort"):
                raise EngineError(str(result.reason))

    def start_over(self) -> None:
        """Empty both caches and forget all requests."""
        for engine in self.engines.values():
            engine.reset()
        self._forget()

    def _forget(self) -> None:
        self._number = 0
        self._warm.clear()
        self._seen = {}
        self._texts.clear()

    # ------------------------------------------------------------------ what is to be seen
    def scene(self) -> Scene:
        """Return both caches as they stand; call it between steps."""
        sides = {}
        for policy, engine in self.engines.items():
            trace: Trace = engine.trace
            records = [r for r in trace.records.values() if r.started is not None]
            state = engine.cache.snapshot()
            evicted = evicted_units(trace.since(self._seen.get(policy, -1)), state.unit)
            texts = {record.id: self._text(record) for record in records}
            sides[policy] = Side(policy, state, records, evicted, texts)
        return Scene(sides, about=self.about)

    def _text(self, record: Record) -> list[str]:
        """Return the text of each token, decoded once."""
        from kvlab.engine.reader import token_texts

        tokenizer = None if self.loaded is None else self.loaded.tokenizer
        if tokenizer is None:
            return []
        key = tuple(record.tokens)
        if key not in self._texts:
            self._texts[key] = token_texts(tokenizer, record.tokens)
        return self._texts[key]

    @property
    def about(self) -> str:
        """The model, device and pool in a line."""
        if self.loaded is None:
            return ""
        dtype = str(self.loaded.dtype).removeprefix("torch.")
        return words.ABOUT.format(model=self.loaded.name, device=self.loaded.device.type, dtype=dtype, pool=self.num_tokens)
