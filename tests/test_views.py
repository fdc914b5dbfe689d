"""The pictures: colours can be told apart, numbers are the records', nothing is cut off, overlaps or is read as markup."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import random
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import browser
import numpy as np
import plotly
import pytest

from kvlab import BlockCache, PlainCache, RadixCache, Space
from kvlab.cache import events as ev
from kvlab.cache.state import ROOT
from kvlab.prompts import SOURCES, Part
from kvlab.trace.recorder import Record, Step
from kvlab.views import block_map, details, ownership, radix_tree, ribbon, summary, tables, text, timeline
from kvlab.views.legend import legend
from kvlab.views.palette import DARK, LIGHT, blend, contrast, palette, rgb

SYSTEM = list(range(1000))
PARTS = (Part("system", 0, 1000), Part("question", 1000, 1040))
NASTY = [
    "<script>alert(1)</script>",
    "a<br>b",
    "$x$",
    "$y$",
    " 😀",
    "推 (1 of 2)",
    "日本語",
    "&amp;",
    "%{x}",
    '"q"',
    "<b>",
    "\n",
    "\u202eevil",
]


def ask(cache, id, prompt, parts=(), *, answer=32, at=0.0, finish=True, space=None):
    """Send one request through a real cache; its record, as an engine would keep it."""
    more = {} if space is None else {"space": space}
    stopped = cache.peek(prompt, *more.values()).stopped
    started = cache.start(id, prompt, **more)
    assert started.ok
    output = [90_000 + 100 * int(id) + i for i in range(answer)]
    for token in output:
        cache.decode(id, token)
    if finish:
        cache.finish(id)
    prefill = 0.02 + 0.0006 * (len(prompt) - started.hit_tokens)
    times = {"submitted": at, "started": at, "first_token": at + prefill, "finished": at + prefill + 0.28}
    spent = {"prefill_seconds": prefill, "decode_seconds": 0.28, "outcome": "length" if finish else None}
    return Record(id, prompt + output, len(prompt), tuple(parts), started.hit_tokens, stopped, **times, **spent)


def question(i):
    return [50_000 + 100 * i + j for j in range(40)]


def three(cache):
    """The article's first situation, three times; the third request still runs."""
    return [ask(cache, str(i), SYSTEM + question(i), PARTS, at=2.0 * i, finish=i < 3) for i in (1, 2, 3)]


def crowd(cache, count=60, seed=1):
    """Conversations that branch from each other."""
    chance = random.Random(seed)
    records, known = [], []
    for i in range(1, count + 1):
        base, parts = SYSTEM[: chance.choice((64, 200, 400))], None
        if known and chance.random() < 0.5:
            base, parts = chance.choice(known)
        parts = parts or (Part("system", 0, len(base)),)
        new = [chance.randrange(10_000, 50_000) for _ in range(chance.randrange(10, 80))]
        prompt = base + new
        parts = (*parts, Part(chance.choice(("tools", "retrieved", "history", "question")), len(base), len(prompt)))
        record = ask(cache, str(i), prompt, parts, answer=chance.randrange(5, 40), at=float(i), finish=i < count)
        records.append(record)
        known.append((record.tokens, (*parts, Part("history", len(prompt), len(record.tokens)))))
    return records


def vllm(num_blocks=257):
    return BlockCache(num_blocks=num_blocks, block_size=16)


def sglang(num_tokens=4096, page_size=1, policy="lru"):
    return RadixCache(num_tokens=num_tokens, page_size=page_size, policy=policy)


# ------------------------------------------------------------------ colours
THEMES = pytest.mark.parametrize("theme", ["light", "dark"])

# What remains of linear RGB without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
}
LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
LAB = np.array(
    [
        [0.2104542553, 0.793617785, -0.004072047],
        [1.9779984951, -2.428592205, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.808675766],
    ]
)


def seen(colour, sight):
    """A colour as an eye sees it, in OKLab, where 0.02 is a difference that one just notices."""
    values = np.array(rgb(colour))
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return LAB @ np.cbrt(LMS @ np.clip(SIGHT[sight] @ linear, 0, 1))


@THEMES
def test_every_source_stands_out_from_the_background(theme):
    colours = palette(theme)
    assert list(colours.sources) == list(SOURCES)
    for source in (*SOURCES, None):
        assert contrast(colours.hue(source), colours.background) >= 3, source
    assert contrast(colours.evicted, colours.background) >= 3
    assert contrast(colours.prefill, colours.background) >= 3


@THEMES
@pytest.mark.parametrize("sight", SIGHT)
def test_any_two_sources_are_told_apart(theme, sight):
    colours = palette(theme)
    for a, b in itertools.combinations(SOURCES, 2):
        assert np.linalg.norm(seen(colours.hue(a), sight) - seen(colours.hue(b), sight)) >= 0.1, (a, b)


