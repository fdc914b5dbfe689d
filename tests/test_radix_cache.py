"""SGLang's cache by examples; the numbers in names and brackets are the rules of docs/sglang.md."""

from __future__ import annotations

import pytest

from kvlab.cache.contract import Grant, Space
from kvlab.cache.events import Evicted
from kvlab.cache.radix_cache import RadixCache
from kvlab.cache.state import ROOT
from kvlab.trace.wire import wire


def hits(cache, prompts):
    """Run prompts one after the other; return what each found."""
    found = []
    for i, prompt in enumerate(prompts):
        answer = cache.start(f"r{i}", prompt)
        assert answer.ok
        cache.finish(f"r{i}", "length")
        cache.check_integrity()
        found.append(answer.hit_tokens)
    return found


def tree(cache):
    """Return the tree as nested tuples: (tokens, lock, *children)."""
    nodes = cache.snapshot().nodes

    def one(id):
        return (len(nodes[id].tokens), nodes[id].lock, *(one(child) for child in nodes[id].children))

    return [one(child) for child in nodes[ROOT].children]


@pytest.mark.parametrize(
    ("length", "hit"),
    [(15, 14), (16, 15), (17, 16), (32, 31), (33, 32), (64, 63), (100, 99), (1000, 999), (1008, 1007), (1024, 1023)],
)
def test_a_whole_prompt_repeated(length, hit):
    assert hits(RadixCache(), [range(length)] * 3) == [0, hit, hit]


def test_a_whole_prompt_repeated_with_pages():
    assert hits(RadixCache(page_size=64), [range(1000)] * 3) == [0, 960, 960]
    assert hits(RadixCache(page_size=64), [range(960)] * 3) == [0, 896, 896]


def test_a_full_repeat_leaves_a_stub_of_one_page():
    """5: the match ends one page before the end, and splits the node there."""
    cache = RadixCache(page_size=4)
    hits(cache, [range(16)] * 2)
    assert tree(cache) == [(12, 0, (4, 0))]


def test_salts_extra_keys_and_loras_keep_prompts_apart():
    for name, values, expected in (
        ("salt", ["t1", "t1", "t2", None, ""], [0, 999, 0, 0, 999]),
        ("lora", [None, "A", "A", "B"], [0, 0, 999, 0]),
        ("extra_key", [None, "k", "k", "other"], [0, 0, 999, 0]),
    ):
        cache, found = RadixCache(), []
        for i, value in enumerate(values):
            found.append(cache.start(f"r{i}", range(1000), **{name: value}).hit_tokens)
            cache.finish(f"r{i}")
        assert found == expected, name


def test_the_loras_name_is_joined_to_the_extra_key():
    """18: so an extra key and a LoRA can mean the same; a salt is another field."""
    cache = RadixCache()
    cache.start("a", range(10), extra_key="k", lora="A")
    assert cache.peek(range(10), Space(extra_key="kA")).tokens == 9
    assert cache.peek(range(10), Space(salt="kA")).tokens == 0


def test_four_equal_requests_in_one_batch_all_compute():
    """13: each is looked up before any joins the tree; three sets of duplicates are given up at their checkpoints."""
    cache = RadixCache(5000)
    for id in "abcd":
        cache.add(id, range(1000))
    grants = cache.take(list("abcd"))
    assert [grant.hit for grant in grants] == [0, 0, 0, 0]
    assert sum(len(grant.slots) for grant in grants) == 4000
    moved = cache.commit(list("abcd"))
    assert [(m.id, m.start, len(m.slots)) for m in moved] == [("b", 0, 1000), ("c", 0, 1000), ("d", 0, 1000)]
    rows = [cache.row(id).slots.tolist() for id in "abcd"]
    assert rows[0] == rows[1] == rows[2] == rows[3] == moved[0].slots.tolist() == grants[0].slots.tolist()
    assert cache.sizes() == (4000, 0, 1000)
    assert tree(cache) == [(1000, 4)]


def test_moved_leaves_a_partial_page_where_it_is():
    """10: the page that is not full stays the request's own until it ends, then it is freed."""
    cache = RadixCache(64, 4)
    for id in "ab":
        cache.add(id, range(10))
    _, own = cache.take(["a", "b"])
    (moved,) = cache.commit(["a", "b"])
    assert (moved.id, moved.start, len(moved.slots)) == ("b", 0, 8)
    assert cache.row("b").slots.tolist() == [*cache.row("a").slots[:8].tolist(), *own.slots[8:].tolist()]
    assert cache.row("b").protected == 8
    cache.release("a", "length")
    cache.release("b", "length")
    assert cache.sizes() == (56, 8, 0)


