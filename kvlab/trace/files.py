"""Traces on disk: compressed JSON lines, a header, then events, steps and requests in the order in which they happened.

Arrays are written as plain lists; their types are those of the vocabulary (tokens int32, everything else int64).
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.cache import events as ev
from kvlab.cache.contract import Space
from kvlab.cache.free_list import FreeList
from kvlab.cache.state import Block, Node, Row, State
from kvlab.prompts import Part
from kvlab.trace.recorder import Record, Step, Trace

if TYPE_CHECKING:
    from os import PathLike

VERSION = 1
RECORDED = Path(__file__).parent / "recorded"

_EVENTS: dict[str, type[Any]] = {
    name: kind for name, kind in vars(ev).items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}


class TraceFileError(ValueError):
    """A file is no kvlab trace, or not all of one: says which file, which line and what to do."""


def save_traces(path: str | PathLike[str], traces: dict[str, Trace], about: str = "") -> None:
    """Write traces side by side into one file, for example ``{"vllm": ..., "sglang": ...}``.

    Parameters
    ----------
    path : path-like
        conventionally ``*.jsonl.gz``.
    traces : dict of str to Trace
    about : str
        a sentence for people: which model, which machine.
    """
    lines: list[dict[str, Any]] = [{"kvlab": VERSION, "about": about, "traces": list(traces)}]
    for name, trace in traces.items():
        lines.append({"trace": name, "base": _plain(trace.base)})
        lines.extend({"event": type(e).__name__, **_plain(e)} for e in trace.events)
        lines.extend({"step": _plain(s), "mark": m} for s, m in zip(trace.steps, trace.marks, strict=True))
        lines.extend({"record": _plain(r)} for r in trace.records.values())
    lines.append({"end": len(lines)})
    with gzip.GzipFile(path, "wb", mtime=0) as file:  # no time inside: equal traces give equal files
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def load_traces(path: str | PathLike[str]) -> dict[str, Trace]:
    """Read what `save_traces` wrote.

    Raises
    ------
    TraceFileError
        if the file is missing, of another program, from a newer version, or cut short.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        msg = f"there is no trace file {path}: check the name."
        raise TraceFileError(msg) from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        msg = f"{path} cannot be read as a compressed trace ({error}): it is cut short or not a kvlab trace."
        raise TraceFileError(msg) from None
    return _read(str(path), lines)


def _read(path: str, lines: list[str]) -> dict[str, Trace]:
    traces: dict[str, Trace] = {}
    number = 0
    try:
        _check_version(path, json.loads(lines[0])["kvlab"])
        for number, text in enumerate(lines[1:-1], 2):  # noqa: B007 - told in the error below
            _take_line(traces, json.loads(text))
        whole = json.loads(lines[-1]).get("end") == len(lines) - 1
    except TraceFileError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        msg = f"{path}, line {number or 1}: not a line of a kvlab trace; take the whole file as kvlab saved it."
        raise TraceFileError(msg) from None
    if not whole:
        msg = f"{path} ends before its last line: it was cut short; copy it again."
        raise TraceFileError(msg)
    return traces


def _check_version(path: str, version: int) -> None:
    if version > VERSION:
        msg = f"{path} was written by a newer kvlab (format {version}, this one reads {VERSION}): update kvlab."
        raise TraceFileError(msg)


def _take_line(traces: dict[str, Trace], line: dict[str, Any]) -> None:
    if "trace" in line:
        traces[line["trace"]] = Trace(_state(line["base"]))
        return
    trace = list(traces.values())[-1]
    if "event" in line:
        trace.events.append(_event(line))
    elif "step" in line:
        trace.steps.append(_step(line["step"]))
        trace.marks.append(line["mark"])
    else:
        record = _record(line["record"])
        trace.records[record.id] = record


# ------------------------------------------------------------------ to plain data and back
def _plain(value: Any) -> Any:  # noqa: ANN401 - any value of a trace
    if isinstance(value, FreeList):
        return value.plain()
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    return value


def _space(data: dict[str, Any]) -> Space:
    lora, embeds = data["lora"], data["embeds"]
    items = tuple((str(i), int(s), int(n)) for i, s, n in data["items"])
    rows = None if embeds is None else tuple(bytes.fromhex(row) for row in embeds)
    return Space(data["salt"], tuple(lora) if lora else None, data["extra_key"], items, rows)


def _event(line: dict[str, Any]) -> ev.Event:
    kind = _EVENTS[line["event"]]
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = line[field.name]
        if field.type == "np.ndarray":
            value = np.array(value, dtype=np.int32 if field.name == "tokens" else np.int64)
        elif field.name == "space":
            value = _space(value)
        elif isinstance(value, list):
            value = tuple(value)
        values[field.name] = value
    event: ev.Event = kind(**values)
    return event


def _state(data: dict[str, Any]) -> State:
    state = State(**{**data, "queue": FreeList.of_plain(data["queue"])})
    state.refs = {int(k): v for k, v in data["refs"].items()}
    state.blocks = {int(k): Block(**{**v, "tokens": tuple(v["tokens"])}) for k, v in data["blocks"].items()}
    state.nodes = {int(k): Node(**{**v, "space": _space(v["space"])}) for k, v in data["nodes"].items()}
    rows = (
        Row(**{**v, "space": _space(v["space"]), "slots": np.array(v["slots"], dtype=np.int64)}) for v in data["rows"].values()
    )
    state.rows = {row.id: row for row in rows}
    return state


def _step(data: dict[str, Any]) -> Step:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return Step(**values)


def _record(data: dict[str, Any]) -> Record:
    return Record(**{**data, "parts": tuple(Part(**p) for p in data["parts"])})