@THEMES
def test_every_text_can_be_read(theme):
    colours = palette(theme)
    for ground in (colours.background, colours.panel):
        assert contrast(colours.ink, ground) >= 7
        assert contrast(colours.mute, ground) >= 4.5
    for source in (*SOURCES, None):
        for fill in (colours.hue(source), colours.faded(source)):
            assert contrast(colours.on(fill), fill) >= 4.5, source
    assert contrast(colours.on(colours.prefill), colours.prefill) >= 4.5


@THEMES
def test_faded_lies_between_full_and_free(theme):
    colours = palette(theme)
    for source in SOURCES:
        full, faded = (contrast(c, colours.background) for c in (colours.hue(source), colours.faded(source)))
        assert 1.15 < faded < full, source


def test_contrast_is_wcags():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert blend("#000000", "#ffffff", 0.25) == "#bfbfbf"


def test_an_unknown_theme_is_refused_in_words():
    with pytest.raises(ValueError, match="'light' or 'dark'"):
        palette("solarized")


# ------------------------------------------------------------------ text
def test_show_makes_white_space_visible_and_hides_nothing():
    assert text.show(" a\n\tb") == "␣a⏎⇥b"
    assert text.visible("a\u202eb\u200bc\x00") == "a[U+202E]b[U+200B]c␀"
    assert text.visible("👩‍👧") == "👩‍👧", "an emoji of several code points stays one"


def test_text_is_cut_to_the_pixels_that_it_has():
    assert text.fit("system", 500, 12) == "system"
    short = text.fit("a system prompt", 50, 12)
    assert short.endswith("…")
    assert text.text_width(short, 12) <= 50
    assert text.fit("system", 3, 12) == ""
    assert text.text_width("日本", 12) > text.text_width("ab", 12)
    assert text.excerpt("0123456789", 5) == "01…89"


# ------------------------------------------------------------------ sentences
def reason(cache, *prompts, parts=PARTS):
    """The last of several requests, and why its match ended."""
    records = [ask(cache, str(i), list(p), parts, answer=4, at=float(i)) for i, p in enumerate(prompts, 1)]
    return records[-1], summary.why(records[-1], cache.unit, cache.policy, records)


def test_why_992_of_1040():
    record, why = reason(vllm(), SYSTEM + question(1), SYSTEM + question(2))
    assert summary.sentence(record, 0.65) == "992 of 1,040 reused, 48 computed, 48 ms instead of 0.65 s".replace(
        "48 ms", f"{record.prefill_seconds * 1000:.0f} ms"
    )
    assert why == "1,000 = 62 blocks of 16 and 8 left over; those 8 share a block with the question, which differs."


def test_the_numbers_are_the_records_own():
    record, why = reason(
        BlockCache(num_blocks=400, block_size=7), SYSTEM[:500] + question(1), SYSTEM[:500] + question(2), parts=()
    )
    assert record.cached_tokens == 497
    assert why.startswith("500 = 71 blocks of 7 and 3 left over; those 3 share a block")
    assert summary.sentence(replace(record, first_token=None)) == "497 of 540 reused, 43 computed"


@pytest.mark.parametrize(
    ("cache", "prompts", "hit", "said"),
    [
        (vllm, [SYSTEM], 0, "Nothing was cached yet"),
        (
            sglang,
            [SYSTEM + question(1), SYSTEM + question(2)],
            1000,
            "The first 1,000 tokens are equal; then comes the question, which differs",
        ),
        (vllm, [[7, *SYSTEM], [8, *SYSTEM]], 0, "The first token differs, and a block's key covers all that stands before it"),
        (sglang, [[7, *SYSTEM], [8, *SYSTEM]], 0, "The first token differs, and the tree is walked from the first token on"),
        (vllm, [SYSTEM, [*SYSTEM[:9], *question(1)]], 0, "Only the first 9 tokens are equal, less than one block of 16"),
        (vllm, [SYSTEM[:1000], SYSTEM[:1000]], 992, "1,000 = 62 blocks of 16 and 8 left over; those 8 do not fill a block"),
        (vllm, [[*SYSTEM, *range(8)]] * 2, 992, "the last token is always computed"),
        (sglang, [SYSTEM, SYSTEM], 999, "the last token is always computed"),
        (vllm, [SYSTEM[:9], SYSTEM[:9]], 0, "The prompt has only 9 tokens, less than one block of 16"),
        (vllm, [SYSTEM[:200], [*SYSTEM[:50], *question(1)]], 48, "50 = 3 blocks of 16 and 2 left over; those 2 share a block"),
        (lambda: PlainCache(num_tokens=4096, block_size=16), [SYSTEM, SYSTEM], 0, "nothing is kept for the next request"),
    ],
)
def test_why_a_match_ended(cache, prompts, hit, said):
    record, why = reason(cache(), *prompts)
    assert record.cached_tokens == hit
    assert said in why
    assert why.endswith(".")


