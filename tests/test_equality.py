"""The engine computes what transformers computes: fresh, resumed after a hit, in chunks, beside others, after preemption."""

from __future__ import annotations

import inspect
import threading
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvlab.engine.engine import Engine
from kvlab.engine.models import load_model

MAIN = ("tiny-llama", "tiny-qwen3", "tiny-gemma", "tiny-gemma2", "tiny-gemma3")
MODELS = (*MAIN, "tiny-qwen2", "tiny-mistral-window", "tiny-gpt2")
CACHES = ("vllm", "sglang", "none")
HITS = ("vllm", "sglang")


@cache
def tiny(name, dtype="float32"):
    if not name.endswith("-window"):
        return load_model(name, device="cpu", dtype=dtype)
    loaded = load_model(name.removesuffix("-window"), device="cpu", dtype=dtype)
    config = type(loaded.model.config)(**{**loaded.model.config.to_dict(), "sliding_window": 24})
    model = type(loaded.model)(config).to(loaded.dtype).eval()
    model.load_state_dict(loaded.model.state_dict())
    return type(loaded)(**{**vars(loaded), "model": model})


def ids(count, seed=0, vocab=512):
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


@contextmanager
def logits_of(model):
    """Collect what the model gives in each forward, shape (rows, vocabulary)."""
    seen = []
    handle = model.register_forward_hook(lambda *args: seen.append(args[2].logits[0].float()))
    try:
        yield seen
    finally:
        handle.remove()


def plain(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, -1].float()


def greedy(model, tokens, new):
    """What transformers' generate() answers; the tiny models have no end tokens."""
    return _greedy(model, tuple(tokens), new)


@cache
def _greedy(model, tokens, new):
    prompt = torch.tensor([tokens])
    with torch.inference_mode():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
    return out[0, len(tokens) :].tolist()


def close(ours, theirs):
    assert torch.isfinite(ours).all()
    assert float((ours - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())


# ------------------------------------------------------------------ logits
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", CACHES)
def test_fresh_prefill_gives_transformers_own_logits(name, policy):
    loaded = tiny(name)
    engine = Engine(loaded, policy, num_tokens=1024, poison=True)
    prompts = [ids(70, 1), ids(33, 2), ids(1, 3)]
    with logits_of(loaded.model) as seen:
        engine.generate(prompts, 1, ignore_eos=True)
    assert len(seen) == 1
    for row, prompt in zip(seen[0], prompts, strict=True):
        close(row, plain(loaded.model, prompt))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("policy", "hit"), [("vllm", 96), ("sglang", 100)])
def test_prefill_resumed_after_a_hit_differs_by_rounding_only(name, policy, hit):
    loaded = tiny(name)
    engine = Engine(loaded, policy, num_tokens=1024, poison=True)
    prompt = [*ids(100, 4), *ids(17, 5)]
    engine.generate([prompt[:100] + ids(9, 6)], 3, ignore_eos=True)
    with logits_of(loaded.model) as seen:
        (result,) = engine.generate([prompt], 1, ignore_eos=True)
    assert result.cached_tokens == hit
    close(seen[0][-1], plain(loaded.model, prompt))


@pytest.mark.parametrize("name", MODELS)
def test_chunked_prefill_and_decode_beside_others_give_the_same_logits(name):
    loaded = tiny(name)
    engine = Engine(loaded, "vllm", num_tokens=1024, max_batch_tokens=32, poison=True)
    engine.submit(ids(20, 7), 40, ignore_eos=True)  # decodes all along
    prompt = ids(90, 8)
    rows = []
    with logits_of(loaded.model) as seen:
        id = engine.submit(prompt, 4, ignore_eos=True)
        while engine.result(id) is None:
            step = engine.step()
            if id in step.sampled:
                rows.append(seen[-1][[*step.decoded, *step.prefilled].index(id)])
    assert len(rows) == 4
    output = engine.trace.records[id].tokens[90:]
    for number, row in enumerate(rows):
        close(row, plain(loaded.model, prompt + output[:number]))


def prefilled_in_two(model, prompt, cut):
    """The last logits by transformers with its own cache, the prompt in two calls."""
    own = DynamicCache(config=model.config)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # its older name
    with torch.inference_mode():
        model(torch.tensor([prompt[:cut]]), use_cache=True, **{keyword: own})
        return model(torch.tensor([prompt[cut:]]), use_cache=True, **{keyword: own}).logits[0, -1].float()


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize(("policy", "options"), [("vllm", {"block_size": 1}), ("sglang", {})])
def test_bf16_resumed_prefill_is_as_near_as_transformers_own_cache(name, policy, options):
    """At most twice what transformers shows itself between one prefill call and two with its own cache."""
    loaded = tiny(name, "bfloat16")
    engine = Engine(loaded, policy, num_tokens=4096, poison=True, **options)
    ours = theirs = 0.0
    for seed in range(8):
        prompt = ids(131 + 17 * seed, 100 + seed)
        whole = plain(loaded.model, prompt)
        engine.generate([prompt[: 90 + 7 * seed]], 1, ignore_eos=True)
        with logits_of(loaded.model) as seen:
            (result,) = engine.generate([prompt], 1, ignore_eos=True)
        assert result.cached_tokens >= 80
        resumed = prefilled_in_two(loaded.model, prompt, result.cached_tokens)
        ours = max(ours, float((seen[0][-1] - whole).abs().max()))
        theirs = max(theirs, float((resumed - whole).abs().max()))
    assert ours <= 2 * theirs


