"""What every cache promises, whichever engine it imitates: what is refused, in what words, and that nothing changes by it."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.cache.block_cache import BlockCache
from kvlab.cache.contract import CacheError, Grant, Refused, Space
from kvlab.cache.plain_cache import PlainCache
from kvlab.cache.radix_cache import RadixCache

CACHES = {
    "vllm": lambda tokens=64: BlockCache(None if tokens is None else tokens // 4 + 1, 4),
    "sglang": lambda tokens=64: RadixCache(tokens, 4),
    "sglang-1": lambda tokens=64: RadixCache(tokens, 1),
    "plain": lambda tokens=64: PlainCache(tokens, 4),
}


@pytest.fixture(params=CACHES)
def make(request):
    return CACHES[request.param]


@pytest.fixture
def cache(make):
    """A cache in the middle of its work: one request ended, one runs, one waits."""
    cache = make()
    cache.start("old", range(10))
    cache.finish("old")
    cache.start("here", range(12))
    cache.decode("here", 5)
    cache.add("waiting", [7, 7, 7])
    return cache


def refused(cache, words, call):
    """Tell that `call` is refused in one sentence with these words, and that nothing changes."""
    cache.events()
    before = cache.snapshot()
    with pytest.raises(CacheError, match=words) as error:
        call(cache)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)
    assert cache.snapshot() == before
    assert before.copy().fold(cache.events()) == before
    cache.check_integrity()


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("'nobody' is not here", lambda c: c.take(["nobody"])),
        ("'nobody' is not here", lambda c: c.take(["here", "nobody"])),
        ("'nobody' is not here", lambda c: c.commit(["nobody"])),
        ("'nobody' is not here", lambda c: c.commit(["here", "nobody"])),
        ("'nobody' is not here", lambda c: c.append("nobody", 1)),
        ("'nobody' is not here", lambda c: c.release("nobody", "stop")),
        ("'nobody' is not here", lambda c: c.row("nobody")),
        ("'nobody' is not here", lambda c: c.decode("nobody", 1)),
        ("'old' is not here", lambda c: c.finish("old")),
        ("'here' is here already", lambda c: c.add("here", [1])),
        ("'here' is here already", lambda c: c.start("here", [1])),
        ("'waiting' is here already", lambda c: c.add("waiting", [1])),
        ("'new' does not wait", lambda c: c.start("new")),
        ("append to request 'waiting'", lambda c: c.append("waiting", 1)),
        ("commit request 'waiting'", lambda c: c.commit(["waiting"])),
        ("decode request 'waiting'", lambda c: c.decode("waiting", 1)),
        ("names a request twice", lambda c: c.take(["here", "here"])),
        ("names a request twice", lambda c: c.take(["waiting", "waiting"])),
        ("is empty: give it at least one token", lambda c: c.add("new", [])),
        ("is empty", lambda c: c.start("new", np.empty(0))),
        ("holds -1 at position 2", lambda c: c.add("new", [1, 2, -1])),
        ("holds 2147483648 at position 0", lambda c: c.start("new", [2**31])),
        ("must be a flat list of token ids", lambda c: c.add("new", [1.5, 2])),
        ("must be a flat list of token ids", lambda c: c.add("new", ["a"])),
        ("must be a flat list of token ids", lambda c: c.add("new", "text")),
        ("must be a flat list of token ids", lambda c: c.add("new", [[1, 2], [3]])),
        ("must be a flat list of token ids", lambda c: c.add("new", [[1, 2]])),
        ("must be a flat list of token ids", lambda c: c.add("new", 5)),
        ("must be a flat list of token ids", lambda c: c.add("new", [2**70])),
        ("must be a flat list of token ids", lambda c: c.peek([True, False])),
        ("holds -3 at position 0", lambda c: c.match([-3])),
        ("the token appended to request 'here' is -1", lambda c: c.append("here", -1)),
        ("the token appended to request 'here' is -1", lambda c: c.decode("here", -1)),
        ("the token appended to request 'here' is 1.5", lambda c: c.decode("here", 1.5)),
        ("priority of request 'new' is 'high'", lambda c: c.add("new", [1], priority="high")),
        ("max_new of request 'new' is -1", lambda c: c.add("new", [1], max_new=-1)),
        ("headroom is -4", lambda c: c.take(["waiting"], None, -4)),
        ("budget is -1", lambda c: c.take(["waiting"], -1)),
        ("budget is 2.5", lambda c: c.take(["waiting"], 2.5)),
        ("tokens is -1", lambda c: c.evict(-1)),
        ("cannot be released for 'boredom'", lambda c: c.release("here", "boredom")),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(cache, words, call):
    refused(cache, words, call)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("names a request twice|is here already", lambda c: c.prefill([{"id": "a", "tokens": [1]}, {"id": "a", "tokens": [1]}])),
        ("'b' is empty", lambda c: c.prefill([{"id": "a", "tokens": [1]}, {"id": "b", "tokens": []}])),
        ("'here' is here already", lambda c: c.prefill([{"id": "a", "tokens": [1]}, {"id": "here", "tokens": [1]}])),
        ("not both", lambda c: c.take(["here", "waiting"])),
        ("nothing left to prefill", lambda c: c.chunk("here")),
        ("'waiting': it waits", lambda c: c.chunk("waiting")),
        ("cannot retract request 'waiting'", lambda c: c.retract("waiting")),
        ("cannot be released for 'because'", lambda c: c.finish("here", "because")),
        ("token ids alone", lambda c: c.add("new", [1, 2], Space(items=(("cat.png", 0, 2),)))),
        ("token ids alone", lambda c: c.peek([1, 2], Space(embeds=(b"0", b"1")))),
    ],
)
def test_bad_input_to_a_radix_cache(words, call):
    cache = CACHES["sglang"]()
    cache.start("here", range(12))
    cache.add("waiting", [7, 7, 7])
    refused(cache, words, call)


def test_a_part_of_a_prompt_is_decoded_by_nobody():
    cache = RadixCache(64, 4, chunk=8)
    cache.start("long", range(20))
    refused(cache, "go on with chunk first", lambda c: c.decode("long", 1))
    cache.finish("long")  # ends it as it is
    assert cache.peek(range(20)).tokens == 8


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("does not wait", lambda c: c.resume("here")),
        ("cannot preempt request 'waiting'", lambda c: c.preempt("waiting")),
        ("decode request 'waiting'", lambda c: c.decode("waiting")),
        ("2 tokens and 1 embeddings", lambda c: c.add("new", [0, 0], Space(embeds=(b"0",)))),
        ("tuple of bytes", lambda c: c.peek([1], Space(embeds=b"0"))),
        ("item \\('cat', 3, 0\\) must be", lambda c: c.add("new", [1], Space(items=(("cat", 3, 0),)))),
        ("begin where the one before", lambda c: c.peek([1], Space(items=(("cat", 3, 2), ("dog", 4, 1))))),
    ],
)
def test_bad_input_to_a_block_cache(words, call):
    cache = CACHES["vllm"]()
    cache.start("here", range(12))
    cache.add("waiting", [7, 7, 7])
    refused(cache, words, call)


@pytest.mark.parametrize("size", [0, -1, True, 2.5, "16", None])
@pytest.mark.parametrize("make", [BlockCache, RadixCache, PlainCache])
def test_sizes_that_cannot_be(make, size):
    unit = "page_size" if make is RadixCache else "block_size"
    with pytest.raises(CacheError, match=f"{unit} is {size!r}: it must be a whole number of at least 1"):
        make(**{unit: size})
    if size is not None:  # None is unlimited
        number = "num_blocks" if make is BlockCache else "num_tokens"
        with pytest.raises(CacheError, match=f"{number} is {size!r}: it must be a whole number of at least"):
            make(**{number: size})


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("num_tokens is 1,024: make it a multiple of the page size 7", lambda: RadixCache(1024, 7)),
        ("num_tokens is 1,024: make it a multiple of the block size 7", lambda: PlainCache(1024, 7)),
        ("num_blocks is 1: it must be a whole number of at least 2", lambda: BlockCache(1)),
        ("policy 'oldest' is not one of SGLang's", lambda: RadixCache(policy="oldest")),
        ("chunk is 0", lambda: RadixCache(chunk=0)),
        ("hash 'md5' is not one of vLLM's", lambda: BlockCache(hash="md5")),
        ("hash_seed is 7: give it as text", lambda: BlockCache(hash_seed=7)),
        ("watermark is 1", lambda: BlockCache(watermark=1)),
        ("max_num_batched_tokens is 0", lambda: BlockCache(max_num_batched_tokens=0)),
        ("5 cannot be part of a namespace", lambda: Space(salt=5)),
        ("cannot be part of a namespace", lambda: Space(extra_key="\ud800")),
        ("lora is 'name': give its name and its path", lambda: Space(lora="name")),
    ],
)
def test_settings_that_cannot_be(words, make):
    with pytest.raises(CacheError, match=words):
        make()


def test_requests_come_run_and_go(make):
    cache = make()
    cache.add("a", [1, 2, 3, 4, 5])
    assert cache.waits("a")
    (grant,) = cache.take(["a"])
    assert (grant.hit, grant.start, len(grant.slots), grant.todo) == (0, 0, 5, 0)
    assert cache.row("a").written == 0
    assert cache.commit(["a"]) == []
    assert cache.row("a").written == 5
    cache.append("a", 6)
    (grant,) = cache.take(["a"])
    assert (grant.start, len(grant.slots)) == (5, 1)
    cache.commit(["a"])
    assert cache.row("a").tokens == [1, 2, 3, 4, 5, 6]
    cache.release("a", "stop")
    assert cache.runs() == 0
    assert cache.sizes().protected == 0


def test_a_second_commit_changes_nothing(cache):
    before = cache.snapshot()
    assert cache.commit(["here"]) == []
    assert cache.commit(["here", "here"]) == []
    assert cache.snapshot() == before


def test_nothing_to_do_is_granted_as_nothing(cache):
    cache.append("here", 6)
    assert len(cache.take(["here"])[0].slots) == (2 if cache.policy == "sglang" else 1)  # SGLang's decode leaves one pending
    (grant,) = cache.take(["here"])
    assert (len(grant.slots), grant.todo) == (0, 0)


def test_a_budget_of_nothing_reaches_nobody(cache):
    cache.append("here", 6)
    before = cache.snapshot()
    for ids in (["waiting"], ["here"]):
        assert cache.take(ids, 0) == [Refused(ids[0], "not_reached", None, 0)]
    assert cache.snapshot() == before


def test_a_budget_is_spent_in_order(make):
    cache = make()
    for id, tokens in ("a", range(10)), ("b", range(100, 110)), ("c", range(200, 210)):
        cache.add(id, tokens)
    a, b, c = cache.take(["a", "b", "c"], 16)
    assert (len(a.slots), a.todo) == (10, 0)
    cut = 4 if cache.policy == "sglang" and cache.unit == 4 else 6  # SGLang cuts at pages, and charges whole ones
    assert (len(b.slots), b.todo) == (cut, 10 - cut)
    assert c == Refused("c", "not_reached", None, 0)
    cache.commit(["a", "b"])
    (b,) = cache.take(["b"])
    assert (b.hit, b.start, len(b.slots), b.todo) == (0, cut, 10 - cut, 0)


def test_decodes_count_against_a_budget(make):
    cache = make()
    for id in "abc":
        cache.start(id, range(5))
        cache.append(id, 1)
    answers = cache.take(["a", "b", "c"], 2)
    assert [isinstance(answer, Grant) for answer in answers] == [True, True, False]
    assert answers[2].why == "not_reached"


@pytest.mark.parametrize(("tokens", "why"), [(range(100, 124), "no_space"), (range(100, 200), "never_fits")])
def test_a_refused_admission_changes_nothing_but_says_what_it_found(make, tokens, why):
    """SGLang splits and stamps when it looks up; here nothing is to be split."""
    cache = make()
    cache.start("big", range(48))
    cache.add("next", tokens)
    cache.events()
    before = cache.snapshot()
    (answer,) = cache.take(["next"])
    assert (answer.why, answer.hit) == (why, 0)
    assert answer.short >= len(tokens) - 16
    assert cache.snapshot() == before
    cache.release("big", "abort")
    cache.evict(64)
    assert isinstance(cache.take(["next"])[0], Grant) is (why == "no_space")


def test_an_admission_needs_room_for_the_whole_prompt_though_the_budget_cuts_it(make):
    """vLLM's "whole sequence must fit"; SGLang tests the whole remaining prompt too."""
    cache = make()
    cache.start("here", range(32))
    cache.add("next", range(100, 140))
    assert cache.take(["next"], 8)[0].why == "no_space"


