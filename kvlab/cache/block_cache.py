"""vLLM's prefix cache: full blocks found by the hash of all that stands up to their end (vLLM 0.33.0).

Numbers in brackets are the rules of docs/vllm.md. What makes it what it is: keys are made when a block's slots are
*scheduled* (12), a free block keeps its key until it is taken for something else (17), and the free queue orders by release alone
(16).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvlab.cache import checks
from kvlab.cache import events as ev
from kvlab.cache.contract import (
    EVERYONE,
    NO_SLOTS,
    CacheError,
    Grant,
    Match,
    Moved,
    Refused,
    RefusedWhy,
    ReleaseWhy,
    Sizes,
    Space,
    Stopped,
)
from kvlab.cache.free_list import FreeList
from kvlab.cache.hashing import digest_function, event_hash, extra_keys, none_hash
from kvlab.cache.operations import BlockOperations
from kvlab.cache.state import Block, Row, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class _Key(NamedTuple):
    """The key of a full block, and what it was made of."""

    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]
    place: int  # in its prompt, in blocks


@dataclass(slots=True)
class _Request:
    id: str
    tokens: list[int]
    prompt: int
    space: Space
    read: bool
    priority: int
    max_new: int
    keys: list[_Key] = field(default_factory=list)  # of its full blocks, made eagerly (1)
    blocks: list[int] = field(default_factory=list)
    running: bool = False
    resumed: bool = False
    goal: int = 0  # tokens to prefill: its length at admission
    granted: int = 0  # tokens that have slots
    written: int = 0  # tokens whose K/V are there
    hit: int = 0


class BlockCache(BlockOperations):
    """A pool of hash blocks.

    Parameters
    ----------
    num_blocks : int or None
        as vLLM counts: block 0 is the null block, so ``num_blocks - 1`` are usable. None: unlimited.
    block_size : int
        tokens in a block.
    enable_caching : bool
        False is vLLM V0's default: paging without reuse.
    hash : {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}
        digest of the keys.
    hash_seed : str or None
        what PYTHONHASHSEED would be; None as vLLM does without it (3).
    watermark : float
        share of the blocks that an admission leaves free while something runs (19).
    max_num_batched_tokens : int or None
        chunk of a prefill inside one `start`.

    Raises
    ------
    CacheError
        for sizes that cannot be.
    """

    policy = "vllm"

    def __init__(
        self,
        num_blocks: int | None = None,
        block_size: int = 16,
        *,
        enable_caching: bool = True,
        hash: str = "sha256",
        hash_seed: str | None = None,
        watermark: float = 0.0,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        self.unit = self.block_size = checks.size(block_size, "block_size")
        self.num_blocks = None if num_blocks is None else checks.size(num_blocks, "num_blocks", 2)
        self.num_tokens = None if self.num_blocks is None else (self.num_blocks - 1) * self.unit
        if max_num_batched_tokens is not None:
            checks.size(max_num_batched_tokens, "max_num_batched_tokens")
        if not 0 <= watermark < 1:
            msg = f"watermark is {watermark!r}: it is a share of the blocks, from 0 to below 1."
            raise CacheError(msg)
        self.enable_caching, self.watermark, self.max_num_batched_tokens = enable_caching, watermark, max_num_batched_tokens
        self._digest, self._none = digest_function(hash), none_hash(hash, hash_seed)
        self._free = FreeList(None if self.num_blocks is None else self.num_blocks - 1)
        self._refs: dict[int, int] = {}  # block -> holders, in use only
        self._key_of: dict[int, _Key] = {}  # keyed block -> its key
        self._cached: dict[bytes, int | dict[int, None]] = {}  # digest -> block, or its copies, oldest first (10)
        self._requests: dict[str, _Request] = {}
        self._log: list[ev.Event] | None = None
        self._idle = 0  # keyed blocks that nobody holds
        self._queried = self._found = 0

    # ------------------------------------------------------------------ requests come and grow
    def add(
        self,
        id: str,
        tokens: Sequence[int] | np.ndarray,
        space: Space = EVERYONE,
        *,
        read: bool = True,
        priority: int = 0,
        max_new: int = 0,
    ) -> None:
        """Let a request wait; it has no slot yet.

        Raises
        ------
        CacheError
            if `id` is known already, `tokens` are none, or there are more or fewer embeddings than tokens.
        """
        array = checks.prompt(id, tokens, self._requests, priority, max_new)
        if space.embeds is not None and len(space.embeds) != len(array):
            msg = f"request {id!r} has {len(array):,} tokens and {len(space.embeds):,} embeddings: give one a token."
            raise CacheError(msg)
        request = _Request(id, array.tolist(), len(array), space, read, priority, max_new)
        self._make_keys(request)
        self._requests[id] = request
        if self._log is not None:
            self._log.append(ev.Queued(id, array, space, read, priority, max_new))

    def append(self, id: str, token: int) -> None:
        """Add a sampled token; its K/V are computed in the next step (13)."""
        request = self._running(id, "append to")
        token = checks.token(token, id)
        request.tokens.append(token)
        self._make_keys(request)
        if self._log is not None:
            self._log.append(ev.Appended(id, token))

    def _make_keys(self, request: _Request) -> None:
        if not self.enable_caching:
            return
        size, keys = self.unit, request.keys
        parent = keys[-1].digest if keys else self._none
        for index in range(len(keys), len(request.tokens) // size):
            start = index * size
            tokens = tuple(request.tokens[start : start + size])
            digest = self._digest((parent, tokens, extra_keys(request.space, start, start + size)))
            keys.append(_Key(digest, parent, tokens, index))
            parent = digest

    # ------------------------------------------------------------------ look-up
    def peek(self, tokens: Sequence[int] | np.ndarray, space: Space = EVERYONE, *, read: bool = True) -> Match:
        """Look up a prompt, changing nothing: at most N - 1 tokens, whole blocks (7)."""
        array = checks.token_array(tokens, "the prompt looked up")
        probe = _Request("", array.tolist(), len(array), space, read, 0, 0)
        self._make_keys(probe)
        blocks = self._lookup(probe)
        hit = len(blocks) * self.unit
        return Match(hit, self._slots(blocks, 0, hit), None, self._stopped(probe, len(blocks)))

    def match(self, tokens: Sequence[int] | np.ndarray, space: Space = EVERYONE) -> Match:
        """Look up as the engine does: for hash blocks the same as `peek`."""
        return self.peek(tokens, space)

    def _lookup(self, request: _Request) -> list[int]:
        if not (self.enable_caching and request.read):
            return []
        blocks = []
        for key in request.keys[: (len(request.tokens) - 1) // self.unit]:
            found = self._cached.get(key.digest)
            if found is None:
                break
            blocks.append(found if isinstance(found, int) else next(iter(found)))
        return blocks

    def _stopped(self, request: _Request, found: int) -> Stopped:
        if not (self.enable_caching and request.read):
            return "skipped"
        if not request.tokens:
            return "end"
        if found < (len(request.tokens) - 1) // self.unit:
            return "diverged"
        if len(request.tokens) % self.unit:
            return "unit"
        return "last_token" if request.keys[found].digest in self._cached else "diverged"

    # ------------------------------------------------------------------ slots
    def take(self, ids: Sequence[str], budget: int | None = None, headroom: int = 0) -> list[Grant | Refused]:
        """Schedule one batch, ids in order, each looked up and keyed before the next (12).

        Parameters
        ----------
        ids : sequence of str
            waiting ids are looked up and admitted if their whole sequence fits (11); running ones get their next chunk or decode.
        budget : int or None
            tokens to compute in all; hits do not count.
        headroom : int
            slots that an admission must leave free.

        Returns
        -------
        list of Grant or Refused
            one an id. After the first refusal, or when the budget is spent, the rest are ``not_reached``.
        """
        requests = [self._known(id) for id in ids]
        left = checks.batch(ids, budget, headroom)
        out: list[Grant | Refused] = []
        for request in requests:
            if (out and isinstance(out[-1], Refused)) or left <= 0:
                out.append(self._refuse(request, "not_reached", None, 0))
                continue
            answer = self._grow(request, left) if request.running else self._admit(request, left, headroom)
            if isinstance(answer, Grant):
                left -= len(answer.slots)
            out.append(answer)
        return out

    def _admit(self, request: _Request, budget: int, headroom: int) -> Grant | Refused:
        hits = self._lookup(request)
        total, hit = len(request.tokens), len(hits) * self.unit
        # hits that stand in the free queue leave it too (11)
        needed = self._blocks_of(total) - len(hits) + sum(block not in self._refs for block in hits)
        short = needed + self._blocks_of(headroom) - len(self._free)
        if short > 0:
            return self._refuse(request, self._no_space(total), hit, short * self.unit)
        self._touch(hits)
        if self.enable_caching and request.read and not request.resumed:  # (27)
            self._queried += total
            self._found += hit
            counted = True
        else:
            counted = False
        request.blocks, request.running, request.goal, request.hit = hits, True, total, hit
        request.granted = request.written = hit
        if self._log is not None:
            self._log.append(ev.Admitted(request.id, hit, self._slots(hits, 0, hit), counted))
        return self._allot(request, min(total - hit, budget), hit)

    def _grow(self, request: _Request, budget: int) -> Grant | Refused:
        count = min(len(request.tokens) - request.granted, budget)
        short = self._blocks_of(request.granted + count) - len(request.blocks) - len(self._free)
        if short > 0:
            return self._refuse(request, self._no_space(len(request.tokens)), 0, short * self.unit)
        return self._allot(request, count, 0)

    def _allot(self, request: _Request, count: int, hit: int) -> Grant:
        start, first = request.granted, len(request.blocks)
        request.granted += count
        new = self._free.pop(self._blocks_of(request.granted) - first)
        self._forget([block for block in new if block in self._key_of], "evicted")
        for block in new:
            self._refs[block] = 1
        request.blocks += new
        slots = self._slots(request.blocks, start, request.granted)
        if self._log is not None and count:
            self._log.append(ev.Taken(request.id, start, slots, np.array(new, dtype=np.int64)))
        self._remember(request, start // self.unit, request.granted // self.unit)
        return Grant(request.id, hit, start, slots, len(request.tokens) - request.granted)

    def _refuse(self, request: _Request, why: RefusedWhy, hit: int | None, short: int) -> Refused:
        if self._log is not None:
            self._log.append(ev.Refused(request.id, why, hit, short))
        return Refused(request.id, why, hit, short)

    def _no_space(self, tokens: int) -> RefusedWhy:
        fits = self.num_blocks is None or self._blocks_of(tokens) < self.num_blocks
        return "no_space" if fits else "never_fits"

    def commit(self, ids: Sequence[str]) -> list[Moved]:
        """K/V of all granted slots are written."""
        requests = [self._running(id, "commit") for id in ids]
        for request in requests:
            if request.written < request.granted:
                request.written = request.granted
                if self._log is not None:
                    self._log.append(ev.Written(request.id, request.written))
        return []

    # ------------------------------------------------------------------ keys
    def _remember(self, request: _Request, first: int, stop: int) -> None:
        """Key the full blocks ``[first, stop)`` of a request: before the forward pass (12), equal blocks side by side (10)."""
        if not self.enable_caching or first >= stop:
            return
        blocks, keys = request.blocks[first:stop], request.keys[first:stop]
        for block, key in zip(blocks, keys, strict=True):
            self._key_of[block] = key
            there = self._cached.setdefault(key.digest, block)
            if isinstance(there, dict):
                there[block] = None
            elif there != block:
                self._cached[key.digest] = {there: None, block: None}
        if self._log is not None:
            hashes = tuple(event_hash(key.digest) for key in keys)
            tokens = np.array([t for key in keys for t in key.tokens], dtype=np.int32)
            parent = event_hash(keys[0].parent) if first else None
            self._log.append(ev.Keyed(request.id, np.array(blocks, dtype=np.int64), first, hashes, parent, tokens))

    def _forget(self, blocks: list[int], why: str) -> None:
        """Drop the keys of `blocks`."""
        if not blocks:
            return
        hashes = []
        for block in blocks:
            key = self._key_of.pop(block)
            there = self._cached[key.digest]
            if isinstance(there, dict):
                del there[block]
            if isinstance(there, int) or not there:
                del self._cached[key.digest]
            self._idle -= block not in self._refs
            hashes.append(event_hash(key.digest))
        if self._log is not None:
            self._log.append(ev.Unkeyed(np.array(blocks, dtype=np.int64), tuple(hashes), why))  # type: ignore[arg-type]

    def _touch(self, blocks: list[int]) -> None:
        """One holder more each; an idle block leaves the free queue (14)."""
        for block in blocks:
            if block not in self._refs:
                self._free.remove(block)
                self._idle -= 1
            self._refs[block] = self._refs.get(block, 0) + 1
        if self._log is not None and blocks:
            self._log.append(ev.Touched(np.array(blocks, dtype=np.int64)))

    # ------------------------------------------------------------------ slots come back
    def release(self, id: str, why: ReleaseWhy) -> None:
        """End a request, or with ``preempt`` send it back to wait: its blocks are freed tail first, keyed ones stay hittable."""
        request = self._known(id)
        checks.why(why)
        blocks = request.blocks
        # No block without written K/V may be hit, whatever the end.
        whole = request.written // self.unit
        self._forget([block for block in blocks[whole:] if block in self._key_of], "failed")
        for block in blocks:
            self._refs[block] -= 1
        idle = [block for block in reversed(blocks) if not self._refs[block]]
        for block in idle:
            del self._refs[block]
        unkeyed = [block for block in idle if block not in self._key_of]
        keyed = [block for block in idle if block in self._key_of]
        self._free.push_front(unkeyed)  # worthless blocks are reused first (16)
        self._free.push_back(keyed)
        self._idle += len(keyed)
        del self._requests[id]
        if why == "preempt":
            fresh = _Request(
                id, request.tokens, request.prompt, request.space, request.read, request.priority, request.max_new, request.keys
            )
            fresh.resumed = request.resumed or request.running
            self._requests[id] = fresh
        if self._log is not None:
            if blocks:
                self._log.append(ev.Dropped(np.array(blocks, dtype=np.int64)))
            self._log.extend(
                ev.Freed(np.array(units, dtype=np.int64), front) for units, front in ((unkeyed, True), (keyed, False)) if units
            )
            self._log.append(ev.Released(id, why))

    def evict(self, tokens: int) -> int:
        """Forget idle blocks, next to be taken first, until `tokens` tokens are no longer cached; return how many were."""
        checks.size(tokens, "tokens", 0)
        chosen: list[int] = []
        for block in self._free.used():
            if len(chosen) * self.unit >= tokens:
                break
            if block in self._key_of:
                chosen.append(block)
        self._forget(chosen, "evicted")
        return len(chosen) * self.unit

    def reset(self) -> bool:
        """Forget everything cached; False, and nothing changes, while a block is in use (21)."""
        if self._refs:
            return False
        self._key_of.clear()
        self._cached.clear()
        self._idle = 0
        if self._log is not None:
            self._log.append(ev.Cleared())
        return True

    # ------------------------------------------------------------------ what others see
    def row(self, id: str) -> Row:
        """Return one request as it stands."""
        r = self._known(id)
        slots = self._slots(r.blocks, 0, r.granted)
        return Row(r.id, list(r.tokens), r.prompt, r.space, r.read, r.priority, r.max_new, r.running, slots, r.hit, r.written)

    def sizes(self) -> Sizes:
        """Return free, evictable (cached idle) and protected (in use) tokens, in O(1)."""
        free = None if self.num_blocks is None else (len(self._free) - self._idle) * self.unit
        return Sizes(free, self._idle * self.unit, len(self._refs) * self.unit)

    def snapshot(self) -> State:
        """Return the whole cache as a State of its own."""
        blocks = {
            block: Block(event_hash(k.digest), event_hash(k.parent) if k.place else None, k.tokens, k.place)
            for block, k in self._key_of.items()
        }
        rows = {id: self.row(id) for id in self._requests}
        state = State(self.policy, self.unit, self.num_tokens, self._free.copy(), "lru", rows, dict(self._refs), blocks)  # type: ignore[arg-type]
        state.queried, state.found = self._queried, self._found
        return state

    def events(self) -> list[ev.Event]:
        """Return what happened since the last call; the first call starts the listening."""
        log, self._log = self._log or [], []
        return log

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is where it must be: free, idle or held by exactly the rows that name it."""
        holders: dict[int, int] = {}
        for r in self._requests.values():
            assert len(r.blocks) == self._blocks_of(r.granted), f"{r.id}: {len(r.blocks)} blocks for {r.granted} tokens"
            assert r.hit <= r.written <= r.granted <= len(r.tokens), f"{r.id}: hit, written, granted out of order"
            assert r.running or not r.blocks, f"{r.id} waits but holds blocks"
            for i, block in enumerate(r.blocks):
                holders[block] = holders.get(block, 0) + 1
                key = self._key_of.get(block)
                assert key is None or key.digest == r.keys[i].digest, f"{r.id}: block {block} is keyed for another content"
        assert holders == self._refs, "reference counts differ from the rows"
        queue = list(self._free.used())
        assert len(queue) == len(set(queue)), "a block stands twice in the free queue"
        assert not set(queue) & set(self._refs), "a block in use stands in the free queue"
        if self.num_blocks is not None:
            assert len(self._free) + len(self._refs) == self.num_blocks - 1, "blocks were lost or made"
        assert self._idle == sum(block not in self._refs for block in self._key_of), "idle blocks miscounted"
        copies = {d: {b: None} if isinstance(b, int) else b for d, b in self._cached.items()}
        assert {b: d for d, blocks in copies.items() for b in blocks} == {b: k.digest for b, k in self._key_of.items()}, (
            "the map and the blocks disagree about keys"
        )
        for block, key in self._key_of.items():
            assert block in self._refs or block in self._free, f"keyed block {block} is nowhere"
            assert key.place or key.parent == self._none, f"first block {block} has a parent"

    # ------------------------------------------------------------------ small things
    def waits(self, id: str) -> bool:
        """Tell whether `id` waits for slots."""
        return id in self._requests and not self._requests[id].running

    def runs(self) -> int:
        """Return how many requests hold slots or may take them."""
        return sum(r.running for r in self._requests.values())

    def _known(self, id: str) -> _Request:
        if id not in self._requests:
            msg = f"request {id!r} is not here: add it first, or it has ended already."
            raise CacheError(msg)
        return self._requests[id]

    def _running(self, id: str, verb: str) -> _Request:
        request = self._known(id)
        if not request.running:
            msg = f"cannot {verb} request {id!r}: it still waits for slots; take it first."
            raise CacheError(msg)
        return request

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.unit)

    def _slots(self, blocks: Iterable[int], start: int, stop: int) -> np.ndarray:
        """Return the slots of tokens ``[start, stop)`` of a row with these blocks."""
        if stop <= start:
            return NO_SLOTS
        position = np.arange(start, stop, dtype=np.int64)
        table = np.array(blocks, dtype=np.int64)
        return table[position // self.unit] * self.unit + position % self.unit