def test_why_knows_what_it_cannot_know():
    cache = vllm()
    first = ask(cache, "1", SYSTEM + question(1), PARTS, at=0.0, space=Space(salt="a"))
    second = ask(cache, "2", SYSTEM + question(2), PARTS, at=5.0, space=Space(salt="b"))
    assert "another namespace" in summary.why(second, 16, "vllm", [first, second])
    assert summary.why(second, 16, "vllm") == "Nothing that begins like this prompt is cached."
    assert "What follows the first 992 tokens" in summary.why(replace(second, cached_tokens=992), 16, "vllm", [second])


def test_the_headline_says_both_policies():
    records = {"vllm": three(vllm())[-1], "sglang": three(sglang())[-1]}
    said = summary.headline(records, {"vllm": 0.65})
    assert said.startswith("Request 3: vLLM reuses 992 of 1,040 tokens, SGLang 1,000. Prefill takes ")
    assert "instead of 0.65 s in vLLM" in said
    assert "instead" not in said.split("in vLLM")[1], "nobody measured the other side"
    waits = Record("4", SYSTEM, 1000)
    assert "has not admitted it yet" in summary.headline({"vllm": waits})


def test_waiting_and_refused_requests_say_so():
    waits = Record("4", SYSTEM, 1000)
    assert "waiting" in summary.sentence(waits)
    refused = replace(waits, outcome="refused", reason="needs 2,000 slots, the pool has 1,024.")
    assert "needs 2,000 slots" in summary.sentence(refused)
    assert "needs 2,000 slots" in summary.why(refused, 16, "vllm")
    drawn = words(ribbon.prompt_ribbon([waits, refused], 16, policy="vllm"))
    assert any("waiting" in w for w in drawn)
    assert any("needs 2,000 slots" in w for w in drawn)


# ------------------------------------------------------------------ figures
def words(fig):
    return [a.text for a in fig.layout.annotations]


def bars(fig, trace=0):
    """(from, to, data) of every bar."""
    b = [t for t in fig.data if t.type == "bar"][trace]
    return [(x, x + length, data) for x, length, data in zip(b.base, b.x, b.customdata, strict=True)]


def test_the_ribbon_draws_reused_full_and_computed_half():
    records = three(vllm())
    fig = ribbon.prompt_ribbon(records, 16, policy="vllm")
    (trace,) = [t for t in fig.data if t.type == "bar"]
    rows = list(zip(trace.base, trace.x, trace.y, trace.width, trace.marker.color, strict=True))
    second = [r for r in rows if round(r[2]) == 1]
    assert (0, 992, 1, 0.8, LIGHT.hue("system")) in second
    assert (992, 8, 1, 0.8, LIGHT.background) in second, "eight tokens of the system prompt have an outline"
    assert (992, 8, 1.2, 0.4, LIGHT.hue("system")) in second, "and are filled to the half"
    assert (1000, 40, 1.2, 0.4, LIGHT.hue("question")) in second
    assert (1040, 32, 1.2, 0.4, LIGHT.hue("generated")) in second
    lines = [s for s in fig.layout.shapes if s.type == "line"]
    assert [(s.x0, round((s.y0 + s.y1) / 2)) for s in lines] == [(992, 1), (992, 2)]
    assert "<b>992 reused</b>" in words(fig)
    assert fig.layout.xaxis.minor.dtick == 16, "the engine's unit is visible"


def test_a_label_hides_no_source():
    """A plate as high as the bar has the hue of all that lies under it; over several hues it leaves them to be seen."""
    records = crowd(sglang(), 40)
    fig = ribbon.prompt_ribbon(records, 1, policy="sglang", max_rows=40)
    per_token = 1010 / (fig.layout.xaxis.range[1])
    plates = {"one": 0, "several": 0}
    for note in fig.layout.annotations:
        if "reused</b>" in note.text and note.bgcolor:
            record = records[int(fig.layout.yaxis.ticktext[int(note.y)]) - 1]
            under = {record.source(i) for i in range(int(note.x - 60 / per_token), int(note.x))}
            plates["one" if len(under) == 1 else "several"] += 1
            if len(under) > 1:
                assert note.borderpad < 3
                assert note.bgcolor == LIGHT.background
    assert min(plates.values()) > 0


def test_the_ribbon_shows_how_far_a_running_request_is():
    cache = vllm()
    cache.add("1", SYSTEM)
    cache.take(["1"], 320)
    cache.commit(["1"])
    record = Record("1", SYSTEM, 1000, (Part("system", 0, 1000),), 0, "diverged", started=0.0)
    ends = {(a, b) for a, b, _ in bars(ribbon.prompt_ribbon([record], 16, policy="vllm", state=cache.snapshot()))}
    assert ends == {(0, 320), (320, 1000)}


def test_a_window_shows_every_token_and_its_text():
    records = three(vllm())
    start, stop = ribbon.window_around(992)
    typed = {"2": [f" t{i}" for i in range(len(records[1].tokens))]}
    fig = ribbon.prompt_ribbon(records, 16, policy="vllm", window=(start, stop), texts=typed)
    cells = {tuple(data) for _, _, data in bars(fig)}
    assert {("2", i, i + 1) for i in range(start, stop)} <= cells
    assert {text.show(f" t{i}") for i in range(start, stop)} <= set(words(fig))