def test_headroom_is_left_by_admissions_only(make):
    cache = make()
    cache.start("here", range(20))
    cache.add("next", range(100, 130))
    assert cache.take(["next"], None, 20)[0].why == "no_space"
    (grant,) = cache.take(["next"], 8, 0)
    cache.commit(["next"])
    (grant,) = cache.take(["next"], None, 60)
    assert grant.todo == 0


def test_an_id_released_between_take_and_commit_is_gone(cache):
    cache.take(["waiting"])
    cache.release("waiting", "abort")
    refused(cache, "'waiting' is not here", lambda c: c.commit(["here", "waiting"]))
    assert cache.peek([7, 7, 7, 7, 7]).tokens == 0


@pytest.mark.parametrize("why", ["stop", "length", "abort", "preempt", "failed"])
def test_slots_without_written_kv_are_never_hit(make, why):
    """A fault after `take`, before `commit`: whatever the release is called."""
    cache = make()
    tokens = list(range(16))
    cache.add("a", tokens)
    cache.take(["a"])
    cache.release("a", why)
    assert cache.peek(tokens).tokens == 0
    assert sum(cache.sizes()) == cache.sizes().free == 64
    cache.check_integrity()
    assert cache.waits("a") is (why == "preempt")


@pytest.mark.parametrize("kind", ["vllm", "sglang", "sglang-1"])
def test_a_failed_step_loses_what_it_wrote_and_nothing_else(kind):
    cache = CACHES[kind]()
    cache.start("a", range(8))
    cache.start("b", range(100, 110))
    for id in "ab":
        cache.append(id, 9)
    cache.take(["a", "b"])
    for id in "ab":
        cache.release(id, "failed")
    assert cache.peek([*range(8), 9]).tokens == 8
    assert cache.peek([*range(100, 110), 9]).tokens == (10 if cache.unit == 1 else 8)
    assert cache.runs() == 0
    cache.check_integrity()


