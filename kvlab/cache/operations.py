"""The operations of recorded traces (tests/golden), by their names, on top of a cache's contract: for notebooks and replay.

One request at a time is admitted, prefilled, decoded and finished, as a scheduler would do it step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvlab.cache.contract import EVERYONE, NO_SLOTS, Answer, CacheError, Refused, Space

if TYPE_CHECKING:
    from kvlab.cache.block_cache import BlockCache
    from kvlab.cache.contract import Cache, Grant
    from kvlab.cache.radix_cache import RadixCache

Tokens = Sequence[int] | np.ndarray


def _space(space: Space | None, salt: str | None, lora: str | None, extra_key: str | None) -> Space:
    """Return the namespace that a trace means; a LoRA's path is "adapters/" and its name there."""
    if space is not None:
        return space
    if salt is None and lora is None and extra_key is None:
        return EVERYONE
    return Space(salt, (lora, f"adapters/{lora}") if lora else None, extra_key)


def _refusal(answer: Refused) -> Answer:
    return Answer(False, answer.hit, NO_SLOTS, answer.why)


def _lookup(cache: Cache, tokens: Tokens, salt: str | None = None, space: Space | None = None) -> Answer:
    found = cache.peek(tokens, _space(space, salt, None, None))
    return Answer(True, found.tokens, found.slots)


class BlockOperations:
    """vLLM's operations: a prompt is prefilled in chunks of ``max_num_batched_tokens`` inside its one start."""

    def start(
        self: BlockCache,
        id: str,
        tokens: Tokens | None = None,
        *,
        salt: str | None = None,
        lora: str | None = None,
        space: Space | None = None,
        skip_read: bool = False,
        max_output: int = 0,
    ) -> Answer:
        """Look up, admit and prefill; an id that waits (preempted) resumes. A start that is not ok leaves no request behind."""
        new = not self.waits(id)
        if new:
            if tokens is None:
                msg = f"request {id!r} does not wait: start it with its tokens."
                raise CacheError(msg)
            self.add(id, tokens, _space(space, salt, lora, None), read=not skip_read, max_new=max_output)
        headroom = int(self.watermark * (self.num_blocks or 0)) * self.unit if self.runs() else 0
        hit, slots, todo = None, [], 1
        while todo:
            (answer,) = self.take([id], self.max_num_batched_tokens, headroom)
            if isinstance(answer, Refused):
                if new:
                    self.release(id, "abort")
                return _refusal(answer)
            self.commit([id])
            hit = answer.hit if hit is None else hit
            slots.append(answer.slots)
            todo = answer.todo
        return Answer(True, hit, np.concatenate(slots))

    def resume(self: BlockCache, id: str) -> Answer:
        """Look up and admit a preempted request again, its outputs included; it goes on waiting if refused."""
        if not self.waits(id):
            msg = f"request {id!r} does not wait: only a preempted request resumes."
            raise CacheError(msg)
        return self.start(id)

    def decode(self: BlockCache, id: str, token: int | None = None, *, last: bool = False) -> Answer:
        """Append a sampled token and take the next step's slot; with `last` it is the request's last and gets no K/V."""
        if token is not None:
            self.append(id, token)
        if last:
            return Answer(True)
        (answer,) = self.take([id])
        if isinstance(answer, Refused):
            return Answer(False, None, NO_SLOTS, answer.why)
        self.commit([id])
        return Answer(True, None, answer.slots)

    def finish(self: BlockCache, id: str) -> Answer:
        """End a request; its blocks are freed tail first."""
        self.release(id, "stop")
        return Answer(True)

    def preempt(self: BlockCache, id: str) -> Answer:
        """Free a running request's blocks and let it wait with all its tokens."""
        self.release(id, "preempt")
        return Answer(True)

    def lookup(self: BlockCache, tokens: Tokens, *, salt: str | None = None, space: Space | None = None) -> Answer:
        """Say what a prompt would hit, changing nothing."""
        return _lookup(self, tokens, salt, space)


class RadixOperations:
    """SGLang's operations: ``start`` is one prefill batch of one request; a chunked one goes on with ``chunk``."""

    def start(
        self: RadixCache,
        id: str,
        tokens: Tokens | None = None,
        *,
        salt: str | None = None,
        extra_key: str | None = None,
        lora: str | None = None,
        space: Space | None = None,
        priority: int = 0,
        max_new: int = 0,
    ) -> Answer:
        """Look up, admit and prefill (the first chunk of) a prompt; a retracted id resumes. Refused: no request is left behind."""
        request = {"id": id, "tokens": tokens, "priority": priority, "max_new": max_new}
        request["space"] = _space(space, salt, lora, extra_key)
        return self.prefill([request])[0]

    def prefill(self: RadixCache, requests: Sequence[dict]) -> list[Answer]:
        """Prefill several requests in ONE batch; each a dict of what `start` takes."""
        for r in requests:
            if not self.waits(r["id"]):
                if r.get("tokens") is None:
                    msg = f"request {r['id']!r} does not wait: start it with its tokens."
                    raise CacheError(msg)
                space = _space(r.get("space"), r.get("salt"), r.get("lora"), r.get("extra_key"))
                self.add(r["id"], r["tokens"], space, priority=r.get("priority", 0), max_new=r.get("max_new", 0))
        return self._step([r["id"] for r in requests])

    def chunk(self: RadixCache, id: str) -> Answer:
        """Prefill the next chunk of a running request; `hit_tokens` tells how many tokens are in place already."""
        there = len(self.row(id).slots)
        (answer,) = self._step([id])
        answer.hit_tokens = there
        return answer

    def _step(self: RadixCache, ids: list[str]) -> list[Answer]:
        taken: list[Grant | Refused] = self.take(ids, self.chunk_size)
        granted = [t.id for t in taken if not isinstance(t, Refused)]
        self.commit(granted)
        for t in taken:
            if isinstance(t, Refused) and self.waits(t.id):
                self.release(t.id, "abort")
        return [_refusal(t) if isinstance(t, Refused) else Answer(True, t.hit, t.slots) for t in taken]

    def decode(self: RadixCache, id: str, token: int) -> Answer:
        """Compute the K/V of the token sampled before, then append this one; refused, it appends nothing."""
        (answer,) = self.take([id])
        if isinstance(answer, Refused):
            return _refusal(answer)
        self.commit([id])
        self.append(id, token)
        return Answer(True, None, answer.slots)

    def finish(self: RadixCache, id: str, reason: Literal["stop", "length"] = "stop") -> Answer:
        """End a request and keep what it computed; with overlap a stop has computed its last token's K/V too."""
        if self.overlap and reason == "stop":
            (answer,) = self.take([id])
            if not isinstance(answer, Refused):
                self.commit([id])
        self.release(id, reason)
        return Answer(True)

    def abort(self: RadixCache, id: str) -> Answer:
        """End a request and insert nothing new."""
        self.release(id, "abort")
        return Answer(True)

    def retract(self: RadixCache, id: str) -> Answer:
        """Send a running request back to wait, then evict until 20 tokens are free for each that still runs (19)."""
        self.release(id, "preempt")
        short = 20 * self.runs() - (self.sizes().free or 0)
        if short > 0 and self.num_tokens is not None:
            self.evict(short)
        return Answer(True)

    def lookup(self: RadixCache, tokens: Tokens, *, salt: str | None = None, space: Space | None = None) -> Answer:
        """Say what a prompt would hit, changing nothing (unlike `match`, which splits and stamps)."""
        return _lookup(self, tokens, salt, space)