def test_a_selected_block_is_framed_where_its_tokens_stand():
    cache = vllm()
    records = three(cache)
    state = cache.snapshot()
    fig = ribbon.prompt_ribbon(records, 16, policy="vllm", selected=ownership.holders(state, 62))
    assert [(s.x0, s.x1) for s in fig.layout.shapes if s.type == "rect"] == [(976, 992)]


def test_of_many_requests_the_last_are_drawn_and_the_rest_counted():
    records = crowd(vllm(), 30)
    fig = ribbon.prompt_ribbon(records, 16, policy="vllm", max_rows=5)
    assert fig.layout.yaxis.ticktext == ("26", "27", "28", "29", "30")
    assert "25 earlier not shown" in words(fig)[0]


@pytest.mark.parametrize(
    "cache", [vllm, sglang, lambda: sglang(page_size=16), lambda: PlainCache(num_tokens=4096, block_size=16)]
)
def test_ownership_agrees_with_a_slot_by_slot_count(cache):
    cache = cache()
    records = crowd(cache, 40)
    state, size = cache.snapshot(), cache.unit
    pool = ownership.units(state, records)
    sizes = cache.sizes()
    if size == 1:
        assert (pool.count(ownership.IDLE), pool.count(ownership.FREE)) == (sizes.evictable, sizes.free)
    for unit in range(1, state.num_units + 1):
        inside = range(unit * size, (unit + 1) * size)
        holding = [row for row in state.rows.values() if set(row.slots.tolist()) & set(inside)]
        assert pool.held[unit] == len(holding)
        if holding:
            assert pool.state[unit] == ownership.USED
            by_id = {r.id: r for r in records}
            row = holding[-1]
            votes = [by_id[row.id].source(i) for i, slot in enumerate(row.slots.tolist()) if slot in inside]
            assert votes.count(SOURCES[pool.source[unit]]) == max(map(votes.count, votes))
        elif pool.state[unit] == ownership.FREE:
            assert unit in state.queue
            assert unit not in state.blocks


def test_the_block_map_counts_three_states():
    cache = vllm()
    records = three(cache)
    state = cache.snapshot()
    idle = len(state.blocks.keys() - state.refs.keys())
    counts = f"{len(state.refs)} in use, {idle} cached idle, {256 - len(state.refs) - idle} free"
    assert counts in words(block_map.block_map(state, records))[0]
    assert counts in block_map.summary(state)
    rows = block_map.table(state, records)
    assert rows[1] == {
        "first": 1, "last": 62, "blocks": 62, "state": "in use", "source": "system", "computed now": False, "held by": 1
    }  # fmt: skip
    assert sum(row["blocks"] for row in rows) == 257


def test_a_hit_block_is_full_a_computed_one_half_an_idle_one_faded():
    cache = vllm()
    records = three(cache)
    state = cache.snapshot()
    trace = block_map.block_map(state, records).data[0]
    looks = {}
    for colour, height, data in zip(trace.marker.color, trace.width, trace.customdata, strict=True):
        looks.setdefault(data[0], []).append((colour, round(height, 2)))
    full = round(1 - block_map.GAP, 2)
    last = int(state.rows["3"].slots[1000]) // 16
    assert looks[62] == [(LIGHT.hue("system"), full)]
    assert looks[last] == [(LIGHT.background, full), (LIGHT.hue("system"), full / 2)], (
        "8 of system and 8 of question: the earlier"
    )
    assert looks[ownership.idle_order(state)[0]][0][0] in {LIGHT.faded(s) for s in SOURCES}
    assert looks[256] == [(LIGHT.background, full)]


def test_a_block_that_one_computed_and_another_found_is_full():
    cache = vllm()
    records = [ask(cache, str(i), SYSTEM + question(i), PARTS, finish=False) for i in (1, 2)]
    pool = ownership.units(cache.snapshot(), records)
    assert (pool.held[62], pool.held[63]) == (2, 1)
    assert (pool.computed[62], pool.computed[63]) == (False, True)


def test_evicted_and_selected_blocks_are_framed_and_crossed():
    cache = vllm()
    fig = block_map.block_map(cache.snapshot(), [], just_evicted=[7], selected=9, theme="dark")
    frames = fig.data[1]
    assert [list(d) for d in frames.customdata] == [[7, 7], [9, 9]]
    assert list(frames.marker.line.color) == [DARK.evicted, DARK.ink]
    assert min(frames.marker.line.width) >= 2
    assert fig.data[-1].marker.symbol == "x-thin", "not by colour alone"
    assert len(fig.data[-1].x) == 1


