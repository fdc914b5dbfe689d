"""vLLM's cache by examples; the numbers in names and brackets are the rules of docs/vllm.md."""

from __future__ import annotations

import hashlib

import pytest

from kvlab.cache.block_cache import BlockCache
from kvlab.cache.contract import Refused, Space
from kvlab.cache.events import Keyed, Unkeyed
from kvlab.cache.hashing import extra_keys
from kvlab.trace.wire import wire


def hits(cache, prompts, **options):
    """Run prompts one after the other; return what each found."""
    found = []
    for i, prompt in enumerate(prompts):
        answer = cache.start(f"r{i}", prompt, **options)
        assert answer.ok
        cache.finish(f"r{i}")
        cache.check_integrity()
        found.append(answer.hit_tokens)
    return found


def blocks(cache, id):
    return (cache.row(id).slots[:: cache.unit] // cache.unit).tolist()


@pytest.mark.parametrize(
    ("length", "hit"),
    [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (64, 48), (100, 96), (1000, 992), (1008, 992), (1024, 1008)],
)
def test_a_whole_prompt_repeated(length, hit):
    assert hits(BlockCache(), [range(length)] * 3) == [0, hit, hit]


def test_salts_keep_prompts_apart():
    cache, found = BlockCache(), []
    for i, salt in enumerate(["t1", "t1", "t2", None]):
        found.append(cache.start(f"r{i}", range(1000), salt=salt).hit_tokens)
        cache.finish(f"r{i}")
    assert found == [0, 992, 0, 0]
    assert cache.lookup(range(1000), salt="t2").hit_tokens == 992
    assert cache.lookup(range(1000), salt="").hit_tokens == 992  # an empty salt is no salt


def test_loras_keep_prompts_apart():
    cache, found = BlockCache(), []
    for i, lora in enumerate([None, "A", "A", "B"]):
        found.append(cache.start(f"r{i}", range(1000), lora=lora).hit_tokens)
        cache.finish(f"r{i}")
    assert found == [0, 0, 992, 0]


def test_images_are_part_of_the_keys_of_the_blocks_that_they_touch():
    cache = BlockCache(None, 4)

    def with_image(name, at):
        return Space(items=((name, at, 6),))

    cache.start("a", range(20), space=with_image("cat", 5))
    assert cache.peek(range(20), with_image("cat", 5)).tokens == 16
    assert cache.peek(range(20), with_image("dog", 5)).tokens == 4
    assert cache.peek(range(20), with_image("cat", 6)).tokens == 4
    assert cache.peek(range(20)).tokens == 4


def test_extra_keys_of_a_block():
    """2: in this order, images with their offset from the block's start, the salt in the first block only."""
    space = Space(salt="s", lora=("name", "path"), items=(("cat", 5, 6), ("dog", 11, 2)))
    lora = ("lora", "name", "path")
    assert extra_keys(space, 0, 4) == (lora, ("cache_salt", "s"))
    assert extra_keys(space, 4, 8) == (lora, ("mm", "cat", 1))
    assert extra_keys(space, 8, 12) == (lora, ("mm", "cat", -3), ("mm", "dog", 3))
    assert extra_keys(space, 12, 16) == (lora, ("mm", "dog", -1))
    assert extra_keys(space, 16, 20) == (lora,)
    assert extra_keys(Space(salt="s"), 4, 8) is None


def test_embeddings_are_part_of_the_keys_of_the_blocks_that_they_fill():
    """2: each block's own slice; beyond the prompt, where answers stand, it is empty."""
    rows = tuple(bytes([i]) * 8 for i in range(8))
    assert extra_keys(Space(embeds=rows), 4, 8) == (("prompt_embeds", hashlib.sha256(b"".join(rows[4:])).digest()),)
    assert extra_keys(Space(embeds=rows), 8, 12) == (("prompt_embeds", hashlib.sha256(b"").digest()),)
    cache = BlockCache(None, 4)
    cache.start("a", [0] * 8, space=Space(embeds=rows))
    assert cache.peek([0] * 9, Space(embeds=(*rows, b"x"))).tokens == 8
    assert cache.peek([0] * 9, Space(embeds=(*rows[:7], b"x", b"x"))).tokens == 4
    assert cache.peek([0] * 9).tokens == 0


def test_four_equal_requests_in_one_take_share_what_the_first_one_schedules():
    cache = BlockCache()
    for id in "abcd":
        cache.add(id, range(1000))
    grants = cache.take(list("abcd"))
    assert [grant.hit for grant in grants] == [0, 992, 992, 992]
    assert [len(grant.slots) for grant in grants] == [1000, 8, 8, 8]
    cache.commit(list("abcd"))
    cache.check_integrity()
    assert len({blocks(cache, id)[-1] for id in "abcd"}) == 4, "the last, partial block is each one's own"
    assert len({tuple(blocks(cache, id)[:-1]) for id in "abcd"}) == 1


def test_four_equal_requests_beyond_the_budget_wait_for_another_step():
    cache = BlockCache()
    for id in "abcd":
        cache.add(id, range(1000))
    answers = cache.take(list("abcd"), 1010)
    assert [answer.hit for answer in answers] == [0, 992, 992, None]
    assert [len(answer.slots) for answer in answers[:3]] == [1000, 8, 2]  # hits do not count, what is left over is cut anywhere
    assert answers[3] == Refused("d", "not_reached", None, 0)


@pytest.mark.parametrize(
    ("usable", "head", "expected"),
    [(8, 0, [0, 0, 0, 0, 0, 0]), (12, 0, [0, 0, 0, 48, 48, 48]), (8, 32, [0, 32, 32, 48, 48, 48])],
)
def test_thrash(usable, head, expected):
    """Three prompts of 64 tokens in turn: a pool a little too small keeps nothing, a shared head changes that."""
    prompts = [[*range(head), *range(1000 * i, 1000 * i + 64 - head)] for i in (1, 2, 3)]
    assert hits(BlockCache(usable + 1), prompts * 2) == expected


def test_the_last_sampled_token_has_no_kv():
    """13: usable are floor((prompt + outputs - 1) / B) blocks."""
    cache = BlockCache(None, 4)
    cache.start("a", range(6))
    cache.decode("a", 6)
    cache.decode("a", 7, last=True)
    cache.finish("a")
    assert cache.lookup([*range(8), 99]).hit_tokens == 4
    cache.start("b", range(6))
    cache.decode("b", 6)
    cache.decode("b", 7)  # its step is taken: now it has
    cache.finish("b")
    assert cache.lookup([*range(8), 99]).hit_tokens == 8


def test_a_conversation_goes_on():
    cache = BlockCache()
    cache.start("turn1", range(342))
    for token in range(342, 350):
        cache.decode("turn1", token)
    cache.decode("turn1", 350, last=True)
    cache.finish("turn1")
    assert cache.start("turn2", range(365)).hit_tokens == 336


def test_free_blocks_queue_by_release_tail_first_worthless_ones_in_front():
    """15, 16: nine unkeyed blocks go to the front as a group, keyed ones to the back."""
    cache = BlockCache(13, 4)
    assert list(cache.snapshot().queue) == list(range(1, 13))
    cache.start("a", range(14))
    cache.start("b", range(100, 104))
    assert list(cache.snapshot().queue) == list(range(6, 13))
    cache.finish("a")
    assert list(cache.snapshot().queue) == [4, *range(6, 13), 3, 2, 1]
    cache.finish("b")
    assert list(cache.snapshot().queue) == [4, *range(6, 13), 3, 2, 1, 5]


def test_without_caching_everything_goes_to_the_front():
    cache = BlockCache(14, 4, enable_caching=False)
    cache.start("a", range(36))
    cache.finish("a")
    assert list(cache.snapshot().queue) == [*range(9, 0, -1), 10, 11, 12, 13]
    assert cache.start("b", range(36)).hit_tokens == 0
    assert (cache.snapshot().queried, cache.peek(range(36)).stopped) == (0, "skipped")


def test_eviction_is_lazy():
    """17: a freed block can be hit until it is taken for something else, one `removed` a block, before `stored`."""
    cache = BlockCache(5, 4)
    cache.events()
    cache.start("a", range(16))
    cache.finish("a")
    stored = cache.events()
    cache.start("b", range(100, 108))
    assert [event[0] for event in wire(cache.events())] == ["removed", "removed", "stored"]
    cache.finish("b")
    assert cache.lookup(range(16)).hit_tokens == 8  # the tail fell first
    hashes = next(event.hashes for event in stored if isinstance(event, Keyed))
    assert len(set(hashes)) == 4


def test_a_request_cannot_evict_its_own_hit():
    """11: hits are touched first, and count as needed where they stand in the free queue."""
    cache = BlockCache(5, 4)
    cache.start("a", range(16))
    cache.finish("a")
    answer = cache.start("b", [*range(12), 50, 51, 52, 53])
    assert (answer.ok, answer.hit_tokens) == (True, 12)
    cache.finish("b")
    cache.add("c", range(20))
    (refused,) = cache.take(["c"])
    assert (refused.why, refused.hit, refused.short) == ("never_fits", 12, 4)


def test_a_refusal_changes_nothing_not_even_the_queue():
    cache = BlockCache(9, 4)
    cache.start("old", range(16))
    cache.finish("old")
    cache.start("here", range(100, 116))
    cache.events()
    before = cache.snapshot()
    answer = cache.start("next", [*range(8), *range(200, 212)])
    assert (answer.ok, answer.hit_tokens, answer.why) == (False, 8, "no_space")
    assert cache.snapshot() == before
    assert wire(cache.events()) == []


def test_equal_blocks_stand_side_by_side():
    """10: the table is append-only; look-ups return the first; each copy has its own `stored` and `removed`."""
    cache = BlockCache(None, 4)
    cache.events()
    cache.start("a", range(6))
    cache.start("b", range(8))  # hits block 0
    cache.decode("a", 6)
    cache.decode("a", 7)
    assert blocks(cache, "a")[0] == blocks(cache, "b")[0]
    assert blocks(cache, "a")[1] != blocks(cache, "b")[1]
    assert [event[0] for event in wire(cache.events())] == ["stored", "stored", "stored"]
    first = blocks(cache, "b")[1]
    assert cache.peek(range(9)).slots[4] // 4 == first
    for id in "ab":
        cache.finish(id)
    cache.check_integrity()
    cache.evict(10_000)
    assert sum(event[0] == "removed" for event in wire(cache.events())) == 3


def test_requests_that_skip_reading_still_write():
    cache = BlockCache(None, 4)
    cache.start("a", range(9), skip_read=True)
    assert cache.start("b", range(9), skip_read=True).hit_tokens == 0
    assert cache.start("c", range(9)).hit_tokens == 8
    assert (cache.snapshot().queried, cache.snapshot().found) == (9, 8)


def test_chunks_of_one_prefill_are_allocations_of_their_own():
    cache = BlockCache(None, 4, max_num_batched_tokens=6)
    cache.events()
    assert len(cache.start("a", range(14)).slots) == 14
    stored = [event for event in cache.events() if isinstance(event, Keyed)]
    assert [len(event.hashes) for event in stored] == [1, 2]
    assert stored[1].parent == stored[0].hashes[0]


def test_the_watermark_is_for_admissions_while_something_runs():
    cache = BlockCache(11, 4, watermark=0.25)  # int(0.25 * 11) = 2 blocks stay
    assert cache.start("a", range(36)).ok
    assert not cache.start("b", range(100, 104)).ok
    cache.decode("a", 36)  # not an admission
    assert cache.row("a").slots[-1] // 4 == 10
    cache.finish("a")
    assert cache.start("b", range(100, 140)).ok


def test_a_step_without_room_is_tried_again():
    cache = BlockCache(4, 4)
    cache.start("a", range(4))
    cache.start("b", range(100, 108))
    assert not cache.decode("a", 4).ok
    assert cache.row("a").tokens[-1] == 4, "the token stays"
    cache.preempt("b")
    assert cache.decode("a").ok
    assert cache.row("a").written == 5


def test_a_preempted_request_finds_its_own_blocks_again():
    cache = BlockCache(9, 4)
    cache.start("a", range(10))
    for token in (10, 11, 12):
        cache.decode("a", token)
    cache.preempt("a")
    cache.events()
    assert cache.resume("a").hit_tokens == 12
    assert cache.row("a").tokens == list(range(13))
    assert wire(cache.events()) == [], "what it hits is not stored again"


def test_a_resume_that_is_refused_goes_on_waiting():
    cache = BlockCache(6, 4)
    cache.start("a", range(12))
    cache.preempt("a")
    cache.start("b", range(100, 116))
    assert not cache.resume("a").ok
    assert cache.waits("a")
    cache.finish("b")
    assert cache.resume("a").ok


def test_twins_of_a_failed_step_fail_with_it():
    """A twin has hit blocks that were only scheduled: when the step fails, nobody may hit them any more."""
    for order in ("ab", "ba"):
        cache = BlockCache(None, 4)
        cache.events()
        for id in "ab":
            cache.add(id, range(12))
        assert [grant.hit for grant in cache.take(["a", "b"])] == [0, 8]
        for id in order:
            cache.release(id, "failed")
        assert cache.peek(range(12)).tokens == 0
        assert sum(len(event.hashes) for event in cache.events() if isinstance(event, Unkeyed)) == 4
        assert cache.sizes().protected == 0
        cache.check_integrity()


def test_a_failed_decode_keeps_the_blocks_that_were_written():
    cache = BlockCache(None, 4)
    cache.start("a", range(7))
    cache.append("a", 7)
    cache.take(["a"])  # block 1 is full now and keyed, but its last token is not written
    assert cache.peek(range(9)).tokens == 8
    cache.release("a", "failed")
    assert cache.peek(range(9)).tokens == 4


def test_take_decodes_and_prefills_together():
    cache = BlockCache(None, 4)
    cache.start("a", range(8))
    cache.append("a", 8)
    cache.add("b", range(100, 110))
    a, b = cache.take(["a", "b"], 7)
    assert (a.start, len(a.slots), a.todo, b.start, len(b.slots), b.todo) == (8, 1, 0, 0, 6, 4)


def test_reset_needs_an_idle_pool():
    cache = BlockCache(9, 4)
    cache.start("a", range(8))
    assert not cache.reset()
    cache.finish("a")
    queue = list(cache.snapshot().queue)
    cache.events()
    assert cache.reset()
    assert wire(cache.events()) == [["cleared"]]
    assert list(cache.snapshot().queue) == queue
    assert cache.start("b", range(8)).hit_tokens == 0


@pytest.mark.parametrize("hash", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_every_hash_finds_what_it_keyed(hash):
    assert hits(BlockCache(None, 4, hash=hash), [range(20)] * 2) == [0, 16]


def test_the_parent_of_first_blocks_is_vllms():
    """3: digests agree across processes, and with vLLM's own."""
    assert BlockCache()._none.hex() == "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198"
    assert BlockCache(hash_seed="7")._none != BlockCache()._none
