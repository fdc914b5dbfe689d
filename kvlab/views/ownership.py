"""Who owns a slot: for every unit of the pool its state, the source of most of its tokens, its place in the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvlab.cache.state import ROOT
from kvlab.prompts import SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvlab.cache.state import Row, State
    from kvlab.trace.recorder import Record

NULL, FREE, IDLE, USED = range(4)
STATES = ("null", "free", "idle", "used")
_GENERATED = SOURCES.index("generated")
_QUESTION = SOURCES.index("question")


def sources(record: Record) -> np.ndarray:
    """Return the source of every token of `record` as indices into `SOURCES`, int8."""
    out = np.full(len(record.tokens), _QUESTION, np.int8)
    for part in record.parts:
        out[part.start : part.stop] = SOURCES.index(part.source)
    out[record.prompt_tokens :] = _GENERATED
    return out


@dataclass(frozen=True)
class Units:
    """The pool, unit by unit; index 0 is the null block or dummy page.

    Attributes
    ----------
    state : int8 array
        `NULL`, `FREE`, `IDLE` or `USED`.
    source : int8 array
        index into `SOURCES` of most of its tokens, -1 where nobody remembers them.
    computed : bool array
        in use, and its K/V were computed by a running request rather than found.
    position : int32 array
        place of its first token in the prompt, -1 where unknown.
    held : int32 array
        running requests that hold it.
    """

    state: np.ndarray
    source: np.ndarray
    computed: np.ndarray
    position: np.ndarray
    held: np.ndarray

    def count(self, state: int) -> int:
        """Return how many units are in `state`."""
        return int(np.count_nonzero(self.state == state))


def units(state: State, records: Sequence[Record]) -> Units:
    """Return the state of every unit of the pool; of an unlimited one, up to the last that was ever used."""
    size, known = state.unit, {record.id: sources(record) for record in records}
    total = _last(state) if state.num_units is None else state.num_units
    slots = (total + 1) * size
    source, position = np.full(slots, -1, np.int8), np.full(slots, -1, np.int32)
    kind = np.full(total + 1, FREE, np.int8)
    kind[0] = NULL
    held = np.zeros(total + 1, np.int32)
    found, made = np.zeros(total + 1, bool), np.zeros(total + 1, bool)

    if state.blocks:
        remember = _Memory(records, known, size)
        for block, keyed in state.blocks.items():
            at = slice(block * size, (block + 1) * size)
            position[at] = np.arange(keyed.index * size, (keyed.index + 1) * size)
            source[at] = remember.block(keyed.index, keyed.tokens)
            kind[block] = IDLE
    for node, start in depths(state):
        if node == ROOT:
            continue
        own = np.asarray(state.nodes[node].slots, np.int64)
        position[own] = np.arange(start, start + len(own))
        source[own] = node_sources(state, node, start, records, known)
        kind[np.unique(own // size)] = USED if state.nodes[node].lock else IDLE
    for row in state.rows.values():
        if not len(row.slots):
            continue
        own = row.slots
        position[own] = np.arange(len(own))
        source[own] = _row_sources(row, known)[: len(own)]
        holds = np.unique(own // size)
        kind[holds] = USED
        held[holds] += 1
        found[np.unique(own[: row.hit] // size)] = True
        made[np.unique(own[row.hit :] // size)] = True
    first = np.full(total + 1, -1, np.int32)
    filled = np.flatnonzero(position >= 0)  # a pool may have millions of slots, few of them in use
    if len(filled):
        begins = np.flatnonzero(np.diff(filled // size, prepend=-1))
        first[filled[begins] // size] = np.minimum.reduceat(position[filled], begins)
    return Units(kind, _majority(source, size), made & ~found, first, held)


def holders(state: State, unit: int) -> dict[str, tuple[int, int]]:
    """Return which running requests hold `unit`, each with the token positions ``(start, stop)`` that stand in it."""
    out = {}
    for row in state.rows.values():
        at = np.flatnonzero(row.slots // state.unit == unit)
        if len(at):
            out[row.id] = (int(at[0]), int(at[-1]) + 1)
    return out


def idle_order(state: State) -> list[int]:
    """Return the cached idle blocks in the order in which they will be taken: the free queue's (docs/vllm.md 16)."""
    idle = state.blocks.keys() - state.refs.keys()
    out: list[int] = []
    for first, last in state.queue.runs():  # a run may be a million fresh blocks, none of them keyed
        short = last - first < len(idle)
        out += [b for b in range(first, last + 1) if b in idle] if short else sorted(b for b in idle if first <= b <= last)
    return out


def depths(state: State) -> Iterator[tuple[int, int]]:
    """Yield the radix nodes from the root down, children in insertion order, each with the token position where it starts."""
    stack = [(ROOT, 0)] if state.nodes else []
    while stack:
        node, start = stack.pop()
        yield node, start
        end = start + len(state.nodes[node].tokens)
        stack.extend((child, end) for child in reversed(state.nodes[node].children))


def node_sources(
    state: State, node: int, start: int, records: Sequence[Record], known: dict[str, np.ndarray] | None = None
) -> np.ndarray:
    """Return the sources of a node's tokens: those of the latest request that holds the same tokens at the same place."""
    tokens = state.nodes[node].tokens
    stop = start + len(tokens)
    for record in reversed(records):
        if record.tokens[start:stop] == tokens:
            return (known[record.id] if known else sources(record))[start:stop]
    return np.full(len(tokens), -1, np.int8)


class _Memory:
    """Finds the source of a block whose request has ended, by its tokens and place in the prompt."""

    def __init__(self, records: Sequence[Record], known: dict[str, np.ndarray], size: int) -> None:
        self.records, self.known, self.size = records, known, size
        self.found: dict[tuple[int, tuple[int, ...]], np.ndarray] | None = None

    def block(self, index: int, tokens: tuple[int, ...]) -> np.ndarray | int:
        if self.found is None:
            self.found = {}
            for record in self.records:  # the latest wins
                for i in range(len(record.tokens) // self.size):
                    at = slice(i * self.size, (i + 1) * self.size)
                    self.found[i, tuple(record.tokens[at])] = self.known[record.id][at]
        return self.found.get((index, tokens), -1)


def _row_sources(row: Row, known: dict[str, np.ndarray]) -> np.ndarray:
    out = known.get(row.id, np.empty(0, np.int8))[: len(row.tokens)]
    missing = np.full(len(row.tokens) - len(out), -1, np.int8)
    if len(out) == 0:  # a request without a record: only its answer is known to be one
        missing[row.prompt :] = _GENERATED
    elif len(missing):
        missing[:] = _GENERATED
    return np.concatenate([out, missing])


def _last(state: State) -> int:
    used = [0, *state.refs, *state.blocks]
    used += [max(node.slots) // state.unit for node in state.nodes.values() if node.slots]
    used += [int(row.slots.max()) // state.unit for row in state.rows.values() if len(row.slots)]
    return max(used)


def _majority(source: np.ndarray, size: int) -> np.ndarray:
    """Return the most frequent source of each unit's slots, the earlier in `SOURCES` of equals; -1 where none is known."""
    if size == 1:
        return source
    kinds, out = len(SOURCES), np.full(len(source) // size, -1, np.int8)
    known = np.flatnonzero(source >= 0)
    units, place = np.unique(known // size, return_inverse=True)
    votes = np.bincount(place * kinds + source[known], minlength=len(units) * kinds).reshape(-1, kinds)
    out[units] = votes.argmax(axis=1)
    return out
