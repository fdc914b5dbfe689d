"""ONE State: what ``cache.snapshot()`` gives and what folding events gives. Every picture is drawn from it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvlab.cache import events as ev
from kvlab.cache.contract import EVERYONE, NO_SLOTS, Space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvlab.cache.free_list import FreeList

ROOT = 0


@dataclass(slots=True)
class Row:
    """One request as the cache sees it.

    Attributes
    ----------
    tokens : list of int
        all known tokens: the prompt and what was sampled since.
    prompt : int
        how many of them came with the request.
    slots : int64 array
        slot of token i, for i < len(slots); empty while it waits.
    hit : int
        tokens that its (latest) admission found cached.
    written : int
        tokens whose K/V are in their slots.
    protected : int
        tokens that it reads from the radix tree, through `node` (0 and None for blocks).
    """

    id: str
    tokens: list[int]
    prompt: int
    space: Space = EVERYONE
    read: bool = True
    priority: int = 0
    max_new: int = 0
    running: bool = False
    slots: np.ndarray = field(default_factory=lambda: NO_SLOTS)
    hit: int = 0
    written: int = 0
    protected: int = 0
    node: int | None = None

    def __eq__(self, other: object) -> bool:
        """Equal when every field is; arrays by value."""
        if not isinstance(other, Row):
            return NotImplemented
        names = [n for n in self.__slots__ if n != "slots"]
        return all(getattr(self, n) == getattr(other, n) for n in names) and np.array_equal(self.slots, other.slots)

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class Block:
    """A keyed hash block: the low 64 bits of its digest and of its parent's, its tokens, its place in the prompt."""

    hash: int
    parent: int | None
    tokens: tuple[int, ...]
    index: int


@dataclass(slots=True)
class Node:
    """A node of the radix tree. `children` in insertion order."""

    id: int
    parent: int | None
    tokens: list[int]
    slots: list[int]
    space: Space = EVERYONE
    lock: int = 0
    hits: int = 0
    priority: int = 0
    accessed: int = 0
    created: int = 0
    children: list[int] = field(default_factory=list)