@pytest.mark.parametrize("blocks", [21, 257, 1000, 4001, 20_001, 1_000_001])
def test_a_pool_of_any_size_can_be_seen_and_sent(blocks):
    cache = vllm(blocks)
    records = crowd(cache, 2 if blocks < 100 else 50)
    for width in (500, 1010):
        fig = block_map.block_map(cache.snapshot(), records, just_evicted=range(1, blocks), width=width)
        assert len(fig.to_json()) < 400_000
        units = [tuple(d) for d in fig.data[0].customdata]
        assert max(last for _, last in units) == blocks - 1
        covered = sorted(set(units))
        assert all(b[0] == a[1] + 1 for a, b in itertools.pairwise(covered)), "each block in one cell"
        assert blocks < 1000 or len(covered) >= 200, "no coarser than it must be"
        plot = fig.layout.height - fig.layout.margin.t - fig.layout.margin.b
        assert plot / abs(fig.layout.yaxis.range[0]) >= 14, "cells of 14 pixels at least"
        assert fig.layout.height < 400


def test_slots_of_sglang_are_shown_the_same_way():
    cache = sglang()
    records = three(cache)
    fig = block_map.block_map(cache.snapshot(), records)
    assert "a cell is 16 slots" in words(fig)[0].replace("</span><br>", " ").replace("<br>", " ") or "16 slots" in words(fig)[0]
    assert len(fig.to_json()) < 400_000
    sizes = cache.sizes()
    used = 4096 - sizes.evictable - sizes.free
    assert f"{used:,} in use, {sizes.evictable:,} cached idle, {sizes.free:,} free" in block_map.summary(cache.snapshot())


def test_an_unlimited_pool_has_no_end_but_a_picture():
    cache = BlockCache(num_blocks=None, block_size=16)
    records = crowd(cache, 5)
    fig = block_map.block_map(cache.snapshot(), records)
    assert "no limit" in words(fig)[0]
    assert len(fig.to_json()) < 400_000


def test_idle_blocks_are_numbered_as_the_cache_takes_them():
    cache = vllm(101)
    crowd(cache, 12)
    for id in list(cache.snapshot().rows):
        cache.finish(id)
    expected = ownership.idle_order(cache.snapshot())
    cache.events()
    cache.start("big", list(range(60_000, 60_000 + 99 * 16)))
    taken = [b for e in cache.events() if isinstance(e, ev.Unkeyed) for b in e.blocks.tolist()]
    assert len(taken) > 20
    assert taken == expected[: len(taken)]


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority", "fifo", "mru", "filo"])
def test_nodes_are_numbered_as_the_cache_evicts_them(policy):
    cache = sglang(policy=policy)
    ask(cache, "1000", SYSTEM[:200], finish=False)  # what it reads is locked, with branches above that are not
    crowd(cache, 40)
    cache.finish("40")
    cache.events()
    expected = radix_tree.eviction_order(cache.snapshot())
    evicted = []
    while cache.evict(1):
        evicted += [e.node for e in cache.events() if isinstance(e, ev.Evicted)]
    assert len(evicted) > 20
    assert evicted == expected
    assert set(cache.snapshot().nodes) - {ROOT}, "what a running request reads stays"


def test_the_tree_draws_every_node_at_its_positions():
    cache = sglang()
    records = three(cache)
    state = cache.snapshot()
    fig = radix_tree.radix_tree(state, records)
    starts = {id: start for id, start in ownership.depths(state) if id != ROOT}
    drawn = {tuple(data) for _, _, data in bars(fig)}
    assert drawn == {(id, start, start + len(state.nodes[id].tokens)) for id, start in starts.items()}
    assert any("1,000 tokens · locked by 1 · used 3 times" in w for w in words(fig))
    assert {"evicted first", "evicted third", "locked by 1"} <= {w.split(",")[0] for w in words(fig)}
    assert len(radix_tree.table(state, records)) == len(state.nodes) - 1
    assert "6 nodes hold 1,184 tokens; 2 locked" in radix_tree.summary(state)


def test_a_large_tree_is_capped_and_the_rest_counted():
    cache = sglang(16_384)
    records = crowd(cache, 120)
    state = cache.snapshot()
    fig = radix_tree.radix_tree(state, records, max_leaves=6)
    drawn = {data[0] for _, _, data in bars(fig)}
    assert f"… {len(state.nodes) - 1 - len(drawn)} more nodes" in words(fig)
    leaves = [id for id in drawn if not state.nodes[id].children]
    assert len(leaves) == 6
    newest = max((n for n in state.nodes.values() if not n.children), key=lambda n: n.accessed)
    assert newest.id in drawn
    assert len(fig.to_json()) < 400_000