def test_one_after_the_other_the_second_hits():
    cache = RadixCache()
    for id in "ab":
        cache.add(id, range(1000))
    (a,) = cache.take(["a"])
    cache.commit(["a"])
    (b,) = cache.take(["b"])
    assert (a.hit, b.hit, len(b.slots)) == (0, 999, 1)
    assert b.slots.tolist() != a.slots[999:].tolist()


def test_match_splits_and_stamps_peek_does_neither():
    cache = RadixCache()
    hits(cache, [range(10), range(50, 60)])
    before = cache.snapshot()
    assert cache.peek([0, 1, 2, 99]).tokens == 3
    assert cache.lookup([0, 1, 2, 99]).hit_tokens == 3
    assert cache.snapshot() == before
    found = cache.match([0, 1, 2, 99])
    assert (found.tokens, found.stopped) == (3, "diverged")
    assert tree(cache) == [(3, 0, (7, 0)), (10, 0)]
    nodes = cache.snapshot().nodes
    assert nodes[found.node].accessed == max(node.accessed for node in nodes.values())
    assert cache.match(range(10)).stopped == "end"  # the engine looks up the full length
    assert cache.match(range(10)).tokens == 10


def test_a_split_keeps_counters_and_place():
    """7: the upper part is new and inherits; the lower part keeps its id."""
    cache = RadixCache(page_size=4)
    cache.start("a", range(16), priority=3)
    (id,) = cache.snapshot().nodes[ROOT].children
    before = cache.snapshot().nodes[id]
    cache.match([*range(11), 99])
    nodes = cache.snapshot().nodes
    (upper,) = nodes[ROOT].children
    assert nodes[upper].children == [id]
    assert (nodes[upper].tokens, nodes[id].tokens) == (list(range(8)), list(range(8, 16)))
    for name in ("lock", "hits", "priority", "created"):
        assert getattr(nodes[upper], name) == getattr(nodes[id], name) == getattr(before, name)


def test_generated_tokens_join_the_tree_at_the_end():
    """8: not at every decode step."""
    cache = RadixCache()
    cache.start("a", range(10))
    for token in range(10, 15):
        cache.decode("a", token)
    assert cache.peek(range(20)).tokens == 10
    cache.finish("a", "length")
    assert cache.peek(range(20)).tokens == 14, "the last token has no K/V"


@pytest.mark.parametrize(("overlap", "reason", "kept"), [(True, "stop", 15), (True, "length", 14), (False, "stop", 14)])
def test_the_last_token_and_the_overlap_scheduler(overlap, reason, kept):
    """9: with overlap a stop has launched one more step already."""
    cache = RadixCache(overlap=overlap)
    cache.start("a", range(10))
    for token in range(10, 15):
        cache.decode("a", token)
    cache.finish("a", reason)
    assert cache.peek(range(20)).tokens == kept
    cache.check_integrity()


def test_a_conversation_goes_on():
    for overlap, expected in ((False, 350), (True, 351)):
        cache = RadixCache(overlap=overlap)
        cache.start("turn1", range(342))
        for token in range(342, 351):
            cache.decode("turn1", token)
        cache.finish("turn1", "stop")
        assert cache.start("turn2", range(365)).hit_tokens == expected


def test_aborted_and_retracted_requests_insert_nothing_new():
    for end in (RadixCache.abort, RadixCache.retract):
        cache = RadixCache(100)
        cache.start("a", range(10))
        for token in range(10, 15):
            cache.decode("a", token)
        end(cache, "a")
        assert cache.peek(range(20)).tokens == 10
        assert cache.sizes() == (90, 10, 0)


def test_a_retraction_makes_room_for_those_that_still_run():
    """19: tokens are evicted until 20 are free for each."""
    cache = RadixCache(100)
    hits(cache, [range(100, 150)])
    cache.start("a", range(20))
    cache.start("b", range(50, 70))
    cache.retract("a")
    assert cache.sizes().free == 60
    assert cache.waits("a")
    assert cache.start("a").hit_tokens == 19


@pytest.mark.parametrize("end", [RadixCache.finish, RadixCache.abort])
def test_a_waiting_request_ends_without_being_admitted(end):
    cache = RadixCache(100)
    cache.start("a", range(10))
    cache.retract("a")
    cache.evict(100)
    end(cache, "a")
    assert cache.snapshot().rows == {}
    assert cache.sizes() == (100, 0, 0)


def test_a_resumed_request_prefills_its_outputs_too():
    cache = RadixCache(100)
    cache.start("a", range(10))
    for token in range(10, 15):
        cache.decode("a", token)
    cache.retract("a")
    answer = cache.start("a", range(15))
    assert (answer.hit_tokens, len(answer.slots)) == (10, 5)
    assert cache.peek(range(20)).tokens == 15


