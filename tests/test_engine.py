"""The engine as people use it: hits, steps, faults, stops, bad input, and what it tells of itself."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvlab.cache.block_cache import BlockCache
from kvlab.cache.plain_cache import PlainCache
from kvlab.cache.radix_cache import RadixCache
from kvlab.engine.engine import Engine
from kvlab.engine.models import load_model
from kvlab.engine.request import EngineError, Request, RequestError, Result, Sampling
from kvlab.engine.sampler import Sampler, choose
from kvlab.prompts import Part, Prompt

CACHES = ("vllm", "sglang", "none")
HITS = ("vllm", "sglang")


@pytest.fixture(scope="module")
def loaded():
    return load_model("tiny-llama", device="cpu", dtype="float32")


@pytest.fixture
def make(loaded):
    """Make engines whose pool is poisoned and whose integrity is checked in the end."""
    engines = []

    def make(cache="vllm", num_tokens=4096, **more):
        engines.append(Engine(loaded, cache, num_tokens=num_tokens, poison=True, **more))
        return engines[-1]

    yield make
    for engine in engines:
        rests(engine)


def rests(engine):
    """Nothing is on its way, nothing is held, and the trace tells of the cache as it is."""
    engine.cache.check_integrity()
    assert engine.scheduler.idle
    assert engine.cache.sizes().protected == 0
    assert engine.trace.state == engine.cache.snapshot()
    assert all(record.outcome is not None for record in engine.trace.records.values())


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, 512, count).tolist()


@contextmanager
def hook(module, function, *, before=False):
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(function)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def forwards(model):
    """Count the model's calls, and the tokens of each."""
    calls = []
    handle = model.register_forward_pre_hook(lambda _m, _a, kw: calls.append(kw["input_ids"].shape[1]), with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


# ------------------------------------------------------------------ hits
@pytest.mark.parametrize(("cache", "hit"), [("vllm", 992), ("sglang", 1000), ("none", 0)])
def test_second_request_finds_the_shared_part(make, cache, hit):
    engine = make(cache)
    shared = ids(1000)
    first, second = (engine.generate([shared + ids(40, seed)], 4, ignore_eos=True)[0] for seed in (1, 2))
    assert (first.cached_tokens, second.cached_tokens) == (0, hit)
    assert second.stopped == ("skipped" if cache == "none" else "diverged")
    assert second.prompt_tokens == 1040
    assert engine.trace.steps[-4].prefilled == {second.id: 1040 - hit}


@pytest.mark.parametrize(("cache", "hits"), [("vllm", [0, 992, 992, 992]), ("sglang", [0, 0, 0, 0])])
def test_twins_of_one_step(make, cache, hits):
    engine = make(cache, max_batch_tokens=4096, num_tokens=8192)
    results = engine.generate([ids(1000)] * 4, 6, ignore_eos=True)
    assert [r.cached_tokens for r in results] == hits
    assert len({tuple(r.output_ids) for r in results}) == 1


@pytest.mark.parametrize(("overlap", "kept"), [(True, 103), (False, 102)])
def test_overlap_caches_the_stop_token_too(make, overlap, kept):
    engine = make("sglang", overlap=overlap)
    (free,) = engine.generate([ids(100)], 3, ignore_eos=True)
    engine.reset()
    with forwards(engine.model) as calls:
        (first,) = engine.generate([Request(ids(100), stop_token_ids=[free.output_ids[2]], max_new_tokens=50)])
    assert first.output_ids == free.output_ids
    assert first.outcome == "stop"
    assert calls == [100, 1, 1, 1][: 4 if overlap else 3]
    (next_turn,) = engine.generate([ids(100) + first.output_ids + ids(20, 1)], 1, ignore_eos=True)
    assert next_turn.cached_tokens == kept


def test_salts_and_adapters_keep_requests_apart(make):
    for cache in HITS:
        engine = make(cache)
        asked = [
            Request(ids(64), salt="a"),
            Request(ids(64), salt="a"),
            Request(ids(64), salt="b"),
            Request(ids(64), lora="french"),
            Request(ids(64), lora="french"),
            Request(ids(64)),
        ]
        hits = [engine.generate([request], 1)[0].cached_tokens for request in asked]
        assert [bool(hit) for hit in hits] == [False, True, False, False, True, False]


def test_a_request_may_leave_the_cache_unread(make):
    engine = make("vllm")
    engine.generate([ids(64)], 1)
    (result,) = engine.generate([Request(ids(64), read=False)], 1)
    assert (result.cached_tokens, result.stopped) == (0, "skipped")


# ------------------------------------------------------------------ steps
@pytest.mark.parametrize("cache", CACHES)
def test_eight_requests_are_one_forward_a_step(make, cache):
    engine = make(cache)
    with forwards(engine.model) as calls:
        results = engine.generate([ids(100, i) for i in range(8)], 32, ignore_eos=True)
    assert calls == [800] + [8] * 31
    assert len(engine.trace.steps) == 32
    assert all(len(r.output_ids) == 32 and r.outcome == "length" for r in results)


@pytest.mark.parametrize("cache", CACHES)
def test_a_small_budget_cuts_prefill_into_chunks(make, cache):
    engine = make(cache, max_batch_tokens=64)
    with forwards(engine.model) as calls:
        engine.generate([ids(200)], 3, ignore_eos=True)
    assert calls == [64, 64, 64, 8, 1, 1]
    assert [s.kind for s in engine.trace.steps] == ["prefill"] * 4 + ["decode"] * 2


def test_decodes_share_steps_with_prefills_in_vllm_only(make):
    kinds = {}
    for cache in HITS:
        engine = make(cache, max_batch_tokens=64)
        engine.generate([ids(30), ids(200, 1)], 8, ignore_eos=True)
        kinds[cache] = {s.kind for s in engine.trace.steps}
    assert kinds == {"vllm": {"prefill", "mixed", "decode"}, "sglang": {"prefill", "decode"}}


def test_step_by_step_says_what_happened(make):
    engine = make("vllm")
    assert engine.step() is None
    id = engine.submit(ids(40), 2, ignore_eos=True)
    assert engine.result(id) is None
    first = engine.step()
    assert (first.kind, first.prefilled, first.decoded, first.reused, first.ended) == ("prefill", {id: 40}, (), {id: 0}, {})
    second = engine.step()
    assert (second.kind, second.prefilled, second.decoded, second.ended) == ("decode", {}, (id,), {id: "length"})
    assert engine.step() is None
    result = engine.result(id)
    assert result.output_ids == [first.sampled[id], second.sampled[id]]
    assert engine.result(id) is None  # once


def test_times_add_up(make):
    engine = make("vllm", max_batch_tokens=64)
    results = engine.generate([ids(100, i) for i in range(3)], 6, ignore_eos=True)
    steps = engine.trace.steps
    assert all(a.end <= b.begin for a, b in pairwise(steps))
    for step in steps:
        assert step.prefill_seconds + step.decode_seconds == pytest.approx(step.end - step.begin)
        assert step.estimated == (step.kind == "mixed")
        assert (step.prefill_seconds > 0, step.decode_seconds > 0) == (bool(step.prefilled), bool(step.decoded))
    for result in results:
        record = engine.trace.records[result.id]
        assert 0 <= record.submitted <= record.started < record.first_token < record.finished
        assert result.ttft == record.first_token - record.submitted
        assert result.prefill_seconds == record.first_token - record.started <= result.ttft
        mine = [s for s in steps if result.id in s.decoded]
        assert result.decode_seconds == pytest.approx(sum(s.decode_seconds for s in mine))
        assert result.estimated == any(s.estimated for s in mine)
    assert results[0].estimated


def test_trace_tells_of_every_request(make):
    engine = make("vllm")
    parts = (Part("system", 0, 30), Part("question", 30, 40))
    a, b = engine.generate([Prompt(tuple(ids(40)), parts), Request(ids(40, 1), parts=parts[:1])], 2, ignore_eos=True)
    assert engine.trace.records[a.id].parts == parts
    assert engine.trace.records[b.id].parts == parts[:1]
    assert engine.trace.records[a.id].tokens == ids(40) + a.output_ids
    assert engine.trace.at(-1).rows == {}
    assert engine.trace.at(0).rows.keys() == {a.id, b.id}


def test_evicted_tokens_are_counted(make):
    for cache in HITS:
        engine = make(cache, 160)
        for seed in range(3):
            engine.generate([ids(100, seed)], 1, ignore_eos=True)
        assert sum(s.evicted for s in engine.trace.steps) >= 96


def test_old_events_are_folded_into_the_base(make):
    engine = make("vllm", 512)
    engine._recorder.keep_events, engine._recorder.keep_records = 40, 5
    for seed in range(30):
        engine.generate([ids(50, seed)], 4, ignore_eos=True)
        assert engine.trace.state == engine.cache.snapshot()
    assert len(engine.trace.events) <= 90
    assert len(engine.trace.records) <= 11
    assert engine.trace.steps[0].index > 0
    assert len(engine.trace.steps) == len(engine.trace.marks)
    first, last = engine.trace.steps[0], engine.trace.steps[-1]
    assert engine.trace.at(first.index - 1).rows.keys() <= engine.trace.at(first.index).rows.keys()
    assert engine.trace.at(first.index).rows.keys() == {*first.prefilled, *first.decoded}
    assert engine.trace.at(last.index) == engine.cache.snapshot()
    for gone in (0, first.index - 2, last.index + 1):
        with pytest.raises(IndexError, match=f"step {gone} is not in the trace: steps {first.index} to {last.index} are kept"):
            engine.trace.at(gone)


# ------------------------------------------------------------------ sampling
def test_a_seed_gives_the_same_tokens_alone_and_in_company(make):
    engine = make("vllm")

    def ask(seed):
        return Request(ids(30), sampling=Sampling(temperature=1.5, top_p=0.95, top_k=100, seed=seed))

    (alone,) = engine.generate([ask(1)], 20, ignore_eos=True)
    company = engine.generate([ids(50, 9), ask(2), ask(1)], 20, ignore_eos=True)
    assert company[2].output_ids == alone.output_ids
    assert company[1].output_ids != alone.output_ids


def test_narrow_sampling_is_greedy(make):
    engine = make("vllm")
    narrow = [{"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-6}, {"temperature": 1e-9}]
    greedy, *others = engine.generate([ids(30), *(Request(ids(30), sampling=s) for s in narrow)], 10, ignore_eos=True)
    assert all(r.output_ids == greedy.output_ids for r in others)


def test_sampler_draws_what_the_probabilities_say():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    cases = (
        (Sampling(temperature=1.0, seed=0), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(temperature=1.0, top_k=2, seed=0), [0.625, 0.375, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.6, seed=0), [0.625, 0.375, 0, 0]),  # 0.5 is not enough, so the second joins
        (Sampling(temperature=0.5, seed=0), [0.685, 0.247, 0.062, 0.007]),
    )
    for sampling, want in cases:
        sampler = Sampler(sampling)
        drawn = Counter(sampler.pick(logits) for _ in range(4000))
        assert [drawn[i] / 4000 for i in range(4)] == pytest.approx(want, abs=0.03)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unsound_logits_are_told_by_name(bad):
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    with pytest.raises(EngineError, match="logits for b are not finite"):
        choose(logits, ["a", "b"], [Sampler(Sampling()), None])


# ------------------------------------------------------------------ faults
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("at", ["before", "attention", "after"])
def test_a_fault_in_any_layer_loses_nothing_but_the_step(make, cache, layer, at):
    engine = make(cache)
    prompts = [ids(100), ids(100), ids(60, 1)]  # twins
    want = [r.output_ids for r in engine.generate(prompts, 5, ignore_eos=True)]
    engine.reset()

    def broken(*_args):
        msg = "the layer broke"
        raise ValueError(msg)

    block = engine.model.model.layers[layer]
    with hook(block.self_attn.o_proj if at == "attention" else block, broken, before=at != "after"):
        results = engine.generate(prompts, 5, ignore_eos=True)
    assert [r.outcome for r in results] == ["failed"] * 3
    assert results[0].reason == "the step failed: ValueError: the layer broke"
    assert [(step.index, step.kind) for step in engine.trace.steps] == [(0, "prefill")], "a failed step counts"
    rests(engine)
    assert engine.cache.peek(prompts[0]).tokens == 0
    assert [r.output_ids for r in engine.generate(prompts, 5, ignore_eos=True)] == want


@pytest.mark.parametrize("cache", CACHES)
def test_a_fault_while_decoding_keeps_what_was_written_and_the_others_go_on(make, cache):
    engine = make(cache, max_batch_tokens=64)
    prompts = [ids(60), ids(200, 1)]
    want = [r.output_ids for r in engine.generate(prompts, 6, ignore_eos=True)]
    engine.reset()
    count = iter(range(100))

    def third(*_args):
        if next(count) == 2:
            msg = "the third step broke"
            raise ValueError(msg)

    with hook(engine.model, third, before=True):
        results = engine.generate(prompts, 6, ignore_eos=True)
    assert "failed" in [r.outcome for r in results]
    rests(engine)
    again = engine.generate(prompts, 6, ignore_eos=True)
    assert [r.output_ids for r in again] == want


def test_nan_in_a_layer_is_a_fault_too(make):
    for cache in HITS:
        engine = make(cache, max_batch_tokens=64)
        prompt = ids(200)

        def spoil(_module, _args, output):
            return torch.full_like(output, float("nan"))

        with hook(engine.model.model.layers[0].mlp, spoil):
            (result,) = engine.generate([prompt], 4)
        assert result.outcome == "failed"
        assert "not finite" in result.reason
        assert result.output_ids == []
        assert len(engine.trace.steps) == 1  # seen with the first chunk, before anybody could hit it
        assert engine.cache.peek(prompt).tokens == 0
        assert engine.generate([prompt], 4)[0].outcome == "length"


def test_an_interrupt_in_a_layer_is_passed_on_once_everything_is_released(make):
    for cache in CACHES:
        engine = make(cache, max_batch_tokens=150)

        def interrupt(*_args):
            raise KeyboardInterrupt

        with hook(engine.model.model.layers[1], interrupt), pytest.raises(KeyboardInterrupt):
            engine.generate([ids(100), ids(100, 1), ids(100, 2)], 5)
        rests(engine)
        assert {r.outcome for r in engine.trace.records.values()} == {"failed", "abort"}
        assert engine.generate([ids(100)], 5, ignore_eos=True)[0].cached_tokens == 0


def test_ctrl_c_waits_for_the_end_of_the_step(make):
    engine = make("vllm")
    before = signal.getsignal(signal.SIGINT)
    with hook(engine.model.model.layers[1], lambda *_: signal.raise_signal(signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        engine.generate([ids(100)], 50, ignore_eos=True)
    assert signal.getsignal(signal.SIGINT) is before
    rests(engine)
    assert engine.cache.peek(ids(100)).tokens == 96  # the step was finished and committed
    assert [r.outcome for r in engine.trace.records.values()] == ["abort"]
    assert engine.generate([ids(100)], 5, ignore_eos=True)[0].cached_tokens == 96


def test_a_second_ctrl_c_does_not_wait(make):
    engine = make("vllm")

    def press_twice(*_args):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with hook(engine.model.model.layers[1], press_twice), pytest.raises(KeyboardInterrupt):
        engine.generate([ids(100)], 50, ignore_eos=True)
    rests(engine)
    assert engine.cache.peek(ids(100)).tokens == 0


def test_callbacks_that_raise_do_no_harm(make):
    engine = make("vllm")
    seen = []

    def broken(step):
        seen.append(step)
        msg = "the widget is gone"
        raise ValueError(msg)

    engine.listeners.append(broken)
    with pytest.warns(RuntimeWarning, match="ValueError: the widget is gone"):
        (result,) = engine.generate([ids(30)], 3, ignore_eos=True, progress=broken)
    assert result.outcome == "length"
    assert len(seen) == 6


# ------------------------------------------------------------------ stops
@pytest.mark.parametrize("cache", CACHES)
def test_a_stop_event_ends_what_runs(make, cache):
    engine = make(cache)
    stop = threading.Event()
    results = engine.generate(
        [ids(50, i) for i in range(3)], 500, ignore_eos=True, stop=stop, progress=lambda step: step.index == 4 and stop.set()
    )
    assert [(r.outcome, len(r.output_ids)) for r in results] == [("abort", 5)] * 3
    rests(engine)
    assert engine.generate([ids(50)], 2)[0].outcome == "length"


def test_cancel_from_another_thread_ends_one_request(make):
    engine = make("vllm")
    started = threading.Event()
    results = []
    worker = threading.Thread(
        target=lambda: results.extend(
            engine.generate([ids(50), ids(50, 1)], 60, ignore_eos=True, progress=lambda step: step.index == 3 and started.set())
        )
    )
    engine.listeners.append(lambda _step: time.sleep(0.001))
    worker.start()
    assert started.wait(60)
    engine.cancel("1")
    worker.join(60)
    assert (results[0].outcome, results[0].reason) == ("abort", "cancelled")
    assert 4 <= len(results[0].output_ids) < 60
    assert len(results[1].output_ids) == 60


def test_cancel_from_inside_a_step_waits_for_its_end(make):
    engine = make("sglang")
    with hook(engine.model, lambda *_: engine.cancel("1")):
        first, second = engine.generate([ids(50), ids(50, 1)], 4, ignore_eos=True)
    assert (first.outcome, len(first.output_ids)) == ("abort", 1)
    assert second.outcome == "length"


def test_cancel_of_what_waits_is_immediate(make):
    engine = make("vllm")
    id = engine.submit(ids(50))
    engine.cancel(id)
    assert engine.result(id).outcome == "abort"
    assert engine.step() is None
    engine.cancel("nobody")


def test_threads_may_submit_while_it_answers(make):
    engine = make("vllm")
    submitted = []
    many = threading.Thread(target=lambda: submitted.extend(engine.submit(ids(20, i), 3, ignore_eos=True) for i in range(40)))
    many.start()
    engine.generate([ids(50)], 60, ignore_eos=True)
    many.join(60)
    while engine.step() is not None:
        pass
    assert [engine.result(id).outcome for id in submitted] == ["length"] * 40


def test_a_second_generate_meanwhile_gets_words(make):
    engine = make("vllm")
    errors = []

    def again(_step):
        if not errors:
            try:
                engine.generate([ids(10)])
            except EngineError as error:
                errors.append(str(error))

    (result,) = engine.generate([ids(30)], 4, ignore_eos=True, progress=again)
    assert errors == ["this engine is answering already: wait for that generate() to end, or stop it, before the next one."]
    assert result.outcome == "length"


def test_reset_empties_cache_and_trace_but_not_under_way(make):
    engine = make("vllm")
    engine.generate([ids(50)], 2)
    id = engine.submit(ids(50))
    with pytest.raises(EngineError, match="cannot reset while 1 requests"):
        engine.reset()
    engine.cancel(id)
    engine.reset()
    assert engine.cache.peek(ids(50)).tokens == 0
    assert (engine.trace.records, engine.trace.steps, engine.trace.events) == ({}, [], [])
    assert engine.generate([ids(50)], 2)[0].id == "1"


def test_a_reset_loses_nothing_that_another_thread_submits(make):
    engine = make("vllm")
    submitted, resets = [], 0
    many = threading.Thread(target=lambda: submitted.extend(engine.submit(ids(5, i), 1) for i in range(200)))
    many.start()
    while many.is_alive():
        try:
            engine.reset()
            resets += 1
        except EngineError:
            while engine.step() is not None:
                pass
    many.join(60)
    while engine.step() is not None:
        pass
    assert len(submitted) == 200
    assert all(record.outcome for record in engine.trace.records.values()), "nobody is left waiting"
    assert not engine._inbox
    engine.reset()


def test_a_request_may_bring_its_own_id(make):
    engine = make("vllm")
    assert [r.id for r in engine.generate([Request(ids(9), id="2"), ids(9), Request(ids(9), id="mine"), ids(9)], 1)] == [
        "2",
        "1",
        "mine",
        "3",
    ]
    for again in ([Request(ids(9), id="mine")], [Request(ids(9), id="new"), Request(ids(9), id="new")]):
        with pytest.raises(EngineError, match="is in the trace already"):
            engine.generate(again, 1)
    assert engine.step() is None, "nothing of the refused ones was queued"
    assert list(engine.trace.records) == ["2", "1", "mine", "3"]
    for bad in ("", 7):
        with pytest.raises(EngineError, match="id is a text"):
            Request(ids(9), id=bad)


# ------------------------------------------------------------------ bad input
@pytest.mark.parametrize("bad", [{"salt": 5}, {"stop_token_ids": 7}])
@pytest.mark.parametrize("cache", ["vllm", "sglang"])
def test_a_request_that_cannot_be_queued_fails_alone(make, cache, bad):
    engine = make(cache)
    good, failed = engine.generate([Request(ids(50)), Request(ids(50, 1), **bad)], 2)
    assert (good.outcome, failed.outcome) == ("length", "failed")
    assert failed.reason.startswith("the request cannot be queued")
    rests(engine)
    engine.reset()


def test_a_prompt_that_cannot_be_made_leaves_no_other_behind(make):
    engine = make("vllm")
    with pytest.raises(RequestError, match="prompt 1"):
        engine.generate([Request(ids(50)), Request([])], 2)
    for none in (5, None, (x for x in ids(3))):
        with pytest.raises(RequestError, match="give a list of prompts"):
            engine.generate(none, 2)
    assert engine.step() is None
    engine.reset()


@pytest.mark.parametrize(
    ("prompt", "new", "words"),
    [
        ([], 4, "empty"),
        (np.array([], dtype=np.int64), 4, "empty"),
        ([1, 2, 512], 4, "token id 512 is outside the vocabulary of 512"),
        ([1, -1], 4, "token id -1 is outside"),
        ([1.5, 2.0], 4, "list of token ids"),
        ([[1, 2], [3]], 4, "list of token ids"),
        (7, 4, "list of token ids"),
        ([1, 2], 0, "max_new_tokens is 0"),
        ([1, 2], -3, "max_new_tokens is -3"),
        ([1, 2], 2.5, "max_new_tokens is 2.5"),
        ("a text", 4, "no tokenizer"),
        ([{"role": "user", "content": "hi"}], 4, "no tokenizer"),
        (list(range(200)), 4, "200 tokens long and the pool has room for 160"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_changes(make, prompt, new, words):
    engine = make("vllm", 160)
    engine.generate([ids(50)], 2)
    before = engine.cache.snapshot()
    with pytest.raises(RequestError, match=words) as refusal:
        engine.generate([ids(20), Request(prompt, max_new_tokens=new)])
    assert isinstance(refusal.value, ValueError)
    assert str(refusal.value).startswith("prompt 1: ")
    assert engine.cache.snapshot() == before
    assert engine.trace.records.keys() == {"1"}
    assert engine.generate([ids(50)], 2)[0].id == "2"


@pytest.mark.parametrize("prompts", ["text", ids(10), [{"role": "user", "content": "hi"}], Request(ids(10)), Prompt((1, 2))])
def test_one_prompt_instead_of_a_list_gets_words(make, prompts):
    with pytest.raises(RequestError, match="put it into brackets"):
        make("vllm").generate(prompts)


def test_longer_than_the_models_positions(make):
    engine = make("vllm")
    with pytest.raises(RequestError, match="2,049 tokens long and the model has positions for 2,048"):
        engine.generate([ids(2049)])
    (result,) = engine.generate([ids(2040)], 100, ignore_eos=True)
    assert (result.outcome, len(result.output_ids)) == ("length", 8)
    assert result.reason == "the model's 2,048 positions are used up"


def test_sampling_values_that_mean_nothing_get_words():
    bad = [("temperature", -1.0), ("temperature", "hot"), ("top_p", 0.0), ("top_p", None), ("top_k", 1.5), ("top_k", True)]
    for name, value in [*bad, ("seed", "x"), ("seed", 2**64)]:
        with pytest.raises(RequestError, match=f"sampling: {name} is"):
            Request([1], sampling={name: value})
    with pytest.raises(RequestError, match="'heat' is unknown"):
        Request([1], sampling={"heat": 1})


@pytest.mark.parametrize("cache", CACHES)
def test_what_outgrows_the_pool_ends_in_words_and_the_rest_goes_on(make, cache):
    engine = make(cache, 160)
    big, small = engine.generate([Request(ids(150), max_new_tokens=100), Request(ids(20, 1), max_new_tokens=3)], ignore_eos=True)
    assert big.outcome == ("refused" if cache == "sglang" else "abort")
    assert "do not fit into the pool of 160 tokens" in big.reason
    assert len(big.output_ids) == (0 if cache == "sglang" else 11)
    assert small.outcome == "length"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache": "vllm", "block_size": 0}, "block_size is 0"),
        ({"cache": "vllm", "block_size": 7}, "block_size 7 does not divide a pool of 4,096 tokens"),
        ({"cache": "sglang", "page_size": 7}, "page_size 7 does not divide"),
        ({"cache": "sglang", "page_size": True}, "page_size is True"),
        ({"cache": "lru"}, "there is no cache 'lru'"),
        ({"cache": "vllm", "page_size": 16}, "page_size"),
        ({"cache": "sglang", "policy": "best"}, "best"),
        ({"cache": "vllm", "num_tokens": 0}, "num_tokens is 0"),
        ({"cache": "vllm", "max_batch_tokens": 8}, "max_batch_tokens is 8"),
        ({"cache": lambda _tokens: BlockCache()}, "unlimited"),
        ({"cache": RadixCache, "page_size": 4}, "made by a factory"),
        ({"num_tokens": 16 * 10**12}, r"needs 12,288,000\.0 GB .768 bytes a token. and .* are free on cpu"),
        ({"dtype": "float32"}, "loaded already"),
    ],
)
def test_an_engine_that_cannot_be_gets_words(loaded, options, words):
    with pytest.raises(EngineError, match=words):
        Engine(loaded, **{"num_tokens": 4096, **options})


def test_a_factory_makes_the_cache(make):
    engine = make(lambda tokens: RadixCache(tokens, 4, policy="lfu"))
    assert (engine.cache.unit, engine.cache.num_tokens, engine.cache.eviction) == (4, 4096, "lfu")
    engine.generate([ids(41)], 1)
    assert engine.generate([ids(41)], 1)[0].cached_tokens == 40
    assert isinstance(make("none").cache, PlainCache)
    assert make("vllm", block_size=32).cache.num_blocks == 4096 // 32 + 1


def test_a_pool_of_no_given_size(loaded, monkeypatch):
    assert Engine(loaded, num_tokens=None).cache.num_tokens == 16_384
    monkeypatch.setattr("kvlab.engine.pool.free_memory", lambda _device: 768 * 2 * 100)  # half of it holds a hundred tokens
    assert Engine(loaded, num_tokens=None).cache.num_tokens == 96


# ------------------------------------------------------------------ what it is made of
def test_pool_memory_goes_with_the_engine(loaded):
    engine = Engine(loaded, "vllm", num_tokens=256)
    engine.generate([ids(20)], 2)
    pool = weakref.ref(engine.pool)
    del engine
    gc.collect()
    assert pool() is None


def test_poison_shows_a_read_of_what_was_never_written(make):
    engine = make("vllm")
    engine.generate([ids(100)], 1)
    slots = engine.cache.peek(ids(100)).slots
    engine.pool.poison(slots[:1].tolist())
    (result,) = engine.generate([ids(100)], 1)
    assert result.outcome == "failed"
    assert "not finite" in result.reason
    engine.reset()


def test_texts_show_as_typed(make):
    text = "<script>alert(1)</script> <br> $x$ 推 😀 & done"
    result = Result("r1", text, [1], 10, 5, 0.5, 0.25, 0.01, "failed", "diverged", "<b>why</b>")
    page = result._repr_html_()
    assert "<script" not in page
    assert "<br>" not in page
    assert "<b>why" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &lt;br&gt; $x$ 推 😀 &amp; done" in page
    assert "5 of 10" in page
    assert text in repr(result)
    engine = make("vllm")
    assert "4,096 tokens" in engine._repr_html_()
    assert "4,096 tokens" in repr(engine)