def test_the_timeline_leaves_idle_time_out_and_keeps_order():
    records = three(vllm())
    steps = [Step(i, "prefill", r.started, r.first_token, {r.id: 1}, ()) for i, r in enumerate(records)]
    fig = timeline.timeline(records, steps, {"2": 0.5})
    spans = bars(fig)
    assert fig.layout.xaxis.range[1] < 3, "six seconds passed, most of them idle"
    assert spans[1][1] - spans[0][0] == pytest.approx(records[0].finished - records[0].started)
    assert spans[0][1] < spans[2][0] < spans[4][0]
    (ghost,) = [s for s in fig.layout.shapes if s.type == "rect"]
    assert ghost.x1 - spans[3][1] == pytest.approx(0.5)
    assert any("0.50 s saved" in w for w in words(fig))


def test_estimated_times_are_hatched():
    record = replace(three(vllm())[0], estimated=True)
    fig = timeline.timeline([record])
    assert set(fig.data[0].marker.pattern.shape) == {"/"}
    assert "hatched: estimated" in words(fig)[0]
    mixed = Step(0, "mixed", 0, 1, {"2": 5}, ())
    assert list(timeline.timeline(three(vllm())[:2], [mixed]).data[0].marker.pattern.shape) == ["", "", "/", "/"]


def test_policies_stand_side_by_side_on_one_scale():
    by_policy = {"vllm": three(vllm()), "sglang": three(sglang())}
    fig = timeline.split_bars(by_policy, {"vllm": {"2": 0.5}})
    assert fig.layout.xaxis.range == fig.layout.xaxis2.range
    lengths = [b - a for a, b, _ in bars(fig, 1)]
    assert lengths == pytest.approx([x for r in by_policy["sglang"] for x in (r.prefill_seconds, r.decode_seconds)])
    rows = timeline.split_table(by_policy, {"vllm": {"2": 0.5}})
    assert [r["saved s"] for r in rows] == [None, 0.5, None, None, None, None]
    assert {r["policy"] for r in rows} == {"vLLM", "SGLang"}


def test_nothing_to_see_says_what_to_do():
    figures = [
        ribbon.prompt_ribbon([], 16, policy="vllm"),
        block_map.block_map(None, []),
        radix_tree.radix_tree(None, []),
        radix_tree.radix_tree(sglang().snapshot(), []),
        timeline.timeline([]),
        timeline.split_bars({"vllm": [], "sglang": []}),
    ]
    for fig in figures:
        assert any("Press Run" in w.replace("<br>", " ") for w in words(fig))
    assert "Press Run" in ribbon.summary([], 16, policy="vllm")
    assert tables.html([]) != ""


def test_details_of_a_block_and_a_node():
    cache, tree = vllm(), sglang()
    records, branches = three(cache), three(tree)
    typed = {"3": ["<b>", "$x$"] * 600}
    card = details.unit_details(cache.snapshot(), records, 62, typed)
    assert card.title == "Block 62 · tokens 976–991 · system"  # noqa: RUF001 - a range
    assert "in use by request 3" in card.facts
    assert card.facts[0].count("…") == 2, "its key and its parent's"
    assert "<b>$x$" in card.text
    assert "&lt;b&gt;$x$" in card.html()
    idle = ownership.idle_order(cache.snapshot())[1]
    assert details.unit_details(cache.snapshot(), records, idle).facts[1].startswith("cached idle, evicted second")
    assert details.unit_details(cache.snapshot(), records, 250).facts == ["free: nothing cached in it"]
    with pytest.raises(ValueError, match="block 300 does not exist"):
        details.unit_details(cache.snapshot(), records, 300)
    first = radix_tree.eviction_order(tree.snapshot())[0]
    assert "evicted first" in details.node_details(tree.snapshot(), branches, first).facts
    with pytest.raises(ValueError, match="node 999 is not in the tree"):
        details.node_details(tree.snapshot(), branches, 999)


# ------------------------------------------------------------------ in a real browser
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
# A page's MathJax, as far as plotly.js calls it: it notes what it is given.
MATHJAX = """window.MathJax = {version: '4.0.0', calls: [], config: {}, startup: {}, _: {
  output: {svg_ts: {SVG: class {}}},
  mathjax: {mathjax: {
    handleRetriesFor: async work => work(),
    document: () => ({convert: tex => { MathJax.calls.push(tex); return document.createElement('div'); }}),
  }},
}};"""
DRAW = """async ([figure, width]) => {
  const f = JSON.parse(figure), div = document.createElement('div');
  div.className = 'chart'; div.style.width = width + 'px'; div.style.height = f.layout.height + 'px';
  document.body.appendChild(div);
  await Plotly.newPlot(div, f.data, f.layout, {displayModeBar: false});
}"""
HOVERED = "wanted => [...document.querySelectorAll('.hoverlayer tspan')].some(t => t.textContent === wanted)"
PROBLEMS = """least => {
  const out = [];
  document.querySelectorAll('.chart').forEach((div, chart) => {
    const page = div.getBoundingClientRect();
    const texts = [...div.querySelectorAll('text')].filter(t => t.textContent.trim()).map(t => {
      const sizes = [t, ...t.querySelectorAll('tspan')].map(x => parseFloat(getComputedStyle(x).fontSize));
      return {text: t.textContent, box: t.getBoundingClientRect(), size: Math.min(...sizes)};
    });
    texts.forEach((a, i) => {
      const b = a.box;
      if (b.left < page.left - 1 || b.right > page.right + 1 || b.top < page.top - 1 || b.bottom > page.bottom + 1)
        out.push([chart, 'cut off', a.text]);
      if (a.size < least) out.push([chart, 'too small', a.text, a.size]);
      for (const {text, box} of texts.slice(0, i)) {
        const w = Math.min(b.right, box.right) - Math.max(b.left, box.left);
        const h = Math.min(b.bottom, box.bottom) - Math.max(b.top, box.top);
        if (w > 1 && h > 3) out.push([chart, 'overlap', a.text, text]);
      }
    });
  });
  return out;
}"""


