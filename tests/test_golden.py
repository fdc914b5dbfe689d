"""The caches do what the real engines did: every recorded operation, every field; and the events tell all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlab.trace.replay import check, open_replay

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*-*.jsonl"))


def test_the_traces_are_there():
    engines = [path.name.split("-")[0] for path in GOLDEN]
    assert engines.count("vllm") == 44
    assert engines.count("sglang") == 46


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_field_is_as_recorded(path):
    with path.open(encoding="utf-8") as lines:
        replay = open_replay(lines, path.name)
        steps = 0
        for step in replay:
            assert step.result == step.expect, f"line {step.line}, {step.op}"
            replay.cache.check_integrity()
            assert replay.state == replay.cache.snapshot(), f"line {step.line}, {step.op}: the events tell another story"
            steps += 1
    assert steps == len(path.read_text(encoding="utf-8").splitlines()) - 1


@pytest.mark.parametrize("path", GOLDEN[::6], ids=lambda path: path.stem)
def test_a_cache_without_listeners_answers_the_same(path):
    """Events are built only while somebody listens; what the cache does must not depend on it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    loud, quiet = open_replay(lines), open_replay(lines[:1])
    quiet.cache._log = None
    if hasattr(quiet.cache, "_tree"):
        quiet.cache._tree._log = None
    for step, text in zip(loud, lines[1:], strict=True):
        fields = {name: value for name, value in json.loads(text).items() if name not in ("op", "expect")}
        quiet._call(step.op, fields)
    assert quiet.cache.snapshot() == loud.cache.snapshot()
    assert quiet.cache.events() == []


def test_check_tells_the_first_field_that_differs():
    lines = (GOLDEN[0].parent / "vllm-0101.jsonl").read_text(encoding="utf-8").splitlines()
    assert check(lines) is None
    changed = json.loads(lines[3])
    changed["expect"]["free_blocks"] += 1
    found = check([*lines[:3], json.dumps(changed), *lines[4:]], "here.jsonl")
    assert (found.line, found.field, found.expected - found.got) == (4, "free_blocks", 1)
    assert str(found).startswith("here.jsonl, line 4 (start), field 'free_blocks': expected ")
