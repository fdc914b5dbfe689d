"""The lab driven from Python, on a tiny model: what a click does, what is said, what is shown."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvlab.prompts import Part
from kvlab.situations import TIMESTAMPS, Layout, Writer
from kvlab.widgets import words
from kvlab.widgets.lab import VIEWS, Lab

SHARED, QUESTION = 1000, 40


@pytest.fixture(scope="module")
def ready():
    """One lab for the whole file: every test starts it over."""
    lab = Lab("tiny-llama")
    assert lab.wait(120)
    assert lab.phase == "ready", lab.message
    return lab


@pytest.fixture
def lab(ready):
    ready.wait(120)
    for name, value in {
        "timestamp": "none",
        "shared": SHARED,
        "question": QUESTION,
        "answer": 3,
        "block_size": 16,
        "page_size": 1,
    }.items():
        ready.controls[name].field.value = value
    ready.start_over()
    return ready


def hits(lab):
    return {policy: [r.cached_tokens for r in side.records] for policy, side in lab.scene.sides.items()}


def run(lab):
    lab.run()
    assert lab.wait(120)
    return hits(lab)


@pytest.mark.parametrize(
    ("timestamp", "vllm", "sglang"), [("none", 992, 1000), ("before", 0, 0), ("between", 992, 1000), ("after", 992, 1000)]
)
def test_the_four_places_of_a_timestamp(lab, timestamp, vllm, sglang):
    lab.controls["timestamp"].field.value = timestamp
    assert run(lab) == {"vllm": [0, vllm], "sglang": [0, sglang]}
    result = lab._sentence.value
    assert f"vLLM reuses {vllm:,} of" in result
    assert f"SGLang {sglang:,}" in result
    assert lab.message == words.DONE


def test_a_new_layout_sends_two_requests_and_a_known_one_another_one(lab):
    assert len(run(lab)["vllm"]) == 2
    assert len(run(lab)["vllm"]) == 3
    lab.controls["timestamp"].field.value = "between"
    # the shared part is cached already: the first request of the new layout reuses it too
    assert run(lab) == {"vllm": [0, 992, 992, 992, 992], "sglang": [0, 1000, 1000, 1000, 1000]}


def test_block_and_page_size_change_what_is_reused(lab):
    lab.controls["block_size"].field.value = 64
    lab.controls["page_size"].field.value = 256
    assert run(lab) == {"vllm": [0, 960], "sglang": [0, 768]}


def test_other_unit_sizes_begin_with_empty_caches_and_send_two_requests_again(lab):
    run(lab)
    lab.controls["block_size"].field.value = 64
    assert run(lab) == {"vllm": [0, 960], "sglang": [0, 1000]}
    assert run(lab) == {"vllm": [0, 960, 960], "sglang": [0, 1000, 1000]}, "no prompt is sent twice"


def test_every_chart_is_drawn_anew_by_a_run(lab):
    before = {name: chart.revision for name, chart in lab.charts.items()}
    run(lab)
    assert set(before) == {view.name for view in VIEWS}
    assert all(chart.revision > before[name] and not chart.message for name, chart in lab.charts.items())


def test_start_over_empties_both_caches(lab):
    run(lab)
    lab.start_over()
    assert hits(lab) == {"vllm": [], "sglang": []}
    assert run(lab) == {"vllm": [0, 992], "sglang": [0, 1000]}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("block_size", 0, "Block size (vLLM) is 0"),
        ("block_size", 7, "7"),
        ("page_size", -1, "Page size (SGLang) is -1"),
        ("shared", 0, "Shared part (tokens) is 0"),
        ("shared", 30_000, "about 30,043 tokens, the pool has 4,096"),
        ("shared", 4_052, "about 4,097 tokens, the pool has 4,096"),
        ("answer", 0, "Answer (tokens) is 0"),
    ],
)
def test_what_cannot_be_is_said_in_words_and_changes_nothing(lab, name, value, said):
    kept = run(lab)
    lab.controls[name].field.value = value
    assert run(lab) == kept
    assert lab.trouble
    assert said in lab.message
    assert "Traceback" not in lab.message
    lab.controls[name].field.value = {"block_size": 16, "page_size": 1, "shared": SHARED, "answer": 3}[name]
    assert run(lab) == {policy: [*seen, seen[-1]] for policy, seen in kept.items()}, "the caches were as they had been"


def test_ten_clicks_are_one_run(lab):
    lab.controls["answer"].field.value = 30
    for _ in range(10):
        lab.run()
    assert lab.phase == "working"
    assert lab.message == words.BUSY
    lab.start_over()  # refused as well
    assert lab.wait(120)
    assert [len(seen) for seen in hits(lab).values()] == [2, 2]


def test_stop_ends_the_request_and_frees_its_blocks(lab):
    lab.controls["answer"].field.value = 900
    stopped = []
    lab.source.engines["vllm"].listeners.append(lambda _step: stopped or stopped.append(lab.stop()))
    try:
        lab.run()
        assert lab.wait(120)
    finally:
        lab.source.engines["vllm"].listeners.clear()
    assert lab.message == words.STOPPED
    assert lab.scene.sides["vllm"].records[-1].outcome == "abort"
    for engine in lab.source.engines.values():
        assert engine.cache.sizes().protected == 0
        engine.cache.check_integrity()
    lab.controls["answer"].field.value = 3
    assert hits(lab)["vllm"] == [0]
    assert "SGLang" not in lab._sentence.value, "it was not sent this request"
    assert run(lab)["vllm"][-1] == 992
    last = [side.records[-1] for side in lab.scene.sides.values()]
    assert {(record.id, tuple(record.tokens[:1040])) for record in last} == {(last[0].id, tuple(last[0].tokens[:1040]))}


def test_an_error_without_words_gets_some(lab, monkeypatch):
    def run_out(*_):
        raise MemoryError

    monkeypatch.setattr(lab.source, "run", run_out)
    lab.run()
    assert lab.wait(60)
    assert (lab.phase, lab.trouble) == ("ready", True)
    assert lab.message.startswith("The memory ended")


def test_a_model_that_cannot_be_had_is_said_and_can_be_tried_again(tmp_path):
    lab = Lab(str(tmp_path / "nothing"))
    assert lab.wait(60)
    assert lab.phase == "failed"
    assert lab.trouble
    assert "nothing" in lab.message
    assert lab.run_button.description == words.RETRY
    assert all(chart.revision for chart in lab.charts.values()), "the recorded run stays on screen"
    lab.source.model = "tiny-llama"
    lab.run()
    assert lab.wait(60)
    assert lab.phase == "ready"


def test_a_picture_that_cannot_be_drawn_says_so_and_the_others_stand(lab, monkeypatch):
    from kvlab.views import block_map

    def broken(*_, **__):
        msg = "out of ink"
        raise ValueError(msg)

    monkeypatch.setattr(block_map, "block_map", broken)
    run(lab)
    assert "out of ink" in lab.charts["blocks"].message
    assert not lab.charts["tree"].message


def test_first_pictures_load_no_torch():
    code = (
        "import sys, kvlab.widgets.lab as lab, kvlab.widgets.scene as scene\n"
        "scene.LiveSource.load = lambda self, progress: None\n"
        "made = lab.Lab()\n"
        "assert made.scene.sides['vllm'].records[-1].cached_tokens == 992\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'loaded too much'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------ the prompts behind it
@pytest.mark.parametrize("timestamp", TIMESTAMPS)
def test_prompts_have_the_lengths_asked_for_and_differ_where_they_should(timestamp):
    writer = Writer(None, 50_000)
    one, two = (writer.prompt(Layout(timestamp, 100, 20), n) for n in (0, 1))
    lengths = {p.source: p.stop - p.start for p in one.parts}
    assert (lengths["system"], lengths["question"]) == (100, 20)
    common = next(i for i, (a, b) in enumerate(zip(one.ids, two.ids, strict=False)) if a != b)
    assert common == {"none": 100, "before": 0, "between": 100, "after": 100}[timestamp]


@pytest.mark.parametrize(("timestamp", "stands"), [("none", 1), ("before", 0)])
def test_the_first_38_requests_begin_differently(embedded, timestamp, stands):
    for writer in (Writer(embedded.tokenizer, embedded.vocab_size), Writer(None, 50_000)):
        prompts = [writer.prompt(Layout(timestamp, 20, 20), number) for number in range(38)]
        assert len({len(prompt) for prompt in prompts}) == 1
        assert len({prompt.ids[prompt.parts[stands].start] for prompt in prompts}) == 38


def test_a_tokenizer_that_makes_no_tokens_is_refused():
    class Mute:
        def encode(self, *_, **__):
            return []

    with pytest.raises(ValueError, match="makes no tokens of English text"):
        Writer(Mute(), 100)


def test_a_part_of_a_prompt_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="comes from 'nowhere': choose one of system"):
        Part("nowhere", 0, 4)
    with pytest.raises(ValueError, match="from token 5 to token 4"):
        Part("system", 5, 4)


def test_a_layout_that_cannot_be_is_refused():
    writer = Writer(None, 50_000)
    with pytest.raises(ValueError, match="choose one of before, between"):
        writer.prompt(Layout("sideways"), 0)
    with pytest.raises(ValueError, match="at least 1"):
        writer.prompt(Layout("none", 0, 40), 0)
