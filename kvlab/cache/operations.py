"""The operations of recorded traces (tests/golden), by their names, on top of a cache's contract: for notebooks and replay.

One request at a time is admitted, prefilled, decoded and finished, as a scheduler would do it step by step. An operation that is
refused with a CacheError has changed nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from kvlab.cache import checks
from kvlab.cache.contract import EVERYONE, Answer, Cache, CacheError, Grant, Refused, Space

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Tokens = Sequence[int] | np.ndarray


def _space(
    space: Space | None,
    *,
    salt: str | None = None,
    lora: str | None = None,
    extra_key: str | None = None,
    items: Sequence[Sequence[Any]] = (),
    embeds: Sequence[str] | None = None,
) -> Space:
    """Return the namespace that a trace means; a LoRA's path is "adapters/" and its name there, embeddings are written in hex."""
    if space is not None:
        return space
    if salt is None and lora is None and extra_key is None and not items and embeds is None:
        return EVERYONE
    rows = None if embeds is None else tuple(bytes.fromhex(row) for row in embeds)
    return Space(salt, (lora, f"adapters/{lora}") if lora else None, extra_key, tuple(tuple(item) for item in items), rows)


class Operations(Cache, Protocol):
    """What the two engines' operations have in common."""

    def waits(self, id: str) -> bool:
        """Tell whether `id` waits for slots."""

    def runs(self) -> int:
        """Return how many requests hold slots or may take them."""

    def _may_start(self, id: str, tokens: Tokens | None) -> bool:
        """Tell whether `id` is new; it is known and waits otherwise."""
        if self.waits(id):
            return False
        if tokens is None:
            msg = f"request {id!r} does not wait: start it with its tokens."
            raise CacheError(msg)
        return True

    def _must_run(self, id: str, verb: str) -> None:
        if self.waits(id):
            msg = f"cannot {verb} request {id!r}: it waits for slots; start it again first."
            raise CacheError(msg)

    def lookup(self, tokens: Tokens, *, space: Space | None = None, **keys: Any) -> Answer:  # noqa: ANN401 - the parts of a Space
        """Say what a prompt would hit, changing nothing (unlike SGLang's own `match`, which splits and stamps)."""
        found = self.peek(tokens, _space(space, **keys))
        return Answer(ok=True, hit_tokens=found.tokens, slots=found.slots)


class BlockOperations(Operations, Protocol):
    """vLLM's operations: a prompt is prefilled in chunks of ``max_num_batched_tokens`` inside its one start."""

    num_blocks: int | None
    watermark: float
    max_num_batched_tokens: int | None

    def start(
        self,
        id: str,
        tokens: Tokens | None = None,
        *,
        salt: str | None = None,
        lora: str | None = None,
        items: Sequence[Sequence[Any]] = (),
        embeds: Sequence[str] | None = None,
        space: Space | None = None,
        skip_read: bool = False,
        max_output: int = 0,
    ) -> Answer:
        """Look up, admit and prefill; an id that waits (preempted) resumes. A start that is not ok leaves no request behind."""
        new = self._may_start(id, tokens)
        if new and tokens is not None:
            space = _space(space, salt=salt, lora=lora, items=items, embeds=embeds)
            self.add(id, tokens, space, read=not skip_read, max_new=max_output)
        headroom = int(self.watermark * (self.num_blocks or 0)) * self.unit if self.runs() else 0
        grants: list[Grant] = []
        while not grants or grants[-1].todo:
            (answer,) = self.take([id], self.max_num_batched_tokens, headroom)
            if isinstance(answer, Refused):
                if new:
                    self.release(id, "abort")
                return _answer(answer)
            self.commit([id])
            grants.append(answer)
        return Answer(ok=True, hit_tokens=grants[0].hit, slots=np.concatenate([grant.slots for grant in grants]))

    def resume(self, id: str) -> Answer:
        """Look up and admit a preempted request again, its outputs included; it goes on waiting if refused."""
        return self.start(id)

    def decode(self, id: str, token: int | None = None, *, last: bool = False) -> Answer:
        """Append a sampled token and take the next step's slot; with `last` it is the request's last and gets no K/V.

        Without `token` a step that was refused is tried again.
        """
        self._must_run(id, "decode")
        if token is not None:
            self.append(id, token)
        if last:
            return Answer(ok=True)
        (answer,) = self.take([id])
        if isinstance(answer, Grant):
            self.commit([id])
        return _answer(answer, hit=False)

    def finish(self, id: str) -> Answer:
        """End a request; its blocks are freed tail first."""
        self.release(id, "stop")
        return Answer(ok=True)

    def preempt(self, id: str) -> Answer:
        """Free a running request's blocks and let it wait with all its tokens."""
        self._must_run(id, "preempt")
        self.release(id, "preempt")
        return Answer(ok=True)


