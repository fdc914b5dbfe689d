"""The queue of free units, and SGLang's pages: what is taken first, and what comes back where."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvlab.cache.free_list import FreeList
from kvlab.cache.page_pool import PagePool


def test_units_are_taken_in_the_order_of_their_ids():
    free = FreeList(5)
    assert list(free) == [1, 2, 3, 4, 5]
    assert free.pop(2) == [1, 2]
    assert free.pop(0) == []
    assert (len(free), list(free)) == (3, [3, 4, 5])


def test_units_come_back_at_either_end_in_the_given_order():
    free = FreeList(5)
    free.pop(5)
    free.push_back([3, 1])
    free.push_front([5, 2])
    assert list(free) == [5, 2, 3, 1]
    assert free.pop(3) == [5, 2, 3]


def test_a_unit_leaves_from_anywhere():
    free = FreeList(6)
    free.pop(4)
    free.push_back([1, 2])
    free.push_front([4, 3])
    for unit in (2, 4, 5):
        assert unit in free
        free.remove(unit)
        assert unit not in free
    assert list(free) == [3, 6, 1]


def test_what_is_not_there_cannot_be_taken():
    free = FreeList(3)
    with pytest.raises(AssertionError):
        free.pop(4)
    free.pop(3)
    with pytest.raises(AssertionError):
        free.remove(4)


def test_lists_are_equal_when_the_order_is():
    one, other = FreeList(4), FreeList(4)
    one.push_back(one.pop(4))
    assert one == other  # fresh or used, what counts is the order
    one.push_back(one.pop(1))
    assert one != other
    assert one.copy() == one
    one.renew()
    assert one == other
    assert one != [1, 2, 3, 4]


def test_an_unlimited_list_costs_nothing_and_has_an_end_to_come_back_to():
    free = FreeList(None)
    assert free.pop(3) == [1, 2, 3]
    free.push_front([2])
    free.push_back([1])
    assert free.pop(2) == [2, 4]
    assert len(free) > 1_000_000_000
    assert free.runs()[-1] == (1, 1)
    assert list(free.used()) == [1]


def test_the_naive_twin_is_a_list():
    rng = random.Random(0)
    for _ in range(200):
        size = rng.randint(1, 12)
        free, twin, out = FreeList(size), list(range(1, size + 1)), []
        for _ in range(30):
            match rng.randint(0, 4):
                case 0:
                    count = rng.randint(0, len(twin))
                    assert free.pop(count) == twin[:count]
                    out += twin[:count]
                    del twin[:count]
                case 1 if out:
                    units = [out.pop() for _ in range(rng.randint(1, len(out)))]
                    free.push_front(units)
                    twin = units + twin
                case 2 if out:
                    units = [out.pop(0) for _ in range(rng.randint(1, len(out)))]
                    free.push_back(units)
                    twin += units
                case 3 if any(unit in free.used() for unit in twin):
                    unit = rng.choice(list(free.used()))
                    free.remove(unit)
                    twin.remove(unit)
                    out.append(unit)
                case 4:
                    free = free.copy()
            assert (list(free), len(free)) == (twin, len(twin))
            assert [unit for first, last in free.runs() for unit in range(first, last + 1)] == twin


def test_single_slots_come_back_at_the_back():
    pool = PagePool(5, 1)
    assert pool.pop(3).tolist() == [1, 2, 3]
    assert pool.free(np.array([3, 1])).tolist() == [3, 1]
    assert list(pool.queue()) == [4, 5, 3, 1]
    assert pool.pop(4).tolist() == [4, 5, 3, 1]
    assert len(pool) == 0


def test_pages_come_back_in_front_a_group_a_call():
    pool = PagePool(5, 4)
    pool.pop(4)
    assert pool.free(np.array([8, 9, 10, 11, 4, 5])).tolist() == [2, 1]  # a partial page is a page
    pool.free(np.array([12]))
    assert list(pool.queue()) == [3, 2, 1, 5]
    assert pool.pop(2).tolist() == [3, 2]  # cuts the group
    assert list(pool.queue()) == [1, 5]


def test_freeing_nothing_is_nothing():
    for pool in (PagePool(5, 4), PagePool(5, 1)):
        assert pool.free(np.empty(0, dtype=np.int64)).tolist() == []
        assert len(pool) == 5


def test_a_pool_hands_out_only_what_it_has():
    pool = PagePool(3, 1)
    with pytest.raises(AssertionError):
        pool.pop(4)
    pool.pop(3)
    pool.renew()
    assert pool.pop(3).tolist() == [1, 2, 3]