def test_answers_fall_before_prompts():
    """11: a second insert splits at the end of the prompt; priority + 1 for the prompt."""
    cache = RadixCache(policy="priority")
    cache.start("a", range(10))
    for token in range(10, 15):
        cache.decode("a", token)
    cache.finish("a", "length")
    assert tree(cache) == [(10, 0, (4, 0))]
    upper, lower = (node for node in cache.snapshot().nodes.values() if node.id != ROOT)
    assert {len(node.tokens): node.priority for node in (upper, lower)} == {10: 1, 4: 0}
    cache.evict(1)
    assert cache.peek(range(20)).tokens == 10


def test_locks_protect_what_running_requests_read():
    """14: one lock a holder along the path."""
    cache = RadixCache(100)
    hits(cache, [range(20)])
    cache.start("a", [*range(10), 50])
    cache.start("b", [*range(10), 60])
    assert tree(cache) == [(10, 2, (10, 0), (1, 1), (1, 1))]
    assert cache.sizes() == (78, 10, 12)
    cache.evict(1000)
    assert cache.sizes() == (88, 0, 12)
    cache.finish("a")
    cache.finish("b")
    assert cache.sizes() == (88, 12, 0)


def test_whole_leaves_fall_and_parents_after_them():
    """16."""
    cache = RadixCache(100)
    hits(cache, [range(10), [*range(5), 50, 51], [*range(5), 60]])
    assert tree(cache) == [(5, 0, (5, 0), (2, 0), (1, 0))]
    cache.events()
    assert cache.evict(1) == 5
    assert cache.evict(4) == 8
    assert [len(event.slots) for event in cache.events() if isinstance(event, Evicted)] == [5, 2, 1, 5]
    assert cache.sizes() == (100, 0, 0)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", "acb"),
        ("mru", "bca"),
        ("fifo", "abc"),
        ("filo", "cba"),
        ("lfu", "bca"),
        ("slru", "bac"),  # a and c have two hits
        ("priority", "cab"),
    ],
)
def test_eviction_policies(policy, order):
    """17: which of three leaves falls first. Hits: a 3, b 1, c 2; last seen in the order a, c, b; c has the lowest priority."""
    cache = RadixCache(page_size=4, policy=policy)
    prompts = {"a": range(100, 110), "b": range(200, 210), "c": range(300, 310)}
    for name in "abcaac":
        cache.start(name, prompts[name], priority=0 if name == "c" else 1)
        cache.finish(name, "length")
    cache.match(prompts["b"])  # a look-up stamps, and is no hit
    fell = []
    while cache.sizes().evictable:
        cache.evict(1)
        fell += [name for name, prompt in prompts.items() if not cache.peek(prompt).tokens and name not in fell]
    assert "".join(fell) == order


def test_admission_keeps_room_for_the_answer():
    """15: extend + max_new + a page must be LESS than what is free, evictable and not reserved."""
    cache = RadixCache(100)
    assert not cache.start("a", range(99)).ok
    assert cache.start("a", range(98)).ok
    cache.abort("a")
    cache.add("b", range(200, 250), max_new=49)
    cache.add("c", range(200, 250), max_new=48)
    assert cache.take(["b"])[0].why == "never_fits"
    assert isinstance(cache.take(["c"])[0], Grant)
    cache.add("d", range(300, 310), max_new=100_000)  # 4096 of it are reserved
    assert cache.take(["d"])[0].short == 10 + 4096 + 1 + 1 - 50


def test_requests_of_a_batch_reserve_for_each_other():
    cache = RadixCache(100)
    first, second, third = cache.prefill(
        [{"id": id, "tokens": range(base, base + 40)} for id, base in zip("abc", (0, 100, 200), strict=True)]
    )
    assert (first.ok, second.ok) == (True, True)
    assert (third.ok, third.why, third.hit_tokens) == (False, "no_space", 0)
    assert not cache.waits("c")


def test_after_a_refusal_nobody_is_looked_up():
    cache = RadixCache(100)
    a, b = cache.prefill([{"id": "a", "tokens": range(200)}, {"id": "b", "tokens": [1]}])
    assert (a.why, a.hit_tokens, b.why, b.hit_tokens) == ("never_fits", 0, "not_reached", None)
    assert cache.snapshot().rows == {}


def test_a_refused_look_up_still_splits():
    """15: the refused one has been looked up; splits and stamps remain, and locks do not."""
    cache = RadixCache(100)
    hits(cache, [range(20)])
    assert cache.start("big", [*range(10), *range(500, 600)]).hit_tokens == 10
    assert tree(cache) == [(10, 0, (10, 0))]


