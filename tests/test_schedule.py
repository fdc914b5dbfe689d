"""Both schedulers, driven by real caches and a made-up model: who runs when, who makes room, and that nobody is lost."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest

from kvlab.cache.block_cache import BlockCache
from kvlab.cache.plain_cache import PlainCache
from kvlab.cache.radix_cache import RadixCache
from kvlab.schedule.queueing import NAMES
from kvlab.schedule.sglang import SglangScheduler
from kvlab.schedule.vllm import VllmScheduler

STOP = 7


class Driver:
    """Runs a scheduler's steps with a model that says 1000, 1001, ... or what `answers` holds for a request."""

    def __init__(self, scheduler):
        self.scheduler, self.cache = scheduler, scheduler.cache
        self.answers = {}
        self.outputs = {}
        self.ended = {}
        self.steps = []

    def add(self, id, tokens, max_new=4, answer=(), **more):
        self.answers[id] = list(answer)
        self.outputs[id] = []
        self.scheduler.add(id, list(tokens), max_new=max_new, **more)

    def step(self):
        grants = self.scheduler.next()
        self.note()
        if not grants:
            return None
        sampled = {}
        for grant in grants:
            if grant.todo == 0:
                said = len(self.outputs[grant.id])
                answer = self.answers[grant.id]
                sampled[grant.id] = answer[said] if said < len(answer) else 1000 + said
        done = self.scheduler.done(sampled)
        for id, token in done.kept.items():
            self.outputs[id].append(token)
        self.note()
        self.steps.append({grant.id: len(grant.slots) for grant in grants})
        self.cache.check_integrity()
        return {grant.id: grant for grant in grants}

    def note(self):
        for id, outcome, reason in self.scheduler.pop_ended():
            assert id not in self.ended, f"{id} ended twice"
            self.ended[id] = outcome
            assert bool(reason) == (outcome not in ("stop", "length"))

    def run(self):
        for _ in range(10_000):
            if self.step() is None:
                return
        pytest.fail("the scheduler never came to rest")


def vllm(blocks=1000, size=16, **more):
    return Driver(VllmScheduler(BlockCache(blocks + 1, size), **more))


def sglang(tokens=16_000, page=1, *, overlap=True, **more):
    return Driver(SglangScheduler(RadixCache(tokens, page, overlap=overlap), overlap=overlap, **more))


def numbers(n, start=0):
    return range(start, start + n)


# ------------------------------------------------------------------ vLLM
def test_vllm_decodes_first_and_fills_the_budget_with_a_chunk():
    d = vllm(max_batch_tokens=32)
    d.add("a", numbers(20))
    d.step()
    d.add("b", numbers(100, 500), max_new=2)
    d.run()
    assert d.steps == [{"a": 20}, {"a": 1, "b": 31}, {"a": 1, "b": 31}, {"a": 1, "b": 31}, {"b": 7}, {"b": 1}]
    assert d.ended == {"a": "length", "b": "length"}


def test_vllm_twin_in_the_same_step_hits():
    d = vllm()
    for id in "abcd":
        d.add(id, numbers(1000))
    grants = d.step()
    assert [grants[id].hit for id in "abcd"] == [0, 992, 992, 992]
    assert d.scheduler.stopped == {"a": "diverged", "b": "unit", "c": "unit", "d": "unit"}


@pytest.mark.parametrize(("tokens", "again", "why"), [(1000, 1000, "unit"), (1008, 1008, "last_token"), (1000, 600, "diverged")])
def test_vllm_says_why_the_match_ended(tokens, again, why):
    d = vllm()
    d.add("a", numbers(tokens))
    d.run()
    d.add("b", [*numbers(again), *numbers(tokens - again, 5000)])
    d.step()
    assert d.scheduler.stopped == {"b": why}


def test_a_request_that_does_not_read_says_skipped():
    for d in (vllm(), sglang(), Driver(VllmScheduler(PlainCache(1600)))):
        d.add("a", numbers(100), read=not isinstance(d.cache, (BlockCache, RadixCache)))
        d.step()
        assert d.scheduler.stopped == {"a": "skipped"}


