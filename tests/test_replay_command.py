"""`kvlab replay`: what it prints, where, and how it exits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlab.cli import app

GOLDEN = Path(__file__).parent / "golden"
TRACE = GOLDEN / "vllm-0101.jsonl"


def run(*args):
    return CliRunner().invoke(app, ["replay", *map(str, args)])


@pytest.fixture
def changed(tmp_path):
    """A trace with one field of one operation changed."""
    lines = TRACE.read_text(encoding="utf-8").splitlines()
    step = json.loads(lines[3])
    step["expect"]["free_blocks"] += 1
    path = tmp_path / "changed.jsonl"
    path.write_text("\n".join([*lines[:3], json.dumps(step), *lines[4:]]), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", [TRACE, GOLDEN / "sglang-0101.jsonl"])
def test_json_prints_the_fields_of_expect(path):
    result = run(path, "--json")
    assert result.exit_code == 0
    expected = [json.loads(line)["expect"] for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    assert [json.loads(line) for line in result.stdout.splitlines()] == expected
    assert result.stderr == ""


def test_a_trace_in_a_sentence():
    result = run(TRACE)
    assert result.exit_code == 0
    assert result.stdout == f"{TRACE}: 127 operations; 44 of 238 tokens looked up were cached\n"


def test_check_passes_what_is_as_recorded():
    result = run(TRACE, GOLDEN / "sglang-0102.jsonl", "--check")
    assert result.exit_code == 0
    assert "127 of 127 as recorded" in result.stdout
    assert result.stderr == ""


def test_check_names_what_differs_and_goes_on(changed):
    result = run(changed, TRACE, "--check", "--json")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 2 * 127
    assert result.stderr.startswith(f"kvlab: {changed}, line 4 (start), field 'free_blocks': expected ")
    assert run(changed).exit_code == 0  # nobody asked


def test_queue_orders_play_too(tmp_path):
    result = run(GOLDEN / "schedule.jsonl", "--check")
    assert result.exit_code == 0
    assert "40 operations, 40 of 40 as recorded" in result.stdout
    query = json.loads((GOLDEN / "schedule.jsonl").read_text(encoding="utf-8").splitlines()[0])
    query["expect"]["order"][:2] = reversed(query["expect"]["order"][:2])
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps(query), encoding="utf-8")
    result = run(path, "--check")
    assert result.exit_code == 1
    assert "line 1 (shortest-prefill-first), field 'order': expected" in result.stderr


def test_check_without_anything_to_compare(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"engine": "vllm", "num_blocks": 9, "block_size": 4}\n{"op": "reset"}\n', encoding="utf-8")
    assert run(path).exit_code == 0
    result = run(path, "--check")
    assert result.exit_code == 1
    assert "holds no `expect`" in result.stderr


def test_files_that_cannot_be_run(tmp_path):
    cut = tmp_path / "cut.jsonl"
    cut.write_text(TRACE.read_text(encoding="utf-8")[:5000], encoding="utf-8")
    missing = tmp_path / "missing.jsonl"
    for paths, code, words in (
        ([missing], 2, f"kvlab: {missing} cannot be read: No such file or directory."),
        ([tmp_path], 2, f"kvlab: {tmp_path} cannot be read: Is a directory."),
        ([Path(__file__)], 2, "this is no JSON"),
        ([cut], 1, "this is no JSON"),
        ([missing, TRACE], 1, "No such file"),
    ):
        result = run(*paths)
        assert (result.exit_code, result.stderr.count("\n")) == (code, 1), paths
        assert words in result.stderr
        assert "Traceback" not in result.output