def test_preempted_and_resumed_a_request_keeps_its_outputs(make):
    cache = make()
    cache.start("a", range(8))
    cache.append("a", 50)
    cache.take(["a"])
    cache.commit(["a"])
    cache.append("a", 51)
    cache.release("a", "preempt")
    row = cache.row("a")
    assert (row.running, row.tokens, row.prompt, len(row.slots), row.written) == (False, [*range(8), 50, 51], 8, 0, 0)
    (grant,) = cache.take(["a"])
    assert grant.hit == (0 if cache.policy == "none" else 8)
    assert (grant.hit + len(grant.slots), grant.todo) == (10, 0)


def test_a_resumed_request_is_not_counted_again(make):
    """The hit rate counts tokens at first admissions (docs/vllm.md 27, docs/sglang.md 19)."""
    cache = make()
    cache.start("old", range(12))
    cache.finish("old")
    cache.start("a", range(10))
    cache.release("a", "preempt")
    cache.take(["a"])
    state = cache.snapshot()
    assert (state.queried, state.found) == ((0, 0) if cache.policy == "none" else (22, 9 if cache.unit == 1 else 8))


def test_reset_forgets_everything_once_nothing_runs(make):
    cache = make()
    cache.start("a", range(16))
    before = cache.snapshot()
    assert not cache.reset()
    assert cache.snapshot() == before
    cache.finish("a")
    assert cache.reset()
    assert cache.peek(range(20)).tokens == 0
    assert cache.sizes() == (64, 0, 0)