def test_vllm_preempts_the_last_to_come_and_admits_nobody_meanwhile():
    d = vllm(blocks=6, size=4)
    d.add("a", numbers(8), max_new=12)
    d.add("b", numbers(8, 100), max_new=12)
    d.step()  # two blocks each, two left
    d.step()  # a and b take them for their first outputs
    d.add("c", numbers(2, 200), max_new=1)
    for _ in range(4):
        assert "c" not in d.step()
    assert d.scheduler.running == ["a"]
    assert list(d.scheduler.waiting) == ["b", "c"]
    assert len(d.outputs["b"]) == 5
    d.run()
    assert d.ended == {"a": "length", "b": "length", "c": "length"}
    assert d.outputs["b"] == [1000 + i for i in range(12)]
    # a's room was not enough for b at once; when b came back it found its own prompt
    assert any(step.get("b", 0) > 1 for step in d.steps[1:])


def test_vllm_preempted_request_finds_its_own_blocks_again():
    d = vllm(blocks=9, size=4)
    d.add("a", numbers(8), max_new=20)
    d.add("b", numbers(8, 100), max_new=20)
    hits = []
    while grants := d.step():
        hits += [g.hit for g in grants.values() if g.hit]
    assert hits
    assert d.ended == {"a": "length", "b": "length"}


def test_vllm_request_that_outgrows_the_pool_alone_is_told_so():
    d = vllm(blocks=4, size=4)
    d.add("a", numbers(10), max_new=50)
    d.run()
    assert d.ended == {"a": "abort"}
    assert len(d.outputs["a"]) == 7  # sixteen slots hold ten tokens and six; the seventh needs none
    assert d.cache.sizes().protected == 0


def test_vllm_watermark_keeps_blocks_free_while_something_runs():
    d = vllm(blocks=10, size=4, watermark=0.5)  # int(0.5 * 11) = 5 blocks
    d.add("a", numbers(16), max_new=8)
    d.step()
    d.add("b", numbers(8, 100), max_new=1)
    assert "b" not in d.step()
    d.run()
    assert d.ended == {"a": "length", "b": "length"}


def test_vllm_looks_for_a_stop_before_it_counts_and_sglang_after():
    for d, outcome in ((vllm(), "stop"), (sglang(), "length")):
        d.add("a", numbers(5), max_new=2, answer=[1, STOP], stop_ids=[STOP])
        d.run()
        assert d.ended == {"a": outcome}


@pytest.mark.parametrize("make", [lambda: vllm(blocks=4), lambda: sglang(64)])
def test_what_can_never_fit_is_refused_and_the_next_goes_on(make):
    d = make()
    d.add("big", numbers(200))
    d.add("small", numbers(10, 300))
    d.run()
    assert d.ended == {"big": "refused", "small": "length"}


def test_running_requests_are_limited():
    for d in (vllm(max_running=2), sglang(max_running=2)):
        for id in "abc":
            d.add(id, numbers(10, ord(id)))
        d.step()
        assert len(d.scheduler.running) == 2
        d.run()
        assert set(d.ended.values()) == {"length"}


def test_a_step_must_hold_a_unit():
    with pytest.raises(ValueError, match="max_batch_tokens is 8"):
        vllm(max_batch_tokens=8)


# ------------------------------------------------------------------ SGLang
def test_sglang_prefills_before_it_decodes():
    d = sglang()
    d.add("a", numbers(20))
    d.step()
    d.add("b", numbers(30, 500))
    d.run()
    assert d.steps[:3] == [{"a": 20}, {"b": 30}, {"a": 1, "b": 1}]


def test_sglang_twins_in_one_batch_both_compute():
    d = sglang()
    for id in "ab":
        d.add(id, numbers(1000))
    grants = d.step()
    assert [g.hit for g in grants.values()] == [0, 0]
    d.add("c", numbers(1000))
    assert d.step()["c"].hit == 999
    assert d.scheduler.stopped == {"c": "last_token"}


def test_sglang_cuts_a_long_prompt_into_chunks_that_others_may_join():
    d = sglang(max_batch_tokens=40)
    d.add("a", numbers(100), max_new=2)
    d.add("b", numbers(10, 500), max_new=2)
    d.run()
    assert d.steps[:4] == [{"a": 40}, {"a": 40}, {"a": 20, "b": 10}, {"a": 1, "b": 1}]
    assert d.ended == {"a": "length", "b": "length"}


