"""What both schedulers share: jobs that wait and run, and what happens to them after a step. Knows no torch, no model, no clock.

A step is ``grants = next()``, a forward pass that computes them, then ``done(sampled)``; if it fails, ``fail(reason)`` instead.
Whatever happens, each job that was added is told of in `ended` exactly once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvlab.cache.contract import EVERYONE, Grant, Refused

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy as np

    from kvlab.cache.contract import Cache, Moved, ReleaseWhy, Space, Stopped

Outcome = Literal["stop", "length", "abort", "refused", "failed"]


class Ended(NamedTuple):
    """Job `id` came to its end; `reason` in words, empty where it ended by itself."""

    id: str
    outcome: Outcome
    reason: str


class Done(NamedTuple):
    """After a step: parts of rows that now stand elsewhere, and the sampled tokens that count."""

    moved: list[Moved]
    kept: dict[str, int]


@dataclass(slots=True)
class Job:
    """A request as a scheduler sees it: lengths, no tokens.

    `riding`: it has sampled its stop token and ended, but the overlap scheduler has launched one more step for it already.
    """

    id: str
    prompt: int
    max_new: int
    stop_ids: Collection[int]
    ignore_eos: bool
    read: bool
    outputs: int = 0
    riding: bool = False

    @property
    def length(self) -> int:
        """Tokens known."""
        return self.prompt + self.outputs


class Scheduler(ABC):
    """Who runs next.

    Parameters
    ----------
    cache : Cache
        the scheduler is the only one who adds, takes, commits, appends and releases.
    max_batch_tokens : int
        tokens that a step may compute.
    max_running : int
        requests that may run at once.

    Attributes
    ----------
    waiting, running : deque of str, list of str
        ids in order.
    grants : list of Grant
        the step under way.
    stopped : dict of str to Stopped
        why the look-up of each id that the step admitted ended where it did.
    """

    def __init__(self, cache: Cache, max_batch_tokens: int, max_running: int = 256) -> None:
        for name, value, least in (("max_batch_tokens", max_batch_tokens, cache.unit), ("max_running", max_running, 1)):
            if value < least:
                msg = f"{name} is {value}: it must be at least {least}" + (", one block or page." if least > 1 else ".")
                raise ValueError(msg)
        self.cache, self.max_batch_tokens, self.max_running = cache, max_batch_tokens, max_running
        self.jobs: dict[str, Job] = {}
        self.waiting: deque[str] = deque()
        self.running: list[str] = []
        self.grants: list[Grant] = []
        self.stopped: dict[str, Stopped] = {}
        self._ended: list[Ended] = []
        self._reuses = cache.peek([0]).stopped != "skipped"

    # ------------------------------------------------------------------ what an engine or a replay calls
    def add(
        self,
        id: str,
        tokens: Sequence[int] | np.ndarray,
        space: Space = EVERYONE,
        *,
        read: bool = True,
        priority: int = 0,
        max_new: int = 32,
        stop_ids: Collection[int] = (),
        ignore_eos: bool = False,
    ) -> None:
        """Let a request wait, last in line. It ends after `max_new` tokens or on one of `stop_ids`."""
        self.cache.add(id, tokens, space, read=read, priority=priority, max_new=max_new)
        self.jobs[id] = Job(id, len(tokens), max_new, stop_ids, ignore_eos, read)
        self.waiting.append(id)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.jobs

    def next(self) -> list[Grant]:
        """Return the next step's grants, in the order of the batch; empty only when idle."""
        self.grants, self.stopped = [], {}
        while not self.grants and not self.idle:
            before = len(self.jobs), len(self.running)
            self.grants = self._batch()
            if not self.grants and before == (len(self.jobs), len(self.running)) and not self.idle:
                # Nothing moved, so nothing ever will: whoever holds slots and cannot go on makes room, else the first in line.
                stuck = next((id for id in self.jobs if id not in self.waiting), self.waiting[0] if self.waiting else "")
                self._end(stuck, "abort", "there is no room for it to go on and nothing left to wait for: take a larger pool")
        return self.grants

    def done(self, sampled: Mapping[str, int]) -> Done:
        """Take over the step's results: K/V are in their slots, and each grant with ``todo == 0`` sampled a token.

        Parameters
        ----------
        sampled : mapping of id to token
        """
        moved = self.cache.commit([grant.id for grant in self.grants])
        kept: dict[str, int] = {}
        for id in [grant.id for grant in self.grants if grant.todo == 0]:
            job = self.jobs[id]
            if job.riding:  # its one more token is computed; what it sampled meanwhile is nobody's
                self._release(id, "stop")
                continue
            token = kept[id] = sampled[id]
            self.cache.append(id, token)
            job.outputs += 1
            self._judge(job, token)
        self.grants = []
        return Done(moved, kept)

    def fail(self, reason: str) -> list[str]:
        """End every job of the step under way, or all if there is none yet: nothing that it was to write may be hit."""
        ids = [id for id in ([grant.id for grant in self.grants] or list(self.jobs)) if id in self.jobs]
        for id in ids:
            self._end(id, "failed", reason)
        self.grants = []
        return ids

    def cancel(self, id: str, reason: str = "cancelled") -> None:
        """End a job that waits or runs, between two steps; unknown ids have ended already."""
        if id in self.jobs:
            self._end(id, "abort", reason)

    def pop_ended(self) -> list[Ended]:
        """Return the jobs that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # ------------------------------------------------------------------ what the two have of their own
    @abstractmethod
    def _batch(self) -> list[Grant]:
        """Choose the ids of a step and take their slots."""

    @abstractmethod
    def _judge(self, job: Job, token: int) -> None:
        """End `job` if `token` was its last."""

    # ------------------------------------------------------------------ for them
    def _end(self, id: str, outcome: Outcome, reason: str = "") -> None:
        """Release a job and tell of it, unless it was told of already (riding)."""
        if not self.jobs[id].riding:
            self._ended.append(Ended(id, outcome, reason))
        elif outcome == "abort":
            outcome = "stop"
        self._release(id, "abort" if outcome == "refused" else outcome)

    def _release(self, id: str, why: ReleaseWhy) -> None:
        self.cache.release(id, why)
        del self.jobs[id]
        self._forget(id)

    def _forget(self, id: str) -> None:
        """Take `id` out of the queues."""
        for ids in (self.waiting, self.running):
            if id in ids:
                ids.remove(id)

    def _never(self, answer: Refused) -> None:
        """End a job that the pool cannot hold even when empty."""
        job = self.jobs[answer.id]
        what = f"its {job.length:,} tokens"
        if self.cache.policy == "sglang":  # whose admission counts the answer too
            what += f" and up to {job.max_new - job.outputs:,} new ones"
        reason = f"{what} do not fit into the pool of {self.cache.num_tokens:,} tokens, even an empty one: take a larger one"
        self._end(answer.id, "abort" if job.outputs else "refused", reason)

    def _look(self, id: str) -> Stopped | None:
        """Ask why a look-up of `id` stops, where its length alone does not tell (`_stop`)."""
        job = self.jobs[id]
        if not self._reuses or not job.read or job.length % self.cache.unit:
            return None
        row = self.cache.row(id)
        return self.cache.peek(row.tokens, row.space).stopped

    def _stop(self, grant: Grant, looked: Stopped | None) -> Stopped:
        job = self.jobs[grant.id]
        if not self._reuses or not job.read:
            return "skipped"
        if looked is not None and grant.hit == (job.length - 1) // self.cache.unit * self.cache.unit:
            return looked
        return "diverged" if grant.hit < job.length // self.cache.unit * self.cache.unit else "unit"
