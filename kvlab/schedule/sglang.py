"""SGLang's scheduler: a batch of prefills if anything can be admitted, else of decodes (docs/sglang.md 8, 9, 13, 15, 19, 22)."""

from __future__ import annotations

from collections import deque
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from kvlab.cache.contract import EVERYONE, Grant
from kvlab.cache.radix_cache import RadixCache
from kvlab.schedule.queueing import NAMES, Waiting, arrange
from kvlab.schedule.scheduler import Ended, Job, Scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    import numpy as np

    from kvlab.cache.contract import Cache, Space
    from kvlab.schedule.scheduler import Done

CLIP = 4096  # new tokens that one request reserves at most (15)
RETRACT_STEPS = 20  # decode steps that a retraction makes room for (19)
RATIO, RATIO_LEAST, RATIO_STEPS = 0.7, 0.14, 600  # share of new tokens believed to come: first, floor of it, steps between


class SglangScheduler(Scheduler):
    """Prefills before decodes; a decode batch that finds no room sends requests back.

    Parameters
    ----------
    cache, max_batch_tokens, max_running
        as for `Scheduler`; SGLang calls them chunked_prefill_size and max_running_requests.
    overlap : bool
        the overlap scheduler: when a stop token is seen the next decode step is under way, so the id rides in it and that token
        is cached too (9).
    conservativeness : float
        scales what running requests reserve.
    order : str
        of the queue, before each batch of prefills: one of `queueing.NAMES`; those that look up need a RadixCache.
    rng : random.Random, optional
        for the order random.
    """

    def __init__(
        self,
        cache: Cache,
        max_batch_tokens: int = 2048,
        max_running: int = 256,
        *,
        overlap: bool = True,
        conservativeness: float = 1.0,
        order: str = "fcfs",
        rng: Random | None = None,
    ) -> None:
        super().__init__(cache, max_batch_tokens, max_running)
        if order not in NAMES or (order == "random" and rng is None) or (order != "fcfs" and not isinstance(cache, RadixCache)):
            msg = f"the order is {order!r}: choose one of {', '.join(NAMES)}, random with an rng, all but fcfs with a RadixCache."
            raise ValueError(msg)
        self.order, self._rng = order, rng
        self._processed = 0  # tokens computed so far
        self._arrived: dict[str, tuple[int, int, str]] = {}  # by id: its number, tokens processed when it came, routing key
        self._arrivals = count()
        self.overlap = overlap
        self._start = min(1.0, RATIO * conservativeness)
        self.ratio = self._start
        self._chunked: str | None = None  # its prompt is not through yet: it decodes with nobody
        self._full = False  # an admission was refused: nobody else is looked up until something ends

    def add(
        self,
        id: str,
        tokens: Sequence[int] | np.ndarray,
        space: Space = EVERYONE,
        *,
        routing_key: str = "",
        **options: Any,  # noqa: ANN401 - as `Scheduler.add` takes them
    ) -> None:
        """Let a request wait, as `Scheduler.add` says; what comes later may be put before it by `order`."""
        super().add(id, tokens, space, **options)
        self._arrived[id] = next(self._arrivals), self._processed, routing_key

    def done(self, sampled: Mapping[str, int]) -> Done:
        """Take over the step's results, as `Scheduler.done` says."""
        self._processed += sum(len(grant.slots) for grant in self.grants)
        return super().done(sampled)

    def _batch(self) -> list[Grant]:
        if not self.running and self._chunked is None:
            self.ratio, self._full = self._start, False
        return self._prefill() or self._decode()

    # ------------------------------------------------------------------ prefill
    def _prefill(self) -> list[Grant]:
        room = 0 if self._full else self.max_running - len(self.running) - (self._chunked is not None)
        if room > 0 and self.waiting and self.order != "fcfs":
            self._arrange()
        ids = [self._chunked] if self._chunked is not None else []
        ids += islice(self.waiting, max(room, 0))
        if not ids:
            return []
        grants = []
        for answer in self.cache.take(ids, self.max_batch_tokens, self._reserved()):
            if isinstance(answer, Grant):
                grants.append(answer)
                self._admitted(answer)
            elif answer.why == "never_fits":
                self._never(answer)
            elif answer.why == "no_space" and answer.id != self._chunked:
                self._full = True
        return grants

    def _arrange(self) -> None:
        """Put the queue in order; looking up splits and stamps the tree."""
        assert isinstance(self.cache, RadixCache), "checked when it was made"
        queue = []
        for id in self.waiting:
            row = self.cache.row(id)
            queue.append(Waiting(row.tokens, row.space, self.jobs[id].max_new, *self._arrived[id]))
        ids, running = list(self.waiting), [self._arrived[id][2] for id in self.running]
        found = arrange(self.order, queue, self.cache, processed=self._processed, running_keys=running, rng=self._rng)
        self.waiting = deque(ids[index] for index in found.indices)

    def _admitted(self, grant: Grant) -> None:
        if grant.id == self._chunked:
            self._chunked = None
        else:
            self.waiting.remove(grant.id)
            # before commit() the tree holds only what the look-up found too
            self.stopped[grant.id] = self._stop(grant, self._look(grant.id))
        if grant.todo:
            self._chunked = grant.id
        else:
            self.running.append(grant.id)

    def _reserved(self) -> int:
        """Slots that the running requests are believed to need still."""
        jobs = [self.jobs[id] for id in self.running]
        return int(sum(min(job.max_new - job.outputs, CLIP) * (1.0 if job.ignore_eos else self.ratio) for job in jobs))

    # ------------------------------------------------------------------ decode
    def _decode(self) -> list[Grant]:
        retracted = False
        while self.running:
            answers = self.cache.take(list(self.running))
            grants = [answer for answer in answers if isinstance(answer, Grant)]
            if len(grants) == len(answers):
                if not retracted:
                    self.ratio = max(self.ratio - self._start * (1 - RATIO_LEAST) / RATIO_STEPS, self._start * RATIO_LEAST)
                return grants
            riding = [id for id in self.running if self.jobs[id].riding]
            if riding:  # nobody waits for their one more token
                for id in riding:
                    self._release(id, "stop")
            elif len(self.running) == 1:  # the last one is never retracted (19)
                (id,) = self.running
                self._end(id, "abort", f"the pool of {self.cache.num_tokens:,} tokens is full and nobody else can make room")
            else:
                self._retract()
                retracted = True
        return []

    def _retract(self) -> None:
        """Send back whoever has the fewest outputs, then the longest prompt, and make room for the rest to go on (19)."""
        id = min(reversed(self.running), key=lambda i: (self.jobs[i].outputs, -self.jobs[i].prompt))
        self.running.remove(id)
        self.cache.release(id, "preempt")
        self.waiting.append(id)
        self._full = False
        free = self.cache.sizes().free
        short = RETRACT_STEPS * len(self.running) - (free or 0)
        if free is not None and short > 0:
            self.cache.evict(short)
        jobs = [self.jobs[i] for i in self.running]
        decoded, asked = sum(job.outputs for job in jobs), sum(job.max_new for job in jobs)
        self.ratio = min(1.0, (decoded + RETRACT_STEPS * len(jobs)) / (asked + 1))

    # ------------------------------------------------------------------ ends
    def _judge(self, job: Job, token: int) -> None:
        if job.outputs >= job.max_new:  # SGLang counts before it looks for a stop
            self._end(job.id, "length")
        elif token in job.stop_ids:
            if self.overlap:
                self._ended.append(Ended(job.id, "stop", ""))
                job.riding = True
            else:
                self._end(job.id, "stop")

    def _forget(self, id: str) -> None:
        super()._forget(id)
        self._arrived.pop(id, None)
        self._full = False
        if id == self._chunked:
            self._chunked = None
