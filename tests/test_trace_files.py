"""Traces on disk: what was saved comes back, and a damaged file is refused in words."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.trace.files import RECORDED, TraceFileError, load_traces, save_traces

PATH = RECORDED / "four_situations.jsonl.gz"


def test_what_was_saved_comes_back(tmp_path):
    first = load_traces(PATH)
    save_traces(tmp_path / "again.jsonl.gz", first, about="again")
    again = load_traces(tmp_path / "again.jsonl.gz")
    assert first.keys() == again.keys() == {"vllm", "sglang"}
    for policy, trace in first.items():
        assert again[policy].records == trace.records
        assert again[policy].steps == trace.steps
        assert again[policy].state == trace.state
        assert len(again[policy].events) == len(trace.events) > 0
    assert [record.cached_tokens for record in first["vllm"].records.values()] == [0, 992]


@pytest.mark.parametrize("at", np.linspace(0, PATH.stat().st_size - 1, 23).astype(int))
def test_a_damaged_file_is_refused_in_words(tmp_path, at):
    whole = PATH.read_bytes()
    path = tmp_path / "damaged.jsonl.gz"
    path.write_bytes(whole[:at])
    with pytest.raises(TraceFileError):
        load_traces(path)
    if at > 9:  # what stands in a gzip header is of no consequence
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(TraceFileError, match=r"damaged\.jsonl\.gz"):
            load_traces(path)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(TraceFileError, match="check the name"):
        load_traces(tmp_path / "nothing.jsonl.gz")
