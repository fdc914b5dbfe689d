"""SGLang's orders of the waiting queue (0.5.23; docs/sglang.md 22, 23): pure functions from requests to indices.

`arrange` is the whole of it: which order is in force, the look-ups that it needs, and the queue as it leaves them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from kvlab.cache.contract import EVERYONE, CacheError, Space
from kvlab.cache.radix_cache import RadixCache, namespace
from kvlab.cache.radix_tree import RadixTree
from kvlab.cache.state import ROOT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from random import Random

    from kvlab.cache.state import Node

Name = Literal["fcfs", "lpm", "dfs-weight", "lof", "shortest-prefill-first", "hrrn", "random", "routing-key"]
NAMES: tuple[str, ...] = get_args(Name)
LOOKS_UP = ("lpm", "dfs-weight", "shortest-prefill-first", "hrrn")  # without a cache these are fcfs
MANY = 128  # waiting requests above which lpm and hrrn give up looking
HARDLY = 32  # tokens: a match of no more leaves a request to the in-batch rule, a shared prefix of at least as many applies it


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits, in the order in which requests came.

    Attributes
    ----------
    tokens : int array
        its prompt, and outputs after a retraction.
    max_new : int
        tokens that it may generate.
    arrival : float
        when it came; only compared.
    processed : int
        tokens that the engine had processed when it came.
    routing_key : str
        empty: none.
    """

    tokens: Sequence[int] | np.ndarray
    space: Space = EVERYONE
    max_new: int = 0
    arrival: float = 0.0
    processed: int = 0
    routing_key: str = ""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the cache holds of each waiting request, by its index.

    Attributes
    ----------
    matched : list of int
        cached tokens, found in whole pages of the full prompt; never the last token, which may cut a page.
    uncached : list of int
        tokens left to compute.
    nodes : list of int
        the last node that each matched; the root where none.
    late : frozenset of int
        indices that the in-batch rule sends to the back.
    """

    matched: list[int]
    uncached: list[int]
    nodes: list[int]
    late: frozenset[int]


@dataclass(frozen=True, slots=True)
class Order:
    """The queue in order: `indices` into it, which order was in force, and what the look-ups found (0 where there were none)."""

    active: str
    indices: list[int]
    matched: list[int]
    late: frozenset[int] = field(default_factory=frozenset)


def arrange(
    name: str,
    queue: Sequence[Waiting],
    cache: RadixCache,
    *,
    processed: int = 0,
    running_keys: Iterable[str] = (),
    rng: Random | None = None,
) -> Order:
    """Put a queue in order as SGLang does before it admits.

    The look-ups split and stamp the tree, as in SGLang.

    Parameters
    ----------
    name : str
        one of `NAMES`.
    queue : sequence of Waiting
    cache : RadixCache
    processed : int
        tokens that the engine has processed so far, for hrrn.
    running_keys : iterable of str
        routing keys of the running requests.
    rng : random.Random, optional
        for random.

    Raises
    ------
    CacheError
        for an unknown name, or random without an `rng`.
    """
    if name not in NAMES:
        msg = f"there is no queue order {name!r}: choose one of {', '.join(NAMES)}."
        raise CacheError(msg)
    active = in_force(name, len(queue), reuses=cache.enable)
    nothing = [0] * len(queue)
    if active in LOOKS_UP:
        found = look_up(queue, cache)
        if active == "lpm":
            indices = lpm(found)
        elif active == "hrrn":
            indices = hrrn(queue, found, processed)
        elif active == "shortest-prefill-first":
            indices = shortest_prefill_first(queue, found)
        else:
            indices = dfs_weight(found.nodes, cache.snapshot().nodes)
        return Order(active, indices, found.matched, found.late)
    if active == "lof":
        return Order(active, lof(queue), nothing)
    if active == "routing-key":
        return Order(active, routing_key(queue, running_keys), nothing)
    indices = list(range(len(queue)))
    if active == "random":
        if rng is None:
            msg = "the order random needs a source of chance: give rng=random.Random(seed)."
            raise CacheError(msg)
        rng.shuffle(indices)
    return Order(active, indices, nothing)


def in_force(name: str, waiting: int, *, reuses: bool = True) -> str:
    """Return the order that really applies: looking up is given up for a long queue, and is no use without a cache."""
    if (name in LOOKS_UP and not reuses) or (name in {"lpm", "hrrn"} and waiting > MANY):
        return "fcfs"
    return name


def look_up(queue: Sequence[Waiting], cache: RadixCache) -> Lookup:
    """Look every waiting request up, in queue order, and apply the in-batch rule (23)."""
    ahead = RadixTree(1, "lru")  # prompts that are hardly cached, to find who shares with one before it
    matched, nodes, late = [], [], set()
    for index, request in enumerate(queue):
        tokens = np.asarray(request.tokens, dtype=np.int32)
        match = cache.match(tokens, request.space)
        matched.append(min(match.tokens, len(tokens) - 1))  # not cut to a page again: so the recordings have it
        nodes.append(ROOT if match.node is None else match.node)
        if match.tokens > HARDLY:
            continue
        space = namespace(request.space)
        if ahead.find(tokens, space)[1] >= HARDLY:
            late.add(index)
        else:
            ahead.insert(tokens, tokens.astype(np.int64), space, 0, 0)
    uncached = [len(request.tokens) - hit for request, hit in zip(queue, matched, strict=True)]
    return Lookup(matched, uncached, nodes, frozenset(late))


def lpm(found: Lookup) -> list[int]:
    """Longest cached prefix first; equals in queue order, those of the in-batch rule last."""
    return _sorted(found.matched, lambda i: math.inf if i in found.late else -found.matched[i])


def shortest_prefill_first(queue: Sequence[Waiting], found: Lookup) -> list[int]:
    """Fewest uncached tokens first, the earlier of equals; those of the in-batch rule last."""
    return _sorted(queue, lambda i: (i in found.late, found.uncached[i], queue[i].arrival))


def hrrn(queue: Sequence[Waiting], found: Lookup, processed: int) -> list[int]:
    """Highest response ratio next: tokens processed since it came, for each token that it would cost."""

    def key(i: int) -> float:
        if i in found.late:
            return math.inf
        return -(processed - queue[i].processed) / found.uncached[i] if found.uncached[i] else -math.inf

    return _sorted(queue, key)


def lof(queue: Sequence[Waiting]) -> list[int]:
    """Longest output first."""
    return _sorted(queue, lambda i: -queue[i].max_new)


def routing_key(queue: Sequence[Waiting], running_keys: Iterable[str]) -> list[int]:
    """Those whose key is most frequent among the running requests first, equals by key; without running keys as they came."""
    counts = Counter(key for key in running_keys if key)
    if not counts:
        return list(range(len(queue)))

    def key(i: int) -> tuple[int, int, str]:
        mine = queue[i].routing_key
        return (0, -counts[mine], mine) if counts[mine] else (1, 0, mine)

    return _sorted(queue, key)


def dfs_weight(last: Sequence[int], nodes: Mapping[int, Node]) -> list[int]:
    """Walk the tree depth first, heavy subtrees first; a node's own requests come after its children's.

    Parameters
    ----------
    last : sequence of int
        the node that each waiting request ends at.
    nodes : mapping of id to Node
        the tree, the children of each in the order in which they came.
    """
    here: dict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(last):
        here[node].append(index)
    weight: Counter[int] = Counter()
    for node, requests in here.items():
        at: int | None = node
        while at is not None:
            weight[at] += len(requests)
            at = nodes[at].parent
    out: list[int] = []
    stack: list[tuple[int, bool]] = [(ROOT, False)]
    while stack:
        node, entered = stack.pop()
        if entered:
            out += here.get(node, [])
            continue
        stack.append((node, True))
        children = sorted(nodes[node].children, key=lambda child: -weight[child])
        stack += [(child, False) for child in reversed(children) if weight[child]]
    return out


def _sorted(queue: Collection[object], key: object) -> list[int]:
    return sorted(range(len(queue)), key=key)  # type: ignore[call-overload, no-any-return]
