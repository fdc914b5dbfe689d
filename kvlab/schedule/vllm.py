"""vLLM's scheduler: running requests first, then waiting ones, all under one token budget (docs/vllm.md 8, 11, 19, 20)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.cache.contract import Grant
from kvlab.schedule.scheduler import Job, Scheduler

if TYPE_CHECKING:
    from kvlab.cache.contract import Cache, Refused


class VllmScheduler(Scheduler):
    """Decodes and chunks of prefills share a step; first come, first served; the last to come is preempted.

    Parameters
    ----------
    cache, max_batch_tokens, max_running
        as for `Scheduler`; vLLM calls them max_num_batched_tokens and max_num_seqs.
    watermark : float
        share of the blocks that an admission leaves free while something runs (19).
    """

    def __init__(self, cache: Cache, max_batch_tokens: int = 2048, max_running: int = 256, watermark: float = 0.0) -> None:
        super().__init__(cache, max_batch_tokens, max_running)
        blocks = 0 if cache.num_tokens is None else cache.num_tokens // cache.unit + 1  # the null block counts
        self._headroom = int(watermark * blocks) * cache.unit

    def _batch(self) -> list[Grant]:
        grants, preempted = self._go_on()
        if not preempted:  # whoever was just preempted would be the first to come back
            self._admit(grants)
        return grants

    def _go_on(self) -> tuple[list[Grant], bool]:
        """Give each running request its decode or its next chunk; while one finds no block, the last to come makes room."""
        grants: list[Grant] = []
        preempted = False
        while len(grants) < len(self.running) and (left := self._left(grants)):
            refused: Refused | None = None
            for answer in self.cache.take(self.running[len(grants) :], left):
                if not isinstance(answer, Grant):
                    refused = answer
                    break
                grants.append(answer)
            if refused is not None and refused.why != "not_reached":
                self._preempt()
                preempted = True
        return grants, preempted

    def _preempt(self) -> None:
        """Send the last running request to the front of the queue: recompute, no swap (20)."""
        id = self.running.pop()
        self.cache.release(id, "preempt")
        self.waiting.appendleft(id)

    def _admit(self, grants: list[Grant]) -> None:
        """Admit waiting requests one by one, each seeing what those before it will write (12)."""
        while self.waiting and len(self.running) < self.max_running and (left := self._left(grants)):
            id = self.waiting[0]
            looked = self._look(id)
            (answer,) = self.cache.take([id], left, self._headroom if self.running else 0)
            if isinstance(answer, Grant):
                self.running.append(self.waiting.popleft())
                self.stopped[id] = self._stop(answer, looked)
                grants.append(answer)
            elif answer.why == "never_fits":
                self._never(answer)
            else:
                return

    def _left(self, grants: list[Grant]) -> int:
        return self.max_batch_tokens - sum(len(grant.slots) for grant in grants)

    def _judge(self, job: Job, token: int) -> None:
        if token in job.stop_ids:  # vLLM looks for a stop before it counts
            self._end(job.id, "stop")
        elif job.outputs >= job.max_new:
            self._end(job.id, "length")
