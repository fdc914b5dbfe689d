"""The engine: prompts in, answers out, one forward a step, K and V in a pool that a cache shares out."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from kvlab.cache.contract import NO_SLOTS, Space
from kvlab.engine.attention import PagedKV, Span, forward, kv_shapes
from kvlab.engine.caches import build_cache, build_scheduler, check_options
from kvlab.engine.interrupt import patient_interrupt
from kvlab.engine.pool import DEFAULT_TOKENS, Pool, default_tokens
from kvlab.engine.reader import Reader
from kvlab.engine.request import EngineError, RequestError, Result, html_table
from kvlab.engine.sampler import Sampler, choose
from kvlab.trace.recorder import Record, Recorder, Step, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvlab.cache.contract import Cache, Grant
    from kvlab.engine.models import Loaded
    from kvlab.engine.request import Request

_probed: WeakSet[Any] = WeakSet()  # models that the probe has passed


@dataclass(slots=True)
class _Run:
    """A request on its way. `slots` is its block table; `goal` the length at which prefill turns into decode."""

    request: Request
    record: Record
    sampler: Sampler
    max_new: int
    cut: bool  # max_new is less than was asked for: the model has no more positions
    slots: np.ndarray = field(default_factory=lambda: NO_SLOTS)
    goal: int = 0


class Engine:
    """A live model behind one of the caches.

    Parameters
    ----------
    model : None, str, path or Loaded
        None: the embedded default; a name or folder for `load_model`; or what `load_model` returned, which engines may share.
    cache : "vllm", "sglang", "none" or callable
        whose prefix cache; or a factory that takes ``num_tokens`` and returns a cache.
    num_tokens : int or None
        tokens in the pool; None: 16,384, or less where memory is short.
    device, dtype : str or None
        as for `load_model`.
    max_batch_tokens : int
        tokens that a step computes at most.
    poison : bool
        fill the pool with NaN, so that a read of a slot never written shows (for tests).
    **cache_options
        keywords of the cache, such as ``block_size`` or ``page_size`` and ``policy``.

    Attributes
    ----------
    model, tokenizer
        transformers' own; a call of the model gives transformers' own logits.
    cache : Cache
        reset it through `reset`; look at it freely.
    listeners : list of callable
        called with the `Step` after each step; what they raise becomes a warning.

    Raises
    ------
    EngineError
        for options that cannot be, or a pool that memory cannot hold.
    ModelError
        for a model that cannot be loaded, or fails the probe.
    """

    def __init__(  # noqa: PLR0917 - the interface that notebooks rely on
        self,
        model: Loaded | str | None = None,
        cache: str | Callable[[int], Cache] = "vllm",
        num_tokens: int | None = DEFAULT_TOKENS,
        device: str | None = None,
        dtype: Any = None,  # noqa: ANN401 - a torch dtype or its name, as load_model takes it
        max_batch_tokens: int = 2048,
        *,
        poison: bool = False,
        **cache_options: Any,  # noqa: ANN401 - the cache's own keywords
    ) -> None:
        unit = check_options(cache, num_tokens, max_batch_tokens, cache_options)
        self.loaded = _load(model, device, dtype)
        self.model, self.tokenizer = self.loaded.model, self.loaded.tokenizer
        shapes = kv_shapes(self.model)
        where = self.loaded.device
        tokens = default_tokens(shapes, where, unit) if num_tokens is None else num_tokens
        self.cache = build_cache(cache, tokens, cache_options)
        self.pool = Pool(shapes, int(self.cache.num_tokens or 0) + self.cache.unit, where, poison=poison)
        self.scheduler = build_scheduler(self.cache, max_batch_tokens)
        self.listeners: list[Callable[[Step], object]] = []
        self._reader = Reader(self.loaded, int(self.cache.num_tokens or 0))
        self._turn = threading.RLock()  # held during a step, and for what must not happen during one
        self._busy = threading.Lock()  # held by generate()
        self._door = threading.Lock()  # held while requests come in, and while a new trace begins
        self._computing = False
        self._begin()

    def _begin(self) -> None:
        self._recorder = Recorder(self.cache)
        self._zero = time.perf_counter()
        self._numbers = count(1)
        self._inbox: deque[str] = deque()
        self._cancelled: deque[tuple[str, str]] = deque()
        self._steps = count()
        self._runs: dict[str, _Run] = {}
        self._results: dict[str, Result] = {}

    # ------------------------------------------------------------------ asking
    def generate(
        self,
        prompts: Sequence[Any],
        max_new_tokens: int = 32,
        ignore_eos: bool = False,  # noqa: FBT001, FBT002 - an option of its own name, as everywhere in this field
        progress: Callable[[Step], object] | None = None,
        stop: threading.Event | None = None,
    ) -> list[Result]:
        """Answer all prompts together and wait for them.

        Parameters
        ----------
        prompts : sequence
            token ids, texts, lists of chat messages or `Request` objects, mixed as you like.
        max_new_tokens, ignore_eos
            for prompts that do not say so themselves.
        progress : callable
            called with the `Step` after each step.
        stop : threading.Event
            set it from another thread, and what still runs ends as ``abort`` after the step under way.

        Returns
        -------
        list of Result
            in the order of `prompts`. Look at `outcome`: a request that failed or did not fit is told of there, in words.

        Raises
        ------
        RequestError
            for a prompt that cannot run (empty, too long, unknown ids ...); nothing was submitted then.
        EngineError
            while another generate() is running.
        KeyboardInterrupt
            after ctrl-C, once everything is released; a second ctrl-C does not wait for the end of the step.
        """
        if not self._busy.acquire(blocking=False):
            msg = "this engine is answering already: wait for that generate() to end, or stop it, before the next one."
            raise EngineError(msg)
        try:
            ids = self._submit(self._reader.requests(prompts, max_new_tokens, ignore_eos))
            with patient_interrupt() as interrupted:
                try:
                    while self._unfinished(ids) and not (interrupted.is_set() or (stop is not None and stop.is_set())):
                        step = self.step()
                        if step is not None and progress is not None:
                            _call(progress, step)
                finally:
                    with self._turn:
                        self._cancelled += [(id, "stopped before it ended") for id in ids]
                        self._accept()
                    results = [self._results.pop(id) for id in ids]
            return results
        finally:
            self._busy.release()

    def submit(self, request: Any, max_new_tokens: int = 32, ignore_eos: bool = False) -> str:  # noqa: ANN401, FBT001, FBT002
        """Queue one prompt for the coming steps, from any thread; return its id, for `result` and `cancel`.

        Raises
        ------
        RequestError
            for a prompt that cannot run; nothing was submitted then.
        """
        return self._submit(self._reader.requests([request], max_new_tokens, ignore_eos))[0]

    def result(self, id: str) -> Result | None:
        """Return, once, what became of a submitted request; None while it is on its way."""
        return self._results.pop(id, None)

    def cancel(self, id: str, reason: str = "cancelled") -> None:
        """End a request as ``abort``, from any thread: at once, or after the step under way."""
        self._cancelled.append((id, reason))
        if self._turn.acquire(blocking=False):
            try:
                if not self._computing:
                    self._accept()
            finally:
                self._turn.release()

    def reset(self) -> None:
        """Empty the cache and begin a new trace.

        Raises
        ------
        EngineError
            while requests are on their way.
        """
        with self._turn, self._door:
            if self._runs or not self.cache.reset():
                msg = f"cannot reset while {len(self._runs)} requests are on their way: wait for them or cancel them."
                raise EngineError(msg)
            self._begin()

    @property
    def trace(self) -> Trace:
        """What happened since the engine was made or reset."""
        return self._recorder.trace

    # ------------------------------------------------------------------ one step
    def step(self) -> Step | None:
        """Run one forward for whoever is next; None if nobody is.

        Returns
        -------
        Step
            what was reused, computed and sampled, and who ended. A fault in the model ends the step's requests as ``failed``,
            with the reason in their records; the engine goes on.
        """
        with self._turn:
            self._accept()
            begin = self._now()
            self._computing = True
            report = None
            try:
                grants = self.scheduler.next()
                report = self._report(grants, begin)
                if grants:
                    sampled = self._compute(grants)
                    done = self.scheduler.done(sampled)
            except BaseException as error:
                self._fail(error, report or self._report([], begin))
                if not isinstance(error, Exception):
                    raise
                self._tell(self.trace.steps[-1])
                return self.trace.steps[-1]
            finally:
                self._computing = False
            if grants:
                report.end = self._now()
                for moved in done.moved:
                    self._runs[moved.id].slots[moved.start : moved.start + len(moved.slots)] = moved.slots
                report.sampled = done.kept
                self._take_times(report)
            self._settle(report)
            if not grants:
                self._recorder.pull()
                return None
            self._recorder.mark(report)
            self._tell(report)
            return report

    def _tell(self, report: Step) -> None:
        for listener in list(self.listeners):
            _call(listener, report)

    def _accept(self) -> None:
        """Let in what was submitted, and let go what was cancelled, since the last step."""
        while self._inbox:
            id = self._inbox.popleft()
            try:
                self._queue(id, self._runs[id])
            except Exception as error:  # noqa: BLE001 - a salt or stop token that cannot be ends its own request, no other
                record = self._runs.pop(id).record
                record.outcome, record.finished = "failed", self._now()
                record.reason = f"the request cannot be queued: {type(error).__name__}: {error}"
                self._results[id] = self._result(record)
        if self._cancelled:
            while self._cancelled:
                self.scheduler.cancel(*self._cancelled.popleft())
            self._settle(None)
            self._recorder.pull()

    def _queue(self, id: str, run: _Run) -> None:
        request = run.request
        lora = request.lora if request.lora is None or isinstance(request.lora, tuple) else (request.lora, request.lora)
        self.scheduler.add(
            id,
            run.record.tokens,
            Space(request.salt, lora, request.extra_key),
            read=request.read,
            priority=request.priority,
            max_new=run.max_new,
            stop_ids=frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else self._reader.end_ids),
            ignore_eos=bool(request.ignore_eos),
        )

    def _compute(self, grants: Sequence[Grant]) -> dict[str, int]:
        """Pack the step into one row, run the model, choose the tokens."""
        spans: list[Span] = []
        ids: list[int] = []
        keep: list[int] = []
        samplers: list[Sampler | None] = []
        for grant in grants:
            run = self._runs[grant.id]
            run.slots = self.cache.row(grant.id).slots if _admits(grant) else np.concatenate([run.slots, grant.slots])
            spans.append(Span(run.slots, len(grant.slots)))
            ids += run.record.tokens[grant.start : grant.start + len(grant.slots)]
            keep.append(len(ids) - 1)
            samplers.append(run.sampler if grant.todo == 0 else None)
        logits = forward(self.model, np.array(ids, dtype=np.int64), PagedKV(self.pool, spans), keep)
        return choose(logits, [grant.id for grant in grants], samplers)

    def _report(self, grants: Sequence[Grant], begin: float) -> Step:
        """Say what the step is going to compute, and note on the records what their first admission found."""
        prefilled: dict[str, int] = {}
        decoded: list[str] = []
        reused: dict[str, int] = {}
        for grant in grants:
            run = self._runs[grant.id]
            record = run.record
            if _admits(grant):
                run.goal, reused[grant.id] = len(record.tokens), grant.hit
                if record.started is None:
                    record.started, record.cached_tokens = begin, grant.hit
                    record.stopped = self.scheduler.stopped.get(grant.id)
            if grant.start < run.goal:
                prefilled[grant.id] = len(grant.slots)
            else:
                decoded.append(grant.id)
        kind = "mixed" if prefilled and decoded else "decode" if decoded else "prefill"
        return Step(next(self._steps) if grants else -1, kind, begin, begin, prefilled, tuple(decoded), reused=reused)  # type: ignore[arg-type]

    def _take_times(self, step: Step) -> None:
        """Share the step's seconds out, to prefill and decode and to the requests."""
        prefilled, decoded, seconds = sum(step.prefilled.values()), len(step.decoded), step.end - step.begin
        step.prefill_seconds = seconds * prefilled / (prefilled + decoded)
        step.decode_seconds = seconds - step.prefill_seconds
        for id, token in step.sampled.items():
            record = self._runs[id].record
            record.tokens.append(token)
            if record.first_token is None:
                record.first_token = step.end
                record.prefill_seconds = step.end - (record.started or 0.0)
            elif id in step.decoded:
                record.decode_seconds += step.decode_seconds
                record.estimated |= step.estimated

    def _settle(self, step: Step | None) -> None:
        """Note who ended, and forget those whom the scheduler has let go (not those who ride for one more token)."""
        ended = self.scheduler.pop_ended()
        for id, outcome, reason in ended:
            run = self._runs[id]
            record = run.record
            record.outcome, record.finished, record.reason = outcome, self._now(), reason
            if outcome == "length" and run.cut:
                record.reason = f"the model's {self._reader.positions:,} positions are used up"
            self._results[id] = self._result(record)
        if step is not None:
            step.ended = {id: outcome for id, outcome, _ in ended}
        for id, run in list(self._runs.items()):  # another thread may be submitting
            if run.record.outcome is not None and id not in self.scheduler.jobs:
                del self._runs[id]

    def _fail(self, error: BaseException, step: Step) -> None:
        """Release the step's requests as failed, twins too, so that no K/V that were not written can be hit."""
        detail = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        self.scheduler.fail(f"the step failed: {detail}")
        step.end = self._now()
        if step.index < 0:  # it failed before anyone was chosen
            step.index = next(self._steps)
        self._settle(step)
        self._recorder.mark(step)

    # ------------------------------------------------------------------ small things
    def _submit(self, requests: Sequence[tuple[Request, list[int]]]) -> list[str]:
        with self._door:
            own = [request.id for request, _ in requests if request.id]
            taken = next((id for n, id in enumerate(own) if id in self.trace.records or id in own[:n]), None)
            if taken is not None:
                msg = f"a request with the id {taken!r} is in the trace already: give another one, or none and the engine counts."
                raise RequestError(msg)
            free = (id for id in map(str, self._numbers) if id not in self.trace.records and id not in own)
            # all are made before any is queued, so that a bad one leaves no other behind
            runs = [self._run(request.id or next(free), request, tokens) for request, tokens in requests]
            for run in runs:
                self._runs[run.record.id] = run
                self.trace.records[run.record.id] = run.record
                self._inbox.append(run.record.id)
        return [run.record.id for run in runs]

    def _run(self, id: str, request: Request, tokens: Sequence[int]) -> _Run:
        record = Record(id, list(tokens), len(tokens), tuple(request.parts), submitted=self._now())
        asked = int(request.max_new_tokens or 0)
        room = asked if self._reader.positions is None else max(1, self._reader.positions - len(tokens))
        sampler = Sampler(request.sampling)  # type: ignore[arg-type]  # a mapping became a Sampling in Request
        return _Run(request, record, sampler, min(asked, room), cut=room < asked)

    def _unfinished(self, ids: Sequence[str]) -> bool:
        return any(id in self._runs for id in ids)

    def _result(self, record: Record) -> Result:
        output = record.tokens[record.prompt_tokens :]
        first = record.first_token
        return Result(
            record.id,
            self._reader.text(output),
            output,
            record.prompt_tokens,
            record.cached_tokens,
            None if first is None else first - record.submitted,
            None if first is None else record.prefill_seconds,
            record.decode_seconds,
            str(record.outcome),
            record.stopped,
            record.reason,
            record.estimated,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    def rows(self) -> list[tuple[str, str]]:
        """Return the table that it shows itself as."""
        sizes = self.cache.sizes()
        return [
            ("model", repr(self.loaded)),
            ("cache", f"{self.cache.policy}, {self.cache.unit} tokens a unit"),
            ("pool", f"{self.cache.num_tokens:,} tokens, {self.pool.bytes / 1e6:,.0f} MB"),
            ("free / cached / in use", f"{sizes.free:,} / {sizes.evictable:,} / {sizes.protected:,}"),
            ("requests", f"{len(self.scheduler.running)} running, {len(self.scheduler.waiting)} waiting"),
        ]

    def __repr__(self) -> str:
        """Say the same in a line."""
        return "Engine(" + ", ".join(f"{name}: {value}" for name, value in self.rows()) + ")"

    def _repr_html_(self) -> str:
        return html_table("Engine", self.rows())


def _admits(grant: Grant) -> bool:
    """Tell whether the grant admits its request: it begins at its hit; running ones have a hit of 0, and begin later."""
    return grant.start == grant.hit


def _load(model: Any, device: str | None, dtype: Any) -> Loaded:  # noqa: ANN401 - see Engine
    from kvlab.engine.models import Loaded, load_model
    from kvlab.engine.probe import probe

    if isinstance(model, Loaded) and (device is not None or dtype is not None):
        msg = "the model is loaded already, with its device and dtype: give those to load_model(), not to the Engine."
        raise EngineError(msg)
    loaded = model if isinstance(model, Loaded) else load_model(model, device=device, dtype=dtype)
    if loaded.model not in _probed:
        probe(loaded)
        _probed.add(loaded.model)
    return loaded


def _call(listener: Callable[[Step], object], step: Step) -> None:
    """Tell a listener; whatever goes wrong there is no fault of the step."""
    try:
        listener(step)
    except Exception as error:  # noqa: BLE001 - anything a callback may raise
        warnings.warn(f"a listener of the engine raised {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
