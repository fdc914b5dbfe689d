"""Traces of one's own: replay without anything recorded, differences, and lines that cannot be run."""

from __future__ import annotations

import json

import pytest

from kvlab.trace.lines import ReplayError
from kvlab.trace.replay import check, open_replay

VLLM = {"engine": "vllm", "num_blocks": 9, "block_size": 4}
SGLANG = {"engine": "sglang", "num_tokens": 64, "page_size": 4}


def lines(header, *ops):
    return [json.dumps(line) for line in (header, *ops)]


def test_a_trace_needs_no_expect():
    tokens = list(range(10))
    ops = [
        {"op": "start", "id": "a", "tokens": tokens},
        {"op": "decode", "id": "a", "token": 10},
        {"op": "finish", "id": "a"},
        {"op": "start", "id": "b", "tokens": [*tokens, 10, 11, 12], "salt": None},
        {"op": "reset"},
    ]
    steps = list(open_replay(lines(VLLM, *ops)))
    assert [step.line for step in steps] == [2, 3, 4, 5, 6]
    assert [step.expect for step in steps] == [None] * 5
    assert [step.result["ok"] for step in steps] == [True, True, True, True, False]
    assert steps[3].result["hit_tokens"] == 8
    assert steps[3].result["blocks"] == [1, 2, 3, 4]
    assert steps[3].result["stats"] == [23, 8]
    assert check(lines(VLLM, *ops)) is None


def test_a_batch_of_sglang_is_told_one_by_one():
    reqs = [{"id": id, "tokens": list(range(20))} for id in "abcd"]
    (step, dump) = open_replay(lines(SGLANG, {"op": "prefill", "reqs": reqs}, {"op": "dump"}))
    assert [one["ok"] for one in step.result["reqs"]] == [True, True, False, False]
    assert [one.get("why") for one in step.result["reqs"]] == [None, None, "NO_TOKEN", "not reached"]
    assert [one.get("hit_tokens") for one in step.result["reqs"]] == [0, 0, 0, None]
    (node,) = dump.result["tree"]["children"]
    assert (node["tokens"], node["slots"], node["lock_ref"], node["hit_count"]) == (list(range(20)), list(range(4, 24)), 2, 2)


def test_a_part_of_expect_is_compared_and_nothing_else():
    start = {"op": "start", "id": "a", "tokens": [1, 2, 3]}
    assert check(lines(VLLM, start | {"expect": {"hit_tokens": 0}})) is None
    found = check(lines(VLLM, start | {"expect": {"ok": True, "hit_tokens": 4, "blocks": [9]}}), "mine.jsonl")
    assert str(found) == "mine.jsonl, line 2 (start), field 'hit_tokens': expected 4, got 0."
    assert check(lines(VLLM, start | {"expect": {"speed": 4}})).got is None