def test_evict_makes_cached_tokens_free(make):
    cache = make()
    cache.start("a", range(16))
    cache.finish("a")
    cached = 0 if cache.policy == "none" else 16
    assert cache.sizes() == (64 - cached, cached, 0)
    assert cache.evict(0) == 0
    assert cache.evict(1000) == cached
    assert cache.sizes() == (64, 0, 0)


def test_three_states_are_told_apart(make):
    """ "Usage fell to 0 %" does not mean that the cache is gone: in use, cached idle and free are three states."""
    cache = make()
    cache.start("a", range(16))
    assert cache.sizes() == (48, 0, 16)
    cache.finish("a")
    if cache.policy == "none":
        assert cache.sizes() == (64, 0, 0)
    else:
        assert cache.sizes() == (48, 16, 0)
        assert cache.peek(range(20)).tokens == 16


def test_an_unlimited_cache_never_refuses(make):
    cache = make(None)
    for i in range(20):
        cache.start(f"r{i}", range(i, i + 500))
    assert cache.sizes().free is None
    assert cache.num_tokens is None
    assert cache.runs() == 20
    cache.check_integrity()
    state = cache.snapshot()
    assert state == state.copy()


def test_peek_leaves_no_trace_in_the_events(cache):
    cache.events()
    before = cache.snapshot()
    cache.peek(range(7))
    cache.lookup(range(7))
    assert cache.events() == []
    assert cache.snapshot() == before