@pytest.mark.parametrize(
    ("overlap", "answer", "kept"), [(True, [1, 2, STOP], 23), (False, [1, 2, STOP], 22), (True, [1, 2, 3], 22)]
)
def test_sglang_overlap_computes_the_stop_token_too(overlap, answer, kept):
    d = sglang(overlap=overlap)
    d.add("a", numbers(20), max_new=3 if answer[-1] != STOP else 10, answer=answer, stop_ids=[STOP])
    d.run()
    assert d.outputs["a"] == answer
    assert d.ended == {"a": "stop" if STOP in answer else "length"}
    assert d.cache.peek([*numbers(20), *answer, 99]).tokens == kept
    assert len(d.steps) == kept - 20 + 1


def test_sglang_ended_request_rides_beside_others():
    d = sglang()
    d.add("a", numbers(20), max_new=10, answer=[STOP], stop_ids=[STOP])
    d.add("b", numbers(20, 100), max_new=4)
    d.step()
    assert d.ended == {"a": "stop"}
    assert d.step().keys() == {"a", "b"}
    assert d.outputs["a"] == [STOP]
    assert d.step().keys() == {"b"}


def test_sglang_ride_that_finds_no_room_is_let_go_as_it_is():
    d = sglang(47, conservativeness=0.0)  # running requests reserve nothing, so that b is admitted beside a
    d.add("a", numbers(20), max_new=10, answer=[1, 2, 3, STOP], stop_ids=[STOP])
    d.step()
    d.add("b", numbers(20, 100), max_new=5)
    for _ in range(4):  # b's prefill, then three steps of both: one slot is left
        d.step()
    assert d.ended == {"a": "stop"}
    assert d.step().keys() == {"b"}
    assert d.cache.peek([*numbers(20), 1, 2, 3, STOP, 99]).tokens == 23  # without STOP
    d.run()
    assert d.ended == {"a": "stop", "b": "length"}


@pytest.mark.parametrize(("pool", "answer", "hit"), [(100, 30, 0), (130, 45, 32)])
def test_sglang_retracts_who_has_the_fewest_outputs_and_evicts_for_the_rest(pool, answer, hit):
    d = sglang(pool, conservativeness=0.0)
    d.add("a", numbers(30), max_new=answer)
    d.step()
    d.step()
    d.add("b", numbers(32, 100), max_new=answer)
    admissions = []
    while grants := d.step():
        admissions += [(g.hit, g.start) for id, g in grants.items() if id == "b" and g.start == g.hit]
    # b's own prompt stays in the tree, unless making room for 20 more steps of a lets it fall
    assert admissions == [(0, 0), (hit, hit)]
    assert d.ended == {"a": "length", "b": "length"}
    assert d.outputs["b"] == [1000 + i for i in range(answer)]


def test_sglang_last_one_is_aborted_not_retracted():
    d = sglang(40)
    d.add("a", numbers(20), max_new=18)
    d.step()
    d.cache.add("other", list(numbers(10, 900)))
    d.cache.take(["other"])
    d.run()
    assert d.ended == {"a": "abort"}
    assert len(d.outputs["a"]) == 11


def test_sglang_looks_up_nobody_while_it_is_full():
    d = sglang(60)
    d.add("a", numbers(20), max_new=10)
    d.step()
    d.add("b", numbers(40, 100), max_new=5)
    d.cache.events()
    d.run()
    refused = [e for e in d.cache.events() if type(e).__name__ == "Refused"]
    assert [(e.id, e.why) for e in refused] == [("b", "no_space")]  # once, not in each step of a
    assert d.ended == {"a": "length", "b": "length"}


def test_sglang_reserves_less_as_decoding_goes_on():
    d = sglang(5000)
    d.add("a", numbers(20), max_new=1000)
    d.step()
    before = d.scheduler.ratio
    for _ in range(700):
        d.step()
    assert before == pytest.approx(0.7)
    assert d.scheduler.ratio == pytest.approx(0.098)


# ------------------------------------------------------------------ ends
@pytest.mark.parametrize("make", [vllm, sglang])
def test_cancel_ends_waiting_and_running_requests(make):
    d = make(max_running=1)
    d.add("a", numbers(20))
    d.add("b", numbers(20, 100))
    d.step()
    for id in ("b", "a", "nobody"):
        d.scheduler.cancel(id)
    d.note()
    assert d.ended == {"a": "abort", "b": "abort"}
    assert d.scheduler.idle
    assert d.cache.sizes().protected == 0


def test_cancel_of_a_riding_request_does_not_change_its_end():
    d = sglang()
    d.add("a", numbers(20), answer=[1, 2, STOP], stop_ids=[STOP])
    for _ in range(3):
        d.step()
    d.scheduler.cancel("a")
    d.note()
    assert d.ended == {"a": "stop"}
    assert d.scheduler.idle
    assert d.cache.peek([*numbers(20), 1, 2, STOP]).tokens == 22  # an abort would have kept the prompt only