def test_empty_lines_are_passed_over_and_counted():
    (step,) = open_replay(["", json.dumps(VLLM), "  \n", json.dumps({"op": "reset"}), ""])
    assert (step.line, step.result["ok"]) == (4, True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("^t.jsonl is empty: a trace starts with a header line.$", []),
        ("^t.jsonl, line 1: this is no JSON", ["{"]),
        ("^t.jsonl, line 1: this is no JSON", ["[" * 100_000]),
        ("^t.jsonl, line 1: \\[1\\] is no JSON object", ["[1]"]),
        (
            'line 1, field \'engine\': is null in the header, but must be "vllm" or "sglang"',
            lines({"num_blocks": 9, "block_size": 4}),
        ),
        ("line 1, field 'engine': is \\[1\\]", lines({"engine": [1]})),
        ("line 1, field 'num_blocks': is missing", lines({"engine": "vllm", "block_size": 4})),
        ("line 1, field 'block_size': is \"4\", but must be a whole number", lines(VLLM | {"block_size": "4"})),
        ("line 1, field 'num_blocks': is true", lines(VLLM | {"num_blocks": True})),
        ("line 1, field 'num_blocks': is 1000000000000", lines(VLLM | {"num_blocks": 10**12})),
        ("line 1: block_size is 0: it must be", lines(VLLM | {"block_size": 0})),
        ("line 1: num_tokens is 64: make it a multiple of the page size 7", lines(SGLANG | {"page_size": 7})),
        ("line 1: hash 'md5' is not one of", lines(VLLM | {"hash": "md5"})),
        ("line 1: watermark is nan", lines(VLLM | {"watermark": float("nan")})),
        ("line 1, field 'speed': is not known here; there are num_blocks, block_size,", lines(VLLM | {"speed": 3})),
        ("line 1, field 'enable': is 1, but must be true or false", lines(SGLANG | {"enable": 1})),
        ("line 2, field 'op': is null, but must be one of start, decode", lines(VLLM, {"id": "a"})),
        ("line 2, field 'op': is \"abort\", but must be one of", lines(VLLM, {"op": "abort", "id": "a"})),
        ("line 2, field 'op': is \\[1\\]", lines(VLLM, {"op": [1]})),
        ("line 2, field 'id': is missing", lines(VLLM, {"op": "finish"})),
        ("line 2, field 'id': is 5, but must be text", lines(VLLM, {"op": "finish", "id": 5})),
        ("line 2, field 'id': request 'a' is not here", lines(VLLM, {"op": "finish", "id": "a"})),
        ("line 2, field 'id': request 'a' is not here", lines(SGLANG, {"op": "decode", "id": "a", "token": 1})),
        ("line 3, field 'id': request 'a' is here", lines(VLLM, *[{"op": "start", "id": "a", "tokens": [1]}] * 2)),
        (
            "line 2, field 'tokens': is \"x\", but must be a list of token ids",
            lines(VLLM, {"op": "start", "id": "a", "tokens": "x"}),
        ),
        ("line 2, field 'tokens': is \\[-1\\]", lines(VLLM, {"op": "start", "id": "a", "tokens": [-1]})),
        ("line 2, field 'tokens': the prompt of request 'a' is empty", lines(SGLANG, {"op": "start", "id": "a", "tokens": []})),
        ("line 2, field 'token': is missing", lines(SGLANG, {"op": "decode", "id": "a"})),
        ("line 2, field 'token': is 1.5, but must be a token id", lines(VLLM, {"op": "decode", "id": "a", "token": 1.5})),
        ("line 2, field 'salt': is 3, but must be text", lines(VLLM, {"op": "lookup", "tokens": [1], "salt": 3})),
        ("line 2, field 'salt': is", lines(VLLM, {"op": "lookup", "tokens": [1], "salt": "\ud800"})),
        ("line 2, field 'reason': is \"bored\", but must be", lines(SGLANG, {"op": "finish", "id": "a", "reason": "bored"})),
        ("line 2, field 'reqs': is \\[1\\], but must be a list of requests", lines(SGLANG, {"op": "prefill", "reqs": [1]})),
        ("line 2, field 'tokens': is missing", lines(SGLANG, {"op": "prefill", "reqs": [{"id": "a"}]})),
        ("line 2, field 'reqs': a batch names", lines(SGLANG, {"op": "prefill", "reqs": [{"id": "a", "tokens": [1]}] * 2})),
        ("line 2, field 'n': is -1", lines(SGLANG, {"op": "evict", "n": -1})),
        ("line 2, field 'expect': is 3, but must be an object", lines(VLLM, {"op": "reset", "expect": 3})),
    ],
)
def test_a_line_that_cannot_be_run_is_named(words, text):
    with pytest.raises(ReplayError, match=words) as error:
        list(open_replay(text, "t.jsonl"))
    assert str(error.value).startswith("t.jsonl")
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("line 1, field 'policy': is missing", lines({"queue": []})),
        ("line 1: there is no queue order 'best'", lines({"policy": "best", "queue": []})),
        ("line 1, field 'queue': is 3, but must be a list of requests", lines({"policy": "lpm", "queue": 3})),
        ("line 2, field 'tokens': is missing", lines({"policy": "lpm", "queue": []}, {"policy": "lpm", "queue": [{}]})),
        ("line 1, field 'cached': is \\[\\[\\]\\], but must be", lines({"policy": "lpm", "queue": [], "cached": [[]]})),
        ("line 1: page_size is 0", lines({"policy": "lpm", "queue": [], "page_size": 0})),
        ("line 1, field 'expect': is 3", lines({"policy": "lpm", "queue": [], "expect": 3})),
        ("line 2, field 'queue': holds an empty prompt", ["", *lines({"policy": "lpm", "queue": [{"tokens": []}]})]),
        ("line 1, field 'seed': is -1", lines({"policy": "random", "queue": [], "seed": -1})),
    ],
)
def test_a_queue_that_cannot_be_ordered_is_named(words, text):
    with pytest.raises(ReplayError, match=words):
        list(open_replay(text, "t.jsonl"))


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(VLLM).encode() + b"\n\xff\xfe\n")  # read in one piece with the line before
    with path.open(encoding="utf-8") as file, pytest.raises(ReplayError, match=r"t\.jsonl, line 1: this is no text in UTF-8"):
        list(open_replay(file, "t.jsonl"))


def test_what_came_before_a_bad_line_has_been_told():
    replay = iter(open_replay(lines(VLLM, {"op": "start", "id": "a", "tokens": [1]}, {"op": "what"})))
    assert next(replay).result["ok"]
    with pytest.raises(ReplayError, match="line 3"):
        next(replay)