class RadixOperations(Operations, Protocol):
    """SGLang's operations: ``start`` is one prefill batch of one request; a chunked one goes on with ``chunk``."""

    overlap: bool
    chunk_size: int | None

    def prefills(self, id: str) -> bool:
        """Tell whether a running request has a part of its prompt left to prefill."""

    def start(
        self,
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
        """Look up, admit and prefill (the first chunk of) a prompt; a retracted id resumes. A refused one is not left behind."""
        space = _space(space, salt=salt, lora=lora, extra_key=extra_key)
        return self.prefill([{"id": id, "tokens": tokens, "space": space, "priority": priority, "max_new": max_new}])[0]

    def prefill(self, requests: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Prefill several requests in ONE batch, each a mapping of what `start` takes."""
        added: list[str] = []
        try:
            for request in requests:
                if self._enlist(**request):
                    added.append(request["id"])  # noqa: PERF401 - an error in between must find what was added so far
            return self._step([request["id"] for request in requests])
        except Exception:
            for id in added:
                self.release(id, "abort")
            raise

    def _enlist(
        self,
        id: str,
        tokens: Tokens | None = None,
        *,
        space: Space | None = None,
        priority: int = 0,
        max_new: int = 0,
        **keys: Any,  # noqa: ANN401 - the parts of a Space
    ) -> bool:
        """Add a request unless it waits already; tell whether it was new."""
        new = self._may_start(id, tokens)
        if new and tokens is not None:
            self.add(id, tokens, _space(space, **keys), priority=priority, max_new=max_new)
        return new

    def chunk(self, id: str) -> Answer:
        """Prefill the next chunk of a running request; `hit_tokens` tells how many tokens are in place already."""
        self._must_run(id, "go on with")
        if not self.prefills(id):
            msg = f"request {id!r} has nothing left to prefill: decode it or finish it."
            raise CacheError(msg)
        there = len(self.row(id).slots)
        (answer,) = self._step([id])
        answer.hit_tokens = there
        return answer

    def _step(self, ids: list[str]) -> list[Answer]:
        taken = self.take(ids, self.chunk_size)
        self.commit([answer.id for answer in taken if isinstance(answer, Grant)])
        for answer in taken:
            if isinstance(answer, Refused) and self.waits(answer.id):
                self.release(answer.id, "abort")
        return [_answer(answer) for answer in taken]

    def decode(self, id: str, token: int) -> Answer:
        """Compute the K/V of the token sampled before, then append this one; refused, it appends nothing."""
        self._must_run(id, "decode")
        if self.prefills(id):
            msg = f"cannot decode request {id!r}: a part of its prompt is not computed yet; go on with chunk first."
            raise CacheError(msg)
        token = checks.token(token, id)
        (answer,) = self.take([id])
        if isinstance(answer, Grant):
            self.commit([id])
            self.append(id, token)
        return _answer(answer, hit=False)

    def finish(self, id: str, reason: Literal["stop", "length"] = "stop") -> Answer:
        """End a request and keep what it computed; with overlap a stop has computed its last token's K/V too."""
        checks.why(reason)
        if self.overlap and reason == "stop" and not (self.waits(id) or self.prefills(id)):
            (answer,) = self.take([id])
            if isinstance(answer, Grant):
                self.commit([id])
        self.release(id, reason)
        return Answer(ok=True)

    def abort(self, id: str) -> Answer:
        """End a request and insert nothing new."""
        self.release(id, "abort")
        return Answer(ok=True)

    def retract(self, id: str) -> Answer:
        """Send a running request back to wait, then evict until 20 tokens are free for each that still runs (19)."""
        self._must_run(id, "retract")
        self.release(id, "preempt")
        free = self.sizes().free
        if free is not None and free < 20 * self.runs():
            self.evict(20 * self.runs() - free)
        return Answer(ok=True)


def _answer(answer: Grant | Refused, *, hit: bool = True) -> Answer:
    """Say what `take` answered; `hit`: the answer tells of a look-up."""
    if isinstance(answer, Refused):
        return Answer(ok=False, hit_tokens=answer.hit if hit else None, why=answer.why)
    return Answer(ok=True, hit_tokens=answer.hit if hit else None, slots=answer.slots)