def test_chunks_can_be_hit_before_the_prompt_is_through():
    cache = RadixCache(1000, 4, chunk=20)
    first = cache.start("long", range(50))
    assert (first.hit_tokens, len(first.slots)) == (0, 20)
    assert cache.start("other", range(30)).hit_tokens == 20
    second = cache.chunk("long")
    assert (second.ok, second.hit_tokens, len(second.slots)) == (True, 20, 20)
    third = cache.chunk("long")
    assert (third.hit_tokens, len(third.slots)) == (40, 10)
    row = cache.row("long")
    assert (row.hit, row.written, row.protected) == (0, 50, 48)
    cache.check_integrity()


def test_the_hit_of_a_grant_is_told_once():
    cache = RadixCache(1000, 4)
    hits(cache, [range(16)])
    cache.add("a", range(40))
    grants = []
    for _ in range(3):
        grants += cache.take(["a"], 8)
        cache.commit(["a"])
    assert [(grant.hit, grant.start, len(grant.slots), grant.todo) for grant in grants] == [
        (16, 16, 8, 16),
        (0, 24, 8, 8),
        (0, 32, 8, 0),
    ]


def test_two_chunks_before_one_commit():
    """A step may be several takes and has one commit."""
    cache = RadixCache(1000)
    cache.add("a", range(40))
    first, second = cache.take(["a"], 10) + cache.take(["a"], 10)
    assert (first.start, second.start, second.hit) == (0, 10, 0)
    cache.commit(["a"])
    assert cache.row("a").protected == 20


def test_a_decode_batch_that_does_not_fit_grants_nothing():
    cache = RadixCache(30)
    cache.start("a", range(14))
    cache.start("b", range(100, 113))
    for token in (1, 2):
        for id in "ab":
            cache.decode(id, token)
    # 29 slots are taken, both have a token pending
    answers = cache.take(["a", "b"])
    assert [(answer.why, answer.short) for answer in answers] == [("no_space", 1)] * 2
    assert isinstance(cache.take(["a"])[0], Grant)


def test_decodes_evict_before_they_fail():
    cache = RadixCache(30)
    hits(cache, [range(100, 114)])
    cache.start("a", range(14))
    assert cache.sizes() == (2, 14, 14)
    for token in range(3):
        assert cache.decode("a", token).ok
    assert cache.sizes().evictable == 14
    assert cache.decode("a", 3).ok
    assert cache.sizes() == (13, 0, 14)


def test_a_refused_decode_appends_nothing():
    cache = RadixCache(16)
    cache.start("a", range(14))
    for token in (1, 2, 3):
        assert cache.decode("a", token).ok
    answer = cache.decode("a", 4)
    assert (answer.ok, answer.why) == (False, "never_fits")
    assert cache.row("a").tokens == [*range(14), 1, 2, 3]


def test_freed_slots_go_to_the_back_pages_to_the_front():
    """2."""
    cache = RadixCache(12)
    cache.start("a", range(3))
    cache.abort("a")
    cache.evict(3)
    assert list(cache.snapshot().queue) == [*range(4, 13), 1, 2, 3]
    paged = RadixCache(48, 4)
    paged.start("a", range(11))
    paged.abort("a")
    paged.evict(8)
    assert list(paged.snapshot().queue) == [1, 2, 3, *range(4, 13)]


def test_disabled_nothing_is_reused():
    """21."""
    cache = RadixCache(100, enable=False)
    cache.events()
    assert hits(cache, [range(20)] * 2) == [0, 0]
    assert cache.sizes() == (100, 0, 0)
    assert cache.peek(range(20)).stopped == cache.match(range(20)).stopped == "skipped"
    assert cache.reset()
    assert wire(cache.events()) == [], "not even a reset is told"


def test_events_name_pages_by_chained_hashes():
    """25: the salt starts the chain, extra keys and LoRAs do not enter; neighbours merge."""
    cache = RadixCache(page_size=4)
    cache.events()
    cache.start("a", range(8))
    ((name, plain, parent),) = wire(cache.events())
    assert (name, len(plain), parent) == ("stored", 2, None)
    cache.start("b", range(8), extra_key="k")
    assert wire(cache.events()) == [["stored", plain, None]]
    cache.start("c", range(8), salt="s")
    ((_, salted, _),) = wire(cache.events())
    assert not set(salted) & set(plain)
    cache.start("d", range(12))
    ((_, more, parent),) = wire(cache.events())
    assert (len(more), parent) == (1, plain[1])
    for id in "abcd":
        cache.abort(id)
    cache.evict(1000)
    ((name, removed),) = wire(cache.events())
    assert (name, sorted(removed)) == ("removed", sorted(plain * 2 + salted + more))
    cache.reset()
    assert wire(cache.events()) == [["cleared"]]
