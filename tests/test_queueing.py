"""Queue orders: SGLang's recorded ones, and what cannot be read off them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvlab.cache.contract import CacheError, Space
from kvlab.cache.radix_cache import RadixCache
from kvlab.schedule.queueing import NAMES, Waiting, arrange

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "golden/schedule.jsonl").read_text(encoding="utf-8").splitlines()]


def holding(prompts, page_size=1, **options):
    """A cache in which `prompts` have run."""
    cache = RadixCache(page_size * 20_000, page_size, **options)
    for number, tokens in enumerate(prompts):
        id = f"c{number}"
        cache.add(id, tokens)
        cache.take([id])
        cache.commit([id])
        cache.release(id, "length")
    return cache


def waiting(query):
    return [Waiting(q["tokens"], max_new=q["max_new"], arrival=q["arrival"], processed=q["arrival"]) for q in query["queue"]]


@pytest.mark.parametrize("number", range(len(GOLDEN)))
def test_the_recorded_orders(number):
    query = GOLDEN[number]
    cache = holding(query["cached"], query["page_size"])
    found = arrange(query["policy"], waiting(query), cache, processed=query["processed_tokens"])
    cache.check_integrity()
    assert {
        "active": found.active,
        "order": found.indices,
        "matched": found.matched,
        "deprioritized": sorted(found.late),
    } == query["expect"]


# ------------------------------------------------------------------ what the recordings do not hold
def prompts(*heads, length=40):
    return [Waiting([head] * length) for head in heads]


def test_random_is_a_shuffle_of_the_given_chance():
    queue = prompts(*range(1, 30))
    want = list(range(29))
    Random(5).shuffle(want)
    assert arrange("random", queue, holding([]), rng=Random(5)).indices == want
    with pytest.raises(CacheError, match="give rng"):
        arrange("random", queue, holding([]))


def test_routing_keys_of_many_running_requests_come_first():
    queue = [Waiting([1], routing_key=key) for key in ("rare", "", "new", "often", "rare", "also")]
    assert arrange("routing-key", queue, holding([]), running_keys=["often", "rare", "often", "also", ""]).indices == [
        3,
        5,
        0,
        4,
        1,
        2,
    ]
    assert arrange("routing-key", queue, holding([]), running_keys=[""]).indices == list(range(6))


@pytest.mark.parametrize("name", NAMES)
def test_an_order_loses_nobody_and_repeats_itself(name):
    rng = np.random.default_rng(3)
    cached = [rng.integers(0, 3, 60).tolist() for _ in range(12)]
    queue = []
    for number in range(100):
        head = cached[number % 12][: rng.integers(0, 60)]
        queue.append(Waiting([*head, *rng.integers(0, 3, 50).tolist()], max_new=int(rng.integers(0, 9)), arrival=number))
    orders = [arrange(name, queue, holding(cached), processed=200, rng=Random(1)) for _ in range(2)]
    assert sorted(orders[0].indices) == list(range(100))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("name", NAMES)
def test_without_a_cache_orders_that_look_up_are_first_come_first_served(name):
    queue = [Waiting([head] * 40, max_new=head, routing_key=str(head % 2)) for head in range(1, 20)]
    found = arrange(name, queue, holding([], enable=False), running_keys=["0"], rng=Random(1))
    assert found.active == (name if name in {"fcfs", "lof", "random", "routing-key"} else "fcfs")


@pytest.mark.parametrize(("count", "active"), [(128, "lpm"), (129, "fcfs")])
def test_a_long_queue_is_not_looked_up(count, active):
    cached = [7] * 50
    queue = [*(Waiting([head] * 40) for head in range(10, 9 + count)), Waiting(cached)]
    found = arrange("lpm", queue, holding([cached]))
    assert found.active == active
    assert found.indices[0] == (count - 1 if active == "lpm" else 0)


def test_the_in_batch_rule_keeps_namespaces_apart():
    queue = [Waiting([5] * 40, Space(salt=salt)) for salt in ("a", "b", "a", None)]
    assert arrange("lpm", queue, holding([])).late == {2}


def test_a_tree_deeper_than_pythons_stack_is_walked():
    line = list(range(1, 1201))
    queue = [Waiting([*line[:length], 9_999]) for length in range(1, 1200)]
    found = arrange("dfs-weight", queue, holding([line]))
    assert found.indices == list(range(1198, -1, -1)), "the deepest first: a node's own come after its children's"


def test_a_look_up_in_the_queue_splits_the_tree():
    cache = holding([[4] * 40])
    arrange("lpm", [Waiting([*[4] * 10, *[5] * 10])], cache)
    assert sorted(len(node.tokens) for node in cache.snapshot().nodes.values()) == [0, 10, 30]


def test_an_unknown_order_is_refused():
    with pytest.raises(CacheError, match="no queue order 'fast': choose one of fcfs, lpm"):
        arrange("fast", [], holding([]))
