"""The radix tree itself: nodes, splits, stamps, locks, falling leaves. It knows no request and owns no slot."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvlab.cache import events as ev
from kvlab.cache.contract import Space
from kvlab.cache.eviction import eviction_key
from kvlab.cache.hashing import first_parent, page_digests, page_hash
from kvlab.cache.state import ROOT, Node

if TYPE_CHECKING:
    from collections.abc import Iterator

Namespace = tuple[str | None, str | None]  # (extra key, salt)


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of whole pages below its parent. `tokens` int32, `slots` int64, of equal length."""

    id: int
    parent: RadixNode | None
    tokens: np.ndarray
    slots: np.ndarray
    space: Namespace
    lock: int = 0
    hits: int = 0
    priority: int = 0
    accessed: int = 0
    created: int = 0
    children: dict[tuple[Namespace, bytes], RadixNode] = field(default_factory=dict)
    digests: list[bytes] | None = None  # one a page, made when asked for


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many leading tokens two arrays share."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count


class RadixTree:
    """Token sequences in whole pages, children keyed by namespace and first page (3)."""

    def __init__(self, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self._key = eviction_key(policy)
        self._clock = 0
        self._last_id = ROOT
        self._log: list[ev.Event] | None = None
        self._changed: dict[int, RadixNode] = {}
        self.clear()

    def clear(self) -> None:
        """Become empty; ids and the clock go on."""
        nothing = np.empty(0, dtype=np.int32)
        self.root = RadixNode(ROOT, None, nothing, nothing.astype(np.int64), (None, None), lock=1)
        self._leaves: dict[int, RadixNode] = {}  # unlocked leaves: what may fall
        self.evictable = self.protected = 0
        self._changed.clear()

    # ------------------------------------------------------------------ look-up
    def find(self, tokens: np.ndarray, space: Namespace) -> tuple[list[RadixNode], int]:
        """Return the nodes that `tokens` run through and how many of them they match, changing nothing."""
        path, at, node = [], 0, self.root
        while at < len(tokens):
            child = node.children.get(self._child_key(tokens[at:], space))
            if child is None:
                break
            common = _common(child.tokens, tokens[at:])
            path.append(child)
            at += common
            if common < len(child.tokens):
                break
            node = child
        return path, at

    def match(self, tokens: np.ndarray, space: Namespace) -> list[RadixNode]:
        """Return the path of the longest match in whole pages: may split a node (4); the path is stamped, its end newest (6)."""
        path, at = self.find(tokens, space)
        path = self._cut(path, at)
        for node in path:
            self._stamp(node)
        return path

    def _cut(self, path: list[RadixNode], matched: int) -> list[RadixNode]:
        """Split the last node of a path where the match ends inside it, rounded down to a page."""
        if not path:
            return path
        inside = matched - sum(len(n.tokens) for n in path[:-1])
        inside = inside // self.page_size * self.page_size
        if inside == len(path[-1].tokens):
            return path
        self._stamp(path[-1])  # the unmatched suffix is refreshed too
        return [*path[:-1], self._split(path[-1], inside)]

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Cut `node`: a new parent takes its first `at` tokens and all its counters; the child keeps its id (7)."""
        self._last_id += 1
        new = RadixNode(self._last_id, node.parent, node.tokens[:at], node.slots[:at], node.space, node.lock, node.hits)
        new.priority, new.accessed, new.created = node.priority, node.accessed, node.created
        new.children = {self._child_key(node.tokens[at:], node.space): node}
        siblings = node.parent.children  # type: ignore[union-attr]
        siblings[self._child_key(new.tokens, node.space)] = new  # the same key: it keeps its place
        if node.digests is not None:
            pages = at // self.page_size
            new.digests, node.digests = node.digests[:pages], node.digests[pages:]
        node.parent, node.tokens, node.slots = new, node.tokens[at:], node.slots[at:]
        if self._log is not None:
            self._log.append(ev.Split(node.id, new.id, at))
        return new

    # ------------------------------------------------------------------ insert
    def insert(
        self, tokens: np.ndarray, slots: np.ndarray, space: Namespace, priority: int, counted: int
    ) -> tuple[RadixNode, int]:
        """Insert whole pages.

        Parameters
        ----------
        tokens, slots : int32 and int64 arrays of equal length, whole pages
        space : Namespace
        priority : int
            every node on the way gets at least this priority.
        counted : int
            tokens that the same request inserted before: only nodes that end beyond get a hit (12).

        Returns
        -------
        node, found : the last node, and how many tokens stood in the tree before.
        """
        path, found = self.find(tokens, space)
        found = found // self.page_size * self.page_size
        path = self._cut(path, found)
        end = 0
        for node in path:
            end += len(node.tokens)
            self._visit(node, priority, int(end > counted))
        node = path[-1] if path else self.root
        if found < len(tokens):
            node = self._grow(node, tokens[found:], slots[found:], space)
            self._visit(node, priority, int(len(tokens) > counted))
            node.created = node.accessed
        return node, found

    def _grow(self, parent: RadixNode, tokens: np.ndarray, slots: np.ndarray, space: Namespace) -> RadixNode:
        self._last_id += 1
        node = RadixNode(self._last_id, parent, tokens, slots.copy(), space)
        parent.children[self._child_key(tokens, space)] = node
        self._leaves.pop(parent.id, None)
        self._leaves[node.id] = node
        self.evictable += len(tokens)
        if self._log is not None:
            hashes = tuple(page_hash(d) for d in self._digests(node))
            before = page_hash(self._digests(parent)[-1]) if parent is not self.root else None
            self._log.append(ev.Inserted(node.id, parent.id, tokens, node.slots, _as_space(space), hashes, before))
        return node

    def _visit(self, node: RadixNode, priority: int, hits: int) -> None:
        node.priority = max(node.priority, priority)
        node.hits += hits
        self._stamp(node)

    def _stamp(self, node: RadixNode) -> None:
        self._clock += 1
        node.accessed = self._clock
        if self._log is not None:
            self._changed[node.id] = node

    # ------------------------------------------------------------------ locks and eviction
    def lock(self, node: RadixNode, by: int) -> None:
        """Add `by` holders to `node` and its ancestors; 0 -> 1 protects their tokens, 1 -> 0 makes them evictable (14)."""
        for at in self.path(node):
            at.lock += by
            assert at.lock >= 0, "a node was unlocked more often than locked"
            if at.lock == max(by, 0):
                size = by * len(at.tokens)
                self.protected += size
                self.evictable -= size
                if by > 0:
                    self._leaves.pop(at.id, None)
                elif not at.children:
                    self._leaves[at.id] = at

    def evict(self, tokens: int) -> Iterator[tuple[RadixNode, tuple[int, ...]]]:
        """Let unlocked leaves fall, smallest key first, until `tokens` tokens have; yield each with its page hashes (16)."""
        if tokens <= 0:
            return
        heap = [(self._key(leaf), leaf.id, leaf) for leaf in self._leaves.values()]
        heapq.heapify(heap)
        while heap and tokens > 0:
            leaf = heapq.heappop(heap)[2]
            hashes = tuple(page_hash(d) for d in self._digests(leaf)) if self._log is not None else ()
            parent = leaf.parent
            assert parent is not None, "the root never falls"
            del parent.children[self._child_key(leaf.tokens, leaf.space)]
            del self._leaves[leaf.id]
            self._changed.pop(leaf.id, None)
            tokens -= len(leaf.tokens)
            self.evictable -= len(leaf.tokens)
            if parent is not self.root and not parent.lock and not parent.children:
                self._leaves[parent.id] = parent
                heapq.heappush(heap, (self._key(parent), parent.id, parent))
            yield leaf, hashes

    # ------------------------------------------------------------------ what others see
    def path(self, node: RadixNode) -> list[RadixNode]:
        """Return the nodes from below the root to `node`."""
        out = []
        at: RadixNode | None = node
        while at is not None and at is not self.root:
            out.append(at)
            at = at.parent
        return out[::-1]

    def slots_of(self, node: RadixNode) -> np.ndarray:
        """Return the slots of all tokens up to the end of `node`."""
        return np.concatenate([self.root.slots, *(n.slots for n in self.path(node))])

    def _digests(self, node: RadixNode) -> list[bytes]:
        for at in self.path(node):
            if at.digests is None:
                above = at.parent
                first = above is None or above is self.root
                parent = first_parent(at.space[1]) if first else above.digests[-1]  # type: ignore[union-attr,index]
                at.digests = page_digests(at.tokens, self.page_size, parent)
        return node.digests or []

    def listen(self) -> None:
        """Build events from now on."""
        if self._log is None:
            self._log = []

    def take_events(self) -> list[ev.Event]:
        """Return what happened since the last call, stamps last."""
        if self._log is None:
            return []
        log, self._log = self._log, []
        if self._changed:
            nodes = list(self._changed.values())
            columns = [[getattr(n, name) for n in nodes] for name in ("id", "accessed", "hits", "priority", "created")]
            log.append(ev.Stamped(*(np.array(c, dtype=np.int64) for c in columns)))
            self._changed.clear()
        return log

    def snapshot(self) -> dict[int, Node]:
        """Return the nodes as State keeps them."""
        out: dict[int, Node] = {}
        stack = [self.root]
        while stack:
            n = stack.pop()
            parent = n.parent.id if n.parent is not None else None
            node = Node(n.id, parent, n.tokens.tolist(), n.slots.tolist(), _as_space(n.space), n.lock, n.hits, n.priority)
            node.accessed, node.created, node.children = n.accessed, n.created, [c.id for c in n.children.values()]
            out[n.id] = node
            stack.extend(n.children.values())
        return out

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree is one: keys, pages, counts, locks, leaves."""
        evictable = protected = 0
        leaves = set()
        stack = [self.root]
        while stack:
            n = stack.pop()
            for key, child in n.children.items():
                assert child.parent is n, f"node {child.id} has another parent"
                assert key == self._child_key(child.tokens, child.space), f"node {child.id} stands under a wrong key"
                assert n is self.root or child.space == n.space, f"node {child.id} left its namespace"
                assert n is self.root or n.lock >= child.lock, f"node {n.id} is locked less than its child"
                stack.append(child)
            if n is self.root:
                continue
            assert len(n.tokens) == len(n.slots) > 0, f"node {n.id}: {len(n.tokens)} tokens, {len(n.slots)} slots"
            assert len(n.tokens) % self.page_size == 0, f"node {n.id} holds a partial page"
            evictable += 0 if n.lock else len(n.tokens)
            protected += len(n.tokens) if n.lock else 0
            if not n.children and not n.lock:
                leaves.add(n.id)
        assert (evictable, protected) == (self.evictable, self.protected), "sizes are miscounted"
        assert leaves == set(self._leaves), "the unlocked leaves are not those kept"

    def _child_key(self, tokens: np.ndarray, space: Namespace) -> tuple[Namespace, bytes]:
        return space, tokens[: self.page_size].tobytes()


def _as_space(space: Namespace) -> Space:
    return Space(salt=space[1], extra_key=space[0])
