"""`kvlab demo` on the real model, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
@pytest.mark.parametrize("long", [8, pytest.param(None, marks=pytest.mark.soak)])
def test_the_four_situations(embedded, long):
    command = [sys.executable, "-m", "kvlab", "demo", "--json", *([f"--long-answer={long}"] if long else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    found = {row["situation"]: row for row in map(json.loads, out.splitlines())}
    skipped = {name: (row["vllm"]["cached_tokens"], row["sglang"]["cached_tokens"]) for name, row in found.items()}
    assert skipped == {
        "shared_first": (992, 1000),
        "timestamp_first": (0, 0),
        "timestamp_after": (992, 1000),
        "long_answer": (992, 1000),
    }
    assert found["shared_first"]["prompt_tokens"] == 1040
    for row in found.values():
        for side in (row["vllm"], row["sglang"]):
            assert set(side) == {"cached_tokens", "prefill_seconds", "decode_seconds", "output_tokens"}
            assert side["prefill_seconds"] > 0
    lengths = {found["long_answer"][policy]["output_tokens"] for policy in ("vllm", "sglang")}
    assert lengths <= ({long} if long else {200, 2000})
    assert usage.ru_maxrss * 1024 < 2e9, "bytes at its peak"