@dataclass
class State:
    """The whole cache at one moment.

    Attributes
    ----------
    policy : "vllm", "sglang" or "none"
    unit : int
        tokens in a block or page.
    num_tokens : int or None
        capacity; None is unlimited.
    rows : dict of str to Row
        waiting and running requests, oldest first.
    refs : dict of int to int
        block -> number of requests that hold it (blocks in use only; radix: empty).
    blocks : dict of int to Block
        keyed blocks, in use or idle (radix: empty).
    nodes : dict of int to Node
        the radix tree, its root at `ROOT` (blocks: empty).
    queue : FreeList
        free units in the order in which they will be taken; keyed ones among them are *cached idle*.
    queried, found : int
        tokens looked up and found at first admissions: the hit rate.
    """

    policy: Literal["vllm", "sglang", "none"]
    unit: int
    num_tokens: int | None
    queue: FreeList
    eviction: str = "lru"
    rows: dict[str, Row] = field(default_factory=dict)
    refs: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, Block] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    queried: int = 0
    found: int = 0

    @property
    def num_units(self) -> int | None:
        """Usable blocks or pages; ids run from 1 (0 is the null block or dummy page). None is unlimited."""
        return None if self.num_tokens is None else self.num_tokens // self.unit

    def copy(self) -> State:
        """Return a deep copy, for folding further without touching this one."""
        return copy.deepcopy(self)

    def fold(self, events: Iterable[ev.Event]) -> State:
        """Apply events in order, in place."""
        for event in events:
            self.apply(event)
        return self

    def apply(self, event: ev.Event) -> None:
        """Apply one event in place."""
        _APPLY[type(event)](self, event)

    # ------------------------------------------------------------------ requests
    def _queued(self, e: ev.Queued) -> None:
        tokens = [int(t) for t in e.tokens]
        self.rows[e.id] = Row(e.id, tokens, len(tokens), e.space, e.read, e.priority, e.max_new)

    def _admitted(self, e: ev.Admitted) -> None:
        row = self.rows[e.id]
        row.running, row.hit, row.written, row.slots = True, e.hit, e.hit, e.slots
        if e.counted:
            self.queried += len(row.tokens)
            self.found += e.hit

    def _refused(self, _: ev.Refused) -> None:
        """Nothing changes; the event is there to be seen."""

    def _taken(self, e: ev.Taken) -> None:
        for unit in e.units.tolist():
            self.queue.remove(unit)
            if self.policy != "sglang":
                self.refs[unit] = 1
        row = self.rows[e.id]
        row.slots = np.concatenate([row.slots[: e.start], e.slots])

    def _moved(self, e: ev.Moved) -> None:
        row = self.rows[e.id]
        row.slots = row.slots.copy()
        row.slots[e.start : e.start + len(e.slots)] = e.slots

    def _owned(self, e: ev.Owned) -> None:
        row = self.rows[e.id]
        row.node, row.protected = e.node, e.protected

    def _written(self, e: ev.Written) -> None:
        self.rows[e.id].written = e.written

    def _appended(self, e: ev.Appended) -> None:
        self.rows[e.id].tokens.append(e.token)

    def _released(self, e: ev.Released) -> None:
        row = self.rows.pop(e.id)
        if e.why == "preempt":
            self.rows[e.id] = Row(row.id, row.tokens, row.prompt, row.space, row.read, row.priority, row.max_new)

    # ------------------------------------------------------------------ hash blocks
    def _touched(self, e: ev.Touched) -> None:
        for block in e.blocks.tolist():
            if block not in self.refs:
                self.queue.remove(block)
            self.refs[block] = self.refs.get(block, 0) + 1

    def _keyed(self, e: ev.Keyed) -> None:
        parent = e.parent
        for i, (block, key) in enumerate(zip(e.blocks.tolist(), e.hashes, strict=True)):
            tokens = tuple(e.tokens[i * self.unit : (i + 1) * self.unit].tolist())
            self.blocks[block] = Block(key, parent, tokens, e.index + i)
            parent = key

    def _unkeyed(self, e: ev.Unkeyed) -> None:
        for block in e.blocks.tolist():
            del self.blocks[block]

    def _dropped(self, e: ev.Dropped) -> None:
        for block in e.blocks.tolist():
            self.refs[block] -= 1
            if not self.refs[block]:
                del self.refs[block]

    def _freed(self, e: ev.Freed) -> None:
        (self.queue.push_front if e.front else self.queue.push_back)(e.units.tolist())

    # ------------------------------------------------------------------ radix tree
    def _inserted(self, e: ev.Inserted) -> None:
        self.nodes[e.node] = Node(e.node, e.parent, e.tokens.tolist(), e.slots.tolist(), e.space)
        self.nodes[e.parent].children.append(e.node)

    def _split(self, e: ev.Split) -> None:
        node = self.nodes[e.node]
        new = Node(e.new, node.parent, node.tokens[: e.at], node.slots[: e.at], node.space, node.lock, node.hits)
        new.priority, new.accessed, new.created, new.children = node.priority, node.accessed, node.created, [e.node]
        siblings = self.nodes[node.parent].children  # type: ignore[index]
        siblings[siblings.index(e.node)] = e.new
        node.parent, node.tokens, node.slots = e.new, node.tokens[e.at :], node.slots[e.at :]
        self.nodes[e.new] = new

    def _stamped(self, e: ev.Stamped) -> None:
        columns = (e.nodes, e.accessed, e.hits, e.priority, e.created)
        for node, accessed, hits, priority, created in zip(*(c.tolist() for c in columns), strict=True):
            n = self.nodes[node]
            n.accessed, n.hits, n.priority, n.created = accessed, hits, priority, created

    def _locked(self, e: ev.Locked) -> None:
        at = e.node
        while at != ROOT:  # the root's own lock never changes
            self.nodes[at].lock += e.by
            at = self.nodes[at].parent  # type: ignore[assignment]

    def _evicted(self, e: ev.Evicted) -> None:
        node = self.nodes.pop(e.node)
        self.nodes[node.parent].children.remove(e.node)  # type: ignore[index]

    def _cleared(self, _: ev.Cleared) -> None:
        self.blocks.clear()
        if self.policy == "sglang":  # vLLM forgets the keys only; SGLang starts its allocator afresh
            self.queue.renew()
            self.nodes = {ROOT: Node(ROOT, None, [], [], lock=1)}


_APPLY: dict[type, Callable[[State, Any], None]] = {
    ev.Queued: State._queued,
    ev.Admitted: State._admitted,
    ev.Refused: State._refused,
    ev.Taken: State._taken,
    ev.Touched: State._touched,
    ev.Keyed: State._keyed,
    ev.Unkeyed: State._unkeyed,
    ev.Freed: State._freed,
    ev.Dropped: State._dropped,
    ev.Inserted: State._inserted,
    ev.Split: State._split,
    ev.Stamped: State._stamped,
    ev.Locked: State._locked,
    ev.Evicted: State._evicted,
    ev.Moved: State._moved,
    ev.Owned: State._owned,
    ev.Written: State._written,
    ev.Appended: State._appended,
    ev.Released: State._released,
    ev.Cleared: State._cleared,
}