@pytest.fixture(scope="module")
def browser_page():
    """A page with plotly.js from the installed package and a MathJax that notes what it is given; no network."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        program = play.chromium.launch(executable_path=browser.chromium(), args=browser.FLAGS)
        page = program.new_page()
        page.context.set_offline(True)
        page.set_content("<!doctype html><body style='margin:8px'></body>")
        page.add_script_tag(content=MATHJAX)
        page.add_script_tag(path=str(PLOTLY))
        yield page
        program.close()


@pytest.fixture
def page(browser_page):
    """The page, empty."""
    errors = []
    browser_page.set_viewport_size({"width": 1040, "height": 900})
    browser_page.evaluate("document.body.replaceChildren(); MathJax.calls.length = 0")
    browser_page.on(
        "console", said := lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
    )
    browser_page.on("pageerror", broke := lambda error: errors.append(str(error)))
    yield browser_page
    browser_page.remove_listener("console", said)
    browser_page.remove_listener("pageerror", broke)
    assert not errors


def draw(page, *figures):
    for fig, width in figures:
        page.evaluate(DRAW, [fig.to_json(), width])


@functools.cache
def world():
    """Caches that were used, and their requests."""
    caches = vllm(), sglang(), sglang(page_size=16), vllm(20_001), vllm(21), sglang(16_384)
    blocks, tree, paged, big, small, forest = caches
    few = [
        ask(small, str(i), SYSTEM[:64] + question(i), (Part("system", 0, 64), Part("question", 64, 104)), answer=8)
        for i in (1, 2)
    ]
    records = three(blocks), three(tree), three(paged), crowd(big, 60), few, crowd(forest, 80)
    return [cache.snapshot() for cache in caches], records


def gallery(theme, scale):
    """Every view, with data that is easy, crowded, short, waiting, running and long."""
    look = {"theme": theme, "scale": scale}
    (blocks, tree, paged, big, small, forest), (easy, branches, pages, lot, few, many) = world()
    odd = [replace(easy[0], id="a request with a long name"), *few, Record("5", SYSTEM, 1000), replace(easy[1], first_token=None)]
    odd += [
        Record("6", SYSTEM, 1000, outcome="refused", reason="it needs 2,000 slots and this pool has only 1,024 of them, " * 3)
    ]
    ghosts = {"2": 0.6, "3": 0.61}
    slow = [replace(r, decode_seconds=14.0, finished=r.first_token + 14) for r in easy]
    quick = [
        replace(
            r,
            prefill_seconds=r.prefill_seconds / 50,
            decode_seconds=0.004,
            first_token=r.started + 0.001,
            finished=r.started + 0.005,
        )
        for r in easy
    ]
    typed = {r.id: (NASTY * 100)[: len(r.tokens)] for r in easy}
    return [
        (ribbon.prompt_ribbon(easy, 16, policy="vllm", selected={"3": (976, 992)}, **look), 1010),
        (ribbon.prompt_ribbon(branches, 1, policy="sglang", **look), 1010),
        (ribbon.prompt_ribbon(odd, 16, policy="vllm", **look), 1010),
        (ribbon.prompt_ribbon(many, 1, policy="sglang", **look), 1010),
        (ribbon.prompt_ribbon(easy, 16, policy="vllm", window=ribbon.window_around(992, scale=scale), texts=typed, **look), 1010),
        *((block_map.block_map(c, r, just_evicted=[5], selected=9, **look), 500)
          for c, r in ((blocks, easy), (tree, branches), (paged, pages), (big, lot), (small, few))),
        (radix_tree.radix_tree(tree, branches, **look), 500),
        (radix_tree.radix_tree(forest, many, **look), 500),
        (radix_tree.radix_tree(forest, many, width=1010, **look), 1010),
        *((timeline.timeline(r, (), ghosts, **look), 1010) for r in (easy, slow, quick, many, odd)),
        (timeline.split_bars({"vllm": easy, "sglang": branches}, {"vllm": ghosts, "sglang": ghosts}, **look), 1010),
        (timeline.split_bars({"vllm": slow, "sglang": quick}, {"vllm": ghosts}, **look), 1010),
        (ribbon.prompt_ribbon([], 16, policy="vllm", **look), 1010),
        (radix_tree.radix_tree(None, [], **look), 500),
        (timeline.split_bars({}, **look), 1010),
    ]  # fmt: skip


@pytest.mark.parametrize(("theme", "scale", "least"), [("light", 1.0, 12), ("dark", 1.0, 12), ("light", 1.5, 18)])
def test_nothing_is_cut_off_too_small_or_overlapping(page, theme, scale, least):
    draw(page, *gallery(theme, scale))
    page.evaluate("html => document.body.insertAdjacentHTML('beforeend', html)", legend(theme=theme, scale=scale))
    browser.SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=browser.SCREENSHOTS / f"views-{theme}-{scale:g}.png", full_page=True)
    assert page.evaluate(PROBLEMS, least) == []


def test_the_check_above_sees_what_it_looks_for(page):
    fig = timeline.timeline(three(vllm()))
    fig.add_annotation(
        text="over the title", xref="paper", yref="paper", x=0, y=1, xanchor="left", yanchor="bottom", showarrow=False
    )
    fig.add_annotation(text="far away to the right", xref="paper", x=1, xanchor="left", y=1, showarrow=False, font_size=9)
    draw(page, (fig, 1010))
    assert {kind for _, kind, *_ in page.evaluate(PROBLEMS, 12)} == {"overlap", "cut off", "too small"}


def test_token_text_shows_as_typed(page):
    """In cells, in hovers, in row labels: no tag is obeyed, no $...$ reaches MathJax."""
    record = replace(three(vllm())[0], id="<b>$a$")
    count = len(NASTY)
    short = replace(record, tokens=record.tokens[:count], prompt_tokens=count, parts=(Part("system", 0, count),))
    typed = {short.id: NASTY}
    fig = ribbon.prompt_ribbon([short], 1, policy="sglang", texts=typed, width=2400)
    page.set_viewport_size({"width": 2440, "height": 400})
    draw(page, (fig, 2400))
    shown = page.evaluate("[...document.querySelectorAll('.chart text')].map(t => t.textContent)")
    for token in NASTY:
        assert text.visible(token) in shown
    assert any(label.startswith("<b>") for label in shown)
    for i, token in enumerate(NASTY):
        at = next(n for n, data in enumerate(fig.data[0].customdata) if data[1] == i)
        page.locator(".chart .bars .point path").nth(at).hover(force=True)
        page.wait_for_function(HOVERED, arg=f"“{text.visible(token)}”", timeout=5000)
    assert page.evaluate("MathJax.calls") == []


def test_our_mathjax_would_have_been_called(page):
    fig = ribbon.prompt_ribbon(three(vllm()), 16, policy="vllm")
    fig.layout.annotations[0].text = "$x$"
    draw(page, (fig, 1010))
    page.wait_for_function("MathJax.calls.includes('x')", timeout=5000)


class Cells(HTMLParser):
    """The text of every cell, and every tag."""

    def __init__(self, source):
        super().__init__()
        self.cells, self.tags = [], set()
        self.feed(source)

    def handle_starttag(self, tag, _attrs):
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        if self.cells:
            self.cells[-1] += data


def test_tables_show_text_as_typed():
    records = three(vllm())
    rows = ribbon.token_table(records[1], 16, policy="vllm", texts=NASTY * 90, start=985, stop=1000)
    found = Cells(tables.html(rows, "dark", 1.5))
    assert found.tags == {"div", "table", "thead", "tr", "th", "tbody", "td"}
    for i, row in enumerate(rows, 985):
        assert row["text"] == text.visible((NASTY * 90)[i])
        assert row["text"] in found.cells
    assert [r["state"] for r in rows] == ["reused"] * 7 + ["computed now"] * 8
    long = tables.html([{"n": i} for i in range(500)], max_rows=100)
    assert "400 more rows" in long
    cells = Cells(tables.html(ribbon.table(records, 16, policy="vllm", texts={"2": NASTY * 90})))
    assert "48" in cells.cells
    assert "992" in cells.cells


def test_the_legend_names_what_occurs():
    html = legend(["question", "system"], "dark", 1.5)
    assert html.index("system") < html.index("question"), "in the order of SOURCES"
    assert "tools" not in html
    for meaning in ("reused", "computed now", "cached idle", "free", "just evicted"):
        assert meaning in html
    assert DARK.evicted in html
    assert "19.5px" in html


def test_figures_are_plain_json():
    """What a widget's trait holds is JSON; numbers may be packed, and every list has one length."""
    fig = json.loads(ribbon.prompt_ribbon(three(vllm()), 16, policy="vllm").to_json())
    for trace in fig["data"]:
        lengths = set()
        for key in ("x", "y", "base", "customdata", "hovertext"):
            value = trace.get(key)
            if isinstance(value, dict):
                value = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"])
            if value is not None and not isinstance(value, str):
                lengths.add(len(value))
        assert len(lengths) == 1
