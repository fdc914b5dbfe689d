"""SGLang's prefix cache: a radix tree of token sequences over pages of slots (RadixAttention, SGLang 0.5.23).

Numbers in brackets are the rules of docs/sglang.md. What makes it what it is: look-ups split and stamp nodes (4, 6), requests
lock the path that they read (14), what was computed joins the tree after prefill and at the end, never per decode step (8), and
whole unlocked leaves fall when slots are short (16). The tree itself is in radix_tree.py; this file holds requests, slots and
admission.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from kvlab.cache.operations import RadixOperations
from kvlab.cache.page_pool import PagePool
from kvlab.cache.radix_tree import Namespace, RadixNode, RadixTree
from kvlab.cache.state import Row, State

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_NEW_RESERVED = 4096  # an admission reserves at most so many tokens for its answer (15)


def namespace(space: Space) -> Namespace:
    """Return the key of a namespace: (extra key with the LoRA name joined on, salt) (18).

    Raises
    ------
    CacheError
        for images and embeddings: the tree compares token ids and nothing else.
    """
    if space.items or space.embeds is not None:
        msg = "a radix tree compares token ids alone: give images and embeddings ids of their own, not Space.items or .embeds."
        raise CacheError(msg)
    extra = (space.extra_key or "") + (space.lora[0] if space.lora else "")
    return extra or None, space.salt or None


@dataclass(slots=True)
class _Request:
    id: str
    tokens: list[int]
    prompt: int
    space: Space
    read: bool
    priority: int
    max_new: int
    running: bool = False
    resumed: bool = False
    goal: int = 0  # tokens to prefill: its length at admission
    slots: np.ndarray = field(default_factory=lambda: NO_SLOTS)
    written: int = 0
    hit: int = 0
    node: RadixNode | None = None  # last node of the locked path
    protected: int = 0  # tokens read from the tree
    inserted: int = 0  # tokens that it has inserted so far: nodes up to there have counted it (12)


class RadixCache(RadixOperations):
    """A pool of pages under a radix tree.

    Parameters
    ----------
    num_tokens : int or None
        slots; all are usable (1). None: unlimited.
    page_size : int
        tokens in a page.
    policy : {"lru", "lfu", "slru", "priority", "fifo", "mru", "filo"}
        which unlocked leaf falls first (17).
    overlap : bool
        the overlap scheduler, on by default: a finish by stop token has computed that token's K/V too (9).
    enable : bool
        False is ``--disable-radix-cache``: no reuse (21).
    chunk : int or None
        tokens of a prefill step (20).

    Raises
    ------
    CacheError
        for sizes and policies that cannot be.
    """

    policy = "sglang"

    def __init__(
        self,
        num_tokens: int | None = None,
        page_size: int = 1,
        policy: str = "lru",
        *,
        overlap: bool = True,
        enable: bool = True,
        chunk: int | None = None,
    ) -> None:
        self.unit = self.page_size = checks.size(page_size, "page_size")
        self.num_tokens = checks.capacity(num_tokens, self.unit, "page size")
        self.eviction, self.overlap, self.enable = policy, overlap, enable
        self.chunk_size = None if chunk is None else checks.size(chunk, "chunk")
        self._pool = PagePool(None if self.num_tokens is None else self.num_tokens // self.unit, self.unit)
        self._tree = RadixTree(self.unit, policy)
        self._requests: dict[str, _Request] = {}
        self._log: list[ev.Event] | None = None
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
            if `id` is known already or `tokens` are none.
        """
        array = checks.prompt(id, tokens, self._requests, priority, max_new)
        namespace(space)  # it must have one
        self._requests[id] = _Request(id, array.tolist(), len(array), space, read, priority, max_new)
        self._say(ev.Queued(id, array, space, read, priority, max_new))

    def append(self, id: str, token: int) -> None:
        """Add a sampled token; its K/V are computed in the next decode step."""
        request = self._running(id, "append to")
        token = checks.token(token, id)
        request.tokens.append(token)
        self._say(ev.Appended(id, token))

    # ------------------------------------------------------------------ look-up
    def peek(self, tokens: Sequence[int] | np.ndarray, space: Space = EVERYONE, *, read: bool = True) -> Match:
        """Look up a prompt, changing nothing: at most N - 1 tokens, whole pages (5)."""
        array = checks.token_array(tokens, "the prompt looked up")
        if not (self.enable and read):
            return Match(0, NO_SLOTS, None, "skipped")
        if not len(array):
            return Match(0, NO_SLOTS, None, "end")
        path, full = self._tree.find(array, namespace(space))
        most = self._whole(len(array) - 1)
        hit = min(self._whole(full), most)
        slots = np.concatenate([n.slots for n in path])[:hit] if hit else NO_SLOTS
        stopped: Stopped = "diverged"
        if hit == most:
            at_end = self._whole(len(array)) > most
            stopped = "unit" if not at_end else "last_token" if full == len(array) else "diverged"
        return Match(hit, slots, path[-1].id if path else None, stopped)

    def match(self, tokens: Sequence[int] | np.ndarray, space: Space = EVERYONE) -> Match:
        """Look up as the engine does, full length and whole pages: the tree splits and stamps (4, 6)."""
        array = checks.token_array(tokens, "the prompt matched")
        if not self.enable:
            return Match(0, NO_SLOTS, None, "skipped")
        path = self._tree.match(array[: self._whole(len(array))], namespace(space))
        slots = np.concatenate([n.slots for n in path]) if path else NO_SLOTS
        self._say_tree()
        stopped: Stopped = "end" if len(slots) == len(array) else "unit" if len(slots) == self._whole(len(array)) else "diverged"
        return Match(len(slots), slots, path[-1].id if path else None, stopped)

    # ------------------------------------------------------------------ slots
    def take(self, ids: Sequence[str], budget: int | None = None, headroom: int = 0) -> list[Grant | Refused]:
        """Schedule one batch: of prefills (waiting ids and chunks of running ones) or of decodes.

        Parameters
        ----------
        ids : sequence of str
            waiting ids are looked up and admitted one by one (15), then slots are evicted once for the sum and taken together;
            a decode batch that does not fit after eviction grants nothing.
        budget : int or None
            tokens to compute in all, of prefills charged in whole pages; hits do not count.
        headroom : int
            slots that running requests reserve; ignored for running ids.

        Raises
        ------
        CacheError
            for unknown ids and batches of prefills and decodes together.
        """
        requests = [self._known(id) for id in ids]
        left = checks.batch(ids, budget, headroom)
        decodes = [r.running and not self.prefills(r.id) for r in requests]
        if any(decodes) and not all(decodes):
            msg = "a batch prefills or decodes, not both: take the running requests and the waiting ones apart."
            raise CacheError(msg)
        answers = self._decode(requests, left) if any(decodes) else self._prefill(requests, left, headroom)
        self._say_tree()
        return answers

    def _prefill(self, requests: list[_Request], left: int, headroom: int) -> list[Grant | Refused]:
        reserved = 0  # by those of this batch
        counts: list[int] = []  # tokens to compute, of those admitted
        refused: list[Refused] = []
        for request in requests:
            if refused or left <= 0:
                refused.append(self._refuse(request, "not_reached", None, 0))
                continue
            if request.running:  # the headroom is for admissions
                answer = self._continue(request, left, reserved)
            else:
                answer = self._admit(request, left, headroom + reserved)
            if isinstance(answer, Refused):
                refused.append(answer)
                continue
            whole = self._up(answer)
            cut = request.goal > len(request.slots) + answer
            left -= whole
            reserved += whole + self.unit + (0 if cut else self._answer_reserve(request))
            counts.append(answer)
        granted = requests[: len(counts)]
        grants = self._extend(granted, counts)
        return [*grants, *refused]

    def _admit(self, request: _Request, budget: int, reserved: int) -> int | Refused:
        """Look up and test one waiting request; lock its path and return how many tokens to compute, or refuse it."""
        total = len(request.tokens)
        path: list[RadixNode] = []
        if self.enable and request.read:
            tokens = np.array(request.tokens[: self._whole(total - 1)], dtype=np.int32)
            path = self._tree.match(tokens, namespace(request.space))
        hit = sum(len(n.tokens) for n in path)
        extend = total - hit
        asked = extend + self._answer_reserve(request) + self.unit
        own = sum(len(n.tokens) for n in path if not n.lock)  # its own path does not count as evictable
        short = asked + 1 - (self._available() - own - reserved)
        if short > 0:
            fits = self.num_tokens is None or total + self._answer_reserve(request) + self.unit < self.num_tokens
            return self._refuse(request, "no_space" if fits else "never_fits", hit, short)
        if self._up(extend) > budget:
            extend = self._whole(budget)
            if not extend:
                return self._refuse(request, "no_space", hit, 0)
        request.running, request.goal, request.hit, request.written = True, total, hit, hit
        request.slots = np.concatenate([n.slots for n in path]) if path else NO_SLOTS
        counted = self.enable and request.read and not request.resumed  # (19)
        if counted:
            self._queried += total
            self._found += hit
        self._say_tree()
        self._say(ev.Admitted(request.id, hit, request.slots, counted))
        self._own(request, path[-1] if path else self._tree.root, hit)
        return extend

    def _continue(self, request: _Request, budget: int, reserved: int) -> int | Refused:
        """Return how many tokens a chunk goes on by: it is not tested for admission but shrinks to the memory left."""
        rest = request.goal - len(request.slots)
        most = min(budget, max(0, self._available() - reserved))
        if rest <= most:
            return rest
        if not self._whole(most):
            return self._refuse(request, "no_space", 0, self.unit - most)
        return self._whole(most)

    def _extend(self, requests: list[_Request], counts: list[int]) -> list[Grant]:
        """Evict once for the whole batch, then give each its slots (2)."""
        asked = sum(counts) + (len(counts) * self.unit if self.unit > 1 else 0)
        self._make_room(asked)
        grants = []
        for request, count in zip(requests, counts, strict=True):
            start = len(request.slots)
            hit = request.hit if start == request.hit else 0  # a later chunk starts further on
            slots = self._allot(request, count)
            grants.append(Grant(request.id, hit, start, slots, request.goal - len(request.slots)))
        return grants

    def _decode(self, requests: list[_Request], left: int) -> list[Grant | Refused]:
        """Give each pending token its slot, all or none of those that the budget reaches."""
        counts: list[int] = []
        for request in requests:
            if left <= 0:
                break
            counts.append(min(len(request.tokens) - len(request.slots), left))
            left -= counts[-1]
        reached = requests[: len(counts)]
        # a step asks for a whole page each when evicting, even where the last page has room (2)
        self._make_room(sum(self._up(count) for count in counts))
        needed = sum(self._up(len(r.slots) + n) - self._up(len(r.slots)) for r, n in zip(reached, counts, strict=True))
        short = needed - self._free_tokens()
        out: list[Grant | Refused] = []
        for request, count in zip(reached, counts, strict=True):
            start = len(request.slots)
            if short > 0:
                fits = self.num_tokens is None or self._up(len(request.tokens)) <= self.num_tokens
                out.append(self._refuse(request, "no_space" if fits else "never_fits", 0, short))
            else:
                slots = self._allot(request, count)
                out.append(Grant(request.id, 0, start, slots, len(request.tokens) - len(request.slots)))
        return out + [self._refuse(request, "not_reached", None, 0) for request in requests[len(counts) :]]

    def _allot(self, request: _Request, count: int) -> np.ndarray:
        """Take slots for `count` more tokens: first what is left of the last page, then pages from the front of the queue."""
        start, size = len(request.slots), self.unit
        room = min(count, -start % size)
        slots = request.slots[-1] + 1 + np.arange(room, dtype=np.int64) if room else NO_SLOTS
        pages = self._pool.pop(self._pages(count - room))
        if len(pages):
            fresh = pages if size == 1 else (pages[:, None] * size + np.arange(size)).ravel()[: count - room]
            slots = np.concatenate([slots, fresh])
        request.slots = np.concatenate([request.slots, slots])
        if count:
            self._say(ev.Taken(request.id, start, slots, pages))
        return slots

    def _make_room(self, tokens: int) -> None:
        if tokens > self._free_tokens():
            self.evict(tokens - self._free_tokens())

    def evict(self, tokens: int) -> int:
        """Let whole unlocked leaves fall until at least `tokens` tokens are free again; return how many were (16)."""
        freed = 0
        checks.size(tokens, "tokens", 0)
        for node, hashes in self._tree.evict(tokens):
            freed += len(node.slots)
            self._say(ev.Evicted(node.id, node.slots, hashes))
            self._give_back(node.slots)
        self._say_tree()
        return freed

    # ------------------------------------------------------------------ what was computed joins the tree
    def commit(self, ids: Sequence[str]) -> list[Moved]:
        """K/V of all granted slots are written; prefilled ids join the tree, in the order given (8, 10)."""
        requests = [self._running(id, "commit") for id in ids]
        moved = []
        for request in requests:
            prefilled = request.written < min(request.goal, len(request.slots))
            if request.written < len(request.slots):
                request.written = len(request.slots)
                self._say(ev.Written(request.id, request.written))
            if prefilled and self.enable:
                moved += self._checkpoint(request)
        self._say_tree()
        return moved

    def _checkpoint(self, request: _Request) -> list[Moved]:
        """Insert all whole pages, give up own duplicates, read them from the tree from now on (10)."""
        whole = self._whole(request.written)
        node, found = self._insert(request, whole)
        start = request.protected
        own = request.slots[start:found]
        self._give_back(own)
        moved = []
        if len(own):
            there = self._tree.slots_of(node)[start:found]
            request.slots = np.concatenate([request.slots[:start], there, request.slots[found:]])
            moved = [Moved(request.id, start, there)]
            self._say(ev.Moved(request.id, start, there))
        self._own(request, node, whole)
        return moved

    def _insert(self, request: _Request, whole: int) -> tuple[RadixNode, int]:
        """Insert the first `whole` tokens; return their last node and how many of them stood in the tree before."""
        tokens = np.array(request.tokens[:whole], dtype=np.int32)
        space = namespace(request.space)
        node, found = self._tree.insert(tokens, request.slots[:whole], space, request.priority, request.inserted)
        request.inserted = max(request.inserted, whole)
        prompt = self._whole(request.prompt)
        if 0 < prompt < whole:  # answers are evicted before prompts (11)
            self._tree.insert(tokens[:prompt], request.slots[:prompt], space, request.priority + 1, request.inserted)
        self._say_tree()
        return node, found

    def _own(self, request: _Request, node: RadixNode | None, protected: int) -> None:
        """Read the first `protected` tokens through `node` from now on: unlock the old path, lock the new one (14)."""
        old, request.node, request.protected = request.node, node, protected
        for at, by in ((old, -1), (node, 1)):
            if at is not None and at is not self._tree.root:
                self._tree.lock(at, by)
                self._say(ev.Locked(at.id, by))
        self._say(ev.Owned(request.id, node.id if node and node is not self._tree.root else None, protected))

    # ------------------------------------------------------------------ slots come back
    def release(self, id: str, why: ReleaseWhy) -> None:
        """End a request, or with ``preempt`` send it back to wait; ``stop`` and ``length`` keep all that it computed (8, 9)."""
        request = self._known(id)
        checks.why(why)
        kept = request.protected
        if request.running and why in ("stop", "length") and self.enable:
            kept = self._whole(request.written)
            _, found = self._insert(request, kept)
            self._give_back(request.slots[request.protected : found])
        self._give_back(request.slots[kept:])
        if request.running:
            self._own(request, None, 0)
        del self._requests[id]
        if why == "preempt":
            again = _Request(id, request.tokens, request.prompt, request.space, request.read, request.priority, request.max_new)
            again.resumed = request.resumed or request.running
            self._requests[id] = again
        self._say_tree()
        self._say(ev.Released(id, why))

    def _give_back(self, slots: np.ndarray) -> None:
        if len(slots):
            self._say(ev.Freed(self._pool.free(slots), self._pool.freed_to_front))

    def reset(self) -> bool:
        """Forget everything cached; False, and nothing changes, while a request runs."""
        if self.runs():
            return False
        self._tree.clear()
        self._pool.renew()
        self._say(ev.Cleared(wire=self.enable))
        return True

    # ------------------------------------------------------------------ what others see
    def row(self, id: str) -> Row:
        """Return one request as it stands."""
        r = self._known(id)
        node = r.node.id if r.node and r.node is not self._tree.root else None
        row = Row(r.id, list(r.tokens), r.prompt, r.space, r.read, r.priority, r.max_new, r.running, r.slots.copy())
        row.hit, row.written, row.protected, row.node = r.hit, r.written, r.protected, node
        return row

    def sizes(self) -> Sizes:
        """Return free, evictable and protected tokens, in O(1)."""
        return Sizes(None if self.num_tokens is None else self._free_tokens(), self._tree.evictable, self._tree.protected)

    def snapshot(self) -> State:
        """Return the whole cache as a State of its own."""
        rows = {id: self.row(id) for id in self._requests}
        state = State("sglang", self.unit, self.num_tokens, self._pool.queue(), self.eviction, rows)
        state.nodes = self._tree.snapshot()
        state.queried, state.found = self._queried, self._found
        return state

    def events(self) -> list[ev.Event]:
        """Return what happened since the last call; the first call starts the listening."""
        log, self._log = self._log or [], []
        self._tree.listen()
        return log

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is where it must be: free, in the tree, or a running request's own."""
        self._tree.check_integrity()
        holders: dict[int, int] = {}
        owned: list[int] = []
        for r in self._requests.values():
            assert r.running or not len(r.slots), f"{r.id} waits but holds slots"
            assert r.protected <= r.written <= len(r.slots) <= len(r.tokens), f"{r.id}: protected, written, granted out of order"
            owned += {int(s) // self.unit for s in r.slots[r.protected :]}
            if r.node is not None and r.node is not self._tree.root:
                there = self._tree.slots_of(r.node)
                assert np.array_equal(there[: r.protected], r.slots[: r.protected]), f"{r.id}: its row and the tree disagree"
                for n in self._tree.path(r.node):
                    holders[n.id] = holders.get(n.id, 0) + 1
        nodes = self._tree.snapshot()
        assert {i: n.lock for i, n in nodes.items() if n.lock and i} == holders, "locks differ from the requests that hold them"
        free = list(self._pool.queue().used())
        tree = [s // self.unit for n in nodes.values() for s in n.slots[:: self.unit]]
        pages = free + tree + owned
        assert len(pages) == len(set(pages)), "a page has two places"
        if self.num_tokens is not None:
            assert len(self._pool) + len(tree) + len(owned) == self.num_tokens // self.unit, "pages were lost or made"

    # ------------------------------------------------------------------ small things
    def waits(self, id: str) -> bool:
        """Tell whether `id` waits for slots."""
        return id in self._requests and not self._requests[id].running

    def prefills(self, id: str) -> bool:
        """Tell whether a running request has a part of its prompt left to prefill."""
        request = self._known(id)
        return len(request.slots) < request.goal

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

    def _refuse(self, request: _Request, why: RefusedWhy, hit: int | None, short: int) -> Refused:
        self._say_tree()
        self._say(ev.Refused(request.id, why, hit, short))
        return Refused(request.id, why, hit, short)

    def _answer_reserve(self, request: _Request) -> int:
        done = len(request.tokens) - request.prompt
        return min(max(request.max_new - done, 0), MAX_NEW_RESERVED)

    def _free_tokens(self) -> int:
        return len(self._pool) * self.unit

    def _available(self) -> int:
        return self._free_tokens() + self._tree.evictable

    def _whole(self, tokens: int) -> int:
        return tokens // self.unit * self.unit

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.unit)

    def _up(self, tokens: int) -> int:
        return self._pages(tokens) * self.unit

    def _say(self, event: ev.Event) -> None:
        if self._log is not None:
            self._log.append(event)

    def _say_tree(self) -> None:
        if self._log is not None:
            self._log += self._tree.take_events()