def test_events_are_built_only_for_listeners(make):
    cache = make()
    cache.start("a", range(16))
    assert cache.events() == []
    cache.finish("a")
    assert cache.events()
    assert cache.events() == []


def test_tokens_may_come_as_any_flat_whole_numbers(make):
    cache = make(None)
    tokens = [5, 6, 7, 8, 9]
    for i, given in enumerate((tokens, tuple(tokens), range(5, 10), np.array(tokens), np.array(tokens, dtype=np.uint16))):
        cache.start(f"r{i}", given)
        assert cache.row(f"r{i}").tokens == tokens
        assert all(type(token) is int for token in cache.row(f"r{i}").tokens)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "sglang-1"])
def test_a_match_says_why_it_stops(kind):
    cache = CACHES[kind]()
    cache.start("a", range(16))
    cache.finish("a")
    assert cache.peek(range(16)).stopped == "last_token"
    assert cache.peek([*range(8), 99, 98, 97, 96, 95]).stopped == "diverged"
    assert cache.peek([*range(15), 99, 1, 2, 3]).stopped == "diverged"
    assert cache.peek(range(16), read=False).stopped == "skipped"
    assert cache.peek([]).stopped == "end"
    if cache.unit == 4:
        assert cache.peek(range(15)).stopped == "unit"
        assert cache.peek(range(3)).stopped == "unit"


def test_what_is_wrong_inside_is_noticed(cache):
    """check_integrity() is no decoration: break each cache once."""
    cache.check_integrity()
    if cache.policy == "vllm":
        cache._refs[next(iter(cache._refs))] += 1
    elif cache.policy == "sglang":
        cache._tree.evictable += 1
    else:
        cache._free.push_front([1])
    with pytest.raises(AssertionError):
        cache.check_integrity()