# ------------------------------------------------------------------ tokens
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", CACHES)
def test_greedy_tokens_equal_transformers_generate(name, policy):
    """Eight requests with a shared head, in chunks, from a pool so small that some have to give way."""
    loaded = tiny(name)
    options = {"page_size": 4} if policy == "sglang" else {"block_size": 4}
    engine = Engine(loaded, policy, num_tokens=288, max_batch_tokens=48, poison=True, **options)
    prompts = [ids(40, 9)[: 10 + 5 * (i % 6)] + ids(3 + i, 20 + i) for i in range(8)]
    for _ in range(2):  # the second time they hit what the first left behind
        results = engine.generate(prompts, 20, ignore_eos=True)
        assert [r.outcome for r in results] == ["length"] * 8
        for prompt, result in zip(prompts, results, strict=True):
            assert result.output_ids == greedy(loaded.model, prompt, 20)
    if policy != "none":
        assert all(r.cached_tokens for r in results)
    engine.cache.check_integrity()


def test_preempted_and_retracted_requests_answer_the_same():
    loaded = tiny("tiny-llama")
    prompts = [ids(30, 40 + i) for i in range(5)]
    for policy in CACHES:
        engine = Engine(loaded, policy, num_tokens=176, poison=True)
        if policy == "sglang":
            engine.scheduler.ratio = engine.scheduler._start = 0.0  # admit whom it cannot hold to the end
        submitted = []
        for prompt in prompts:
            submitted.append(engine.submit(prompt, 30))
            engine.step()
        while engine.step() is not None:
            pass
        results = [engine.result(id) for id in submitted]
        assert [r.output_ids for r in results] == [greedy(loaded.model, p, 30) for p in prompts]
        preempted = [e for e in engine.trace.events if type(e).__name__ == "Released" and e.why == "preempt"]
        assert preempted, policy


@pytest.mark.parametrize("policy", HITS)
def test_embedded_model_answers_as_transformers_does(embedded, policy):
    if embedded.dtype is not torch.float32:
        embedded = load_model(device="cpu", dtype="float32")
    engine = Engine(embedded, policy, num_tokens=2048)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    encoded = embedded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    first, again = engine.generate([messages])[0], engine.generate([encoded])[0]
    assert first.text == again.text == "The capital of France is Paris."
    assert first.outcome == again.outcome == "stop"
    assert again.cached_tokens >= len(encoded) // 16 * 16 > 0
    assert first.output_ids == greedy(embedded.model, encoded, 32)
    prompt = ids(120, 50, embedded.vocab_size)
    engine.generate([prompt[:100]], 1, ignore_eos=True)
    with logits_of(embedded.model) as seen:
        (result,) = engine.generate([prompt], 8)
    assert result.cached_tokens >= 96
    close(seen[0][-1], plain(embedded.model, prompt))
    assert result.output_ids == greedy(embedded.model, prompt, 8)


# ------------------------------------------------------------------ the model stays as it was
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma2"])
def test_a_normal_call_of_the_model_is_untouched(name):
    loaded = tiny(name)
    before, attention = plain(loaded.model, ids(50)), loaded.model.config._attn_implementation
    engine = Engine(loaded, "vllm", num_tokens=1024)
    engine.generate([ids(60)], 4)
    assert engine.model is loaded.model
    assert loaded.model.config._attn_implementation == attention
    assert torch.equal(plain(engine.model, ids(50)), before)


def test_somebody_else_may_call_the_model_during_a_step():
    loaded = tiny("tiny-llama")
    engine = Engine(loaded, "vllm", num_tokens=1024)
    mine = threading.get_ident()
    batch = torch.tensor([ids(50), [0] * 20 + ids(30, 1)])
    padding = torch.ones_like(batch)
    padding[1, :20] = 0

    def call():
        with torch.inference_mode():
            return loaded.model(batch, attention_mask=padding).logits[:, -1]

    before, answers = call(), []

    def meanwhile(*_args):
        if threading.get_ident() == mine:
            other = threading.Thread(target=lambda: answers.append(call()))
            other.start()
            other.join()

    handle = loaded.model.model.layers[0].register_forward_hook(meanwhile)
    (result,) = engine.generate([ids(60)], 3, ignore_eos=True)
    handle.remove()
    assert len(answers) == 3
    assert all(torch.allclose(answer, before, rtol=0, atol=1e-5) for answer in answers)
    assert result.output_ids == greedy(loaded.model, ids(60), 3)


def test_two_engines_share_one_model_side_by_side():
    loaded = tiny("tiny-qwen3")
    engines = [Engine(loaded, policy, num_tokens=1024, poison=True) for policy in HITS]
    prompts = [ids(50, 60 + i) for i in range(4)]
    results = {}

    def answer(engine):
        results[engine.cache.policy] = engine.generate(prompts, 12, ignore_eos=True)

    threads = [threading.Thread(target=answer, args=[engine]) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = [greedy(loaded.model, p, 12) for p in prompts]
    assert [r.output_ids for r in results["vllm"]] == [r.output_ids for r in results["sglang"]] == want