@pytest.mark.parametrize("make", [vllm, sglang])
def test_a_failed_step_leaves_nothing_to_hit(make):
    d = make()
    d.add("a", numbers(100))
    d.add("twin", numbers(100))
    d.scheduler.next()
    assert d.scheduler.fail("the model broke") == ["a", "twin"]
    d.note()
    assert d.ended == {"a": "failed", "twin": "failed"}
    assert d.scheduler.idle
    d.cache.check_integrity()
    assert d.cache.sizes().protected == 0
    assert d.cache.peek(numbers(100)).tokens == 0


@pytest.mark.parametrize("kind", ["vllm", "sglang", "none"])
@pytest.mark.parametrize("seed", range(12))
def test_nobody_is_lost_whatever_comes(kind, seed):
    rng = Random(seed)
    unit = rng.choice([1, 4, 16])
    tokens = 16 * rng.randrange(3, 8)
    budget = rng.choice([unit, 2 * unit, 200])
    if kind == "sglang":
        d = Driver(SglangScheduler(RadixCache(tokens, unit), budget, overlap=rng.random() < 0.5))
    else:
        cache = BlockCache(tokens // unit + 1, unit) if kind == "vllm" else PlainCache(tokens, unit)
        d = Driver(VllmScheduler(cache, budget, watermark=rng.choice([0.0, 0.2])))
    heads = [[rng.randrange(50) for _ in range(tokens)] for _ in range(2)]
    asked = []
    for number in range(25):
        id = f"r{number}"
        prompt = [*rng.choice(heads)[: rng.randrange(1, tokens)], rng.randrange(50)]
        answer = [rng.choice([1, 2, 3, STOP]) for _ in range(8)]
        d.add(id, prompt, max_new=rng.randrange(1, 9), answer=answer, stop_ids=[STOP])
        asked.append(id)
        for _ in range(rng.randrange(3)):
            d.step()
        if rng.random() < 0.2:
            d.scheduler.cancel(rng.choice(asked))
            d.note()
        if rng.random() < 0.1 and d.scheduler.next():
            d.scheduler.fail("thrown in")
            d.note()
            d.cache.check_integrity()
    d.run()
    assert d.ended.keys() == set(asked)
    assert d.cache.sizes().protected == 0
    assert len(set(d.ended.values())) > 1


def test_schedule_knows_no_torch():
    code = "import sys, kvlab.schedule.vllm, kvlab.schedule.sglang; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------ SGLang's queue orders
def first_to_run(order, cached, queue, **more):
    """Which of `queue` runs first when only one may run at once."""
    d = sglang(max_running=1, order=order, **more)
    d.add("cached", cached, max_new=1)
    d.run()
    for id, tokens, max_new in queue:
        d.add(id, tokens, max_new=max_new)
    return next(iter(d.step()))


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("fcfs", "long"),
        ("lpm", "hit"),
        ("dfs-weight", "hit"),
        ("shortest-prefill-first", "short"),
        ("lof", "short"),
        ("hrrn", "long"),
    ],
)
def test_sglang_admits_in_the_order_asked_for(order, first):
    # hrrn: nothing was processed since they came, so none has waited yet
    queue = [("long", numbers(500, 2000), 3), ("hit", [*numbers(200), *numbers(40, 3000)], 3), ("short", numbers(30, 4000), 9)]
    assert first_to_run(order, numbers(200), queue) == first


def test_sglang_in_any_order_ends_everybody_and_loses_nothing():
    for order in NAMES:
        d = sglang(tokens=600, max_running=3, order=order, rng=Random(3))
        for number in range(30):
            d.add(str(number), [*numbers(40 * (number % 3)), *numbers(10 + number, 1000 * number)], max_new=5)
        d.run()
        assert list(d.ended.values()) == ["length"] * 30
        d.cache.check_integrity()
        assert d.cache.sizes().protected == 0


def test_an_order_that_cannot_be_is_refused():
    for order in ("best", "random"):
        with pytest.raises(ValueError, match=f"the order is '{order}': choose one of fcfs, lpm"):
            sglang(order=order)
    with pytest.raises(ValueError, match="all but fcfs with a RadixCache"):
        SglangScheduler(PlainCache(1600), order="lpm")
