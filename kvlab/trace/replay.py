"""Recorded traces of operations (tests/golden): run through the caches and told field by field, as the real engines were.

A trace is JSON lines: a header that describes the cache, then one operation a line. Its ``expect``, where it has one, holds what
the engine did; the rest is the operation. An engine is an entry in `ENGINES`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlab.cache.block_cache import BlockCache
from kvlab.cache.contract import Answer, CacheError
from kvlab.cache.events import Event, Evicted
from kvlab.cache.radix_cache import RadixCache
from kvlab.cache.state import ROOT, Row, State
from kvlab.trace.lines import Fields, Lines, ReplayError, Shape, short
from kvlab.trace.queues import Queues, Replayed
from kvlab.trace.wire import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Difference(NamedTuple):
    """A field that is not as recorded."""

    name: str
    line: int
    op: str
    field: str
    expected: object
    got: object

    def __str__(self) -> str:
        """Say it in one sentence; long values are cut."""
        values = f"expected {short(self.expected)}, got {short(self.got)}"
        return f"{self.name}, line {self.line} ({self.op}), field {self.field!r}: {values}."


class Replay:
    """A trace on its way through a cache: iterate over it, one operation at a time.

    Parameters
    ----------
    lines : Lines
        the header line, then the operations.

    Attributes
    ----------
    cache : BlockCache or RadixCache
    state : State
        folded from the events of the cache so far.

    Raises
    ------
    ReplayError
        here and while iterating, for a line that is no operation, or one that the cache refuses to try.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        header = self._lines.next()
        if header is None:
            msg = f"{lines.name} is empty: a trace starts with a header line."
            raise ReplayError(msg)
        engine = header.pop("engine", None)
        if not isinstance(engine, str) or engine not in ENGINES:
            known = " or ".join(json.dumps(engine) for engine in ENGINES)
            self._lines.refuse("engine", f"is {short(engine)} in the header, but must be {known}")
        self._engine = ENGINES[engine]
        header = self._lines.fields(header, self._engine.header)
        try:
            self.cache = self._engine.cache(**header)
        except CacheError as error:  # its sentence begins with the field
            self._lines.refuse(None, str(error))
        self.cache.events()
        self.state = self.cache.snapshot()

    def __iter__(self) -> Iterator[Replayed]:
        while (line := self._lines.next()) is not None:
            op, expect = line.pop("op", None), line.pop("expect", None)
            if expect is not None and not isinstance(expect, dict):
                self._lines.refuse("expect", f"is {short(expect)}, but must be an object")
            if not isinstance(op, str) or op not in self._engine.ops:
                self._lines.refuse("op", f"is {short(op)}, but must be one of {', '.join(self._engine.ops)}")
            result, events = self._run(op, self._lines.fields(line, self._engine.ops[op]))
            yield Replayed(self._lines.number, op, result, expect, events)

    def _run(self, op: str, fields: Fields) -> tuple[Fields, list[Event]]:
        id = fields.get("id", "")
        row = self.state.rows.get(id)
        try:
            answer = self._call(op, fields)
        except CacheError as error:
            self._lines.refuse("reqs" if op == "prefill" else "tokens" if fields.get("tokens") == [] else "id", str(error))
        events = self.cache.events()
        self.state.fold(events)
        # An ended request is no longer among the rows; the row seen before keeps what it was at its end.
        return self._engine.tell(self, op, answer, row or self.state.rows.get(id), events), events

    def _call(self, op: str, fields: Fields) -> Any:  # noqa: ANN401 - each operation answers in its own way
        match op:
            case "dump":
                return Answer(ok=True)
            case "reset":
                return Answer(ok=self.cache.reset())
            case "evict":
                self.cache.evict(fields["n"])
                return Answer(ok=True)
            case "prefill":
                return self.cache.prefill([self._lines.fields(request, self._engine.ops["start"]) for request in fields["reqs"]])
            case _:
                return getattr(self.cache, op)(**fields)

    def summary(self) -> str:
        """Return the hit rate in words."""
        return f"{self.state.found:,} of {self.state.queried:,} tokens looked up were cached"


def open_replay(texts: Iterable[str], name: str = "the trace") -> Replay | Queues:
    """Return a trace of operations, or of queue orders, whichever the first line begins.

    Raises
    ------
    ReplayError
        for a first line that begins neither or is no text; what comes later is refused while iterating.
    """
    lines = Lines(texts, name)
    begin = lines.peek()
    return Queues(lines) if '"queue"' in begin and '"engine"' not in begin else Replay(lines)


def check(texts: Iterable[str], name: str = "the trace") -> Difference | None:
    """Run a trace and return the first field of an ``expect`` that comes out otherwise; None when all are as recorded.

    Raises
    ------
    ReplayError
        as `open_replay` does.
    """
    return next((found for step in open_replay(texts, name) if (found := difference(step, name))), None)


def difference(step: Replayed, name: str = "the trace") -> Difference | None:
    """Return the first field of the ``expect`` of one operation that came out otherwise."""
    for field, expected in (step.expect or {}).items():
        got = step.result.get(field)
        if got != expected:
            return Difference(name, step.line, step.op, field, expected, got)
    return None


# ---------------------------------------------------------------------- what the engines tell of an operation
def _tell_vllm(replay: Replay, op: str, answer: Answer, row: Row | None, events: list[Event]) -> Fields:
    state = replay.state
    result: Fields = {"ok": answer.ok}
    if answer.hit_tokens is not None:
        result["hit_tokens"] = answer.hit_tokens
    if answer.ok and row is not None and op != "preempt":
        result["blocks"] = (row.slots[:: state.unit] // state.unit).tolist()
    queue = list(state.queue)
    return result | {"free_blocks": len(queue), "queue": queue, "events": wire(events), "stats": [state.queried, state.found]}


def _tell_sglang(replay: Replay, op: str, answer: Any, row: Row | None, events: list[Event]) -> Fields:  # noqa: ANN401 - as `_call`
    if op == "dump":
        return {"ok": True, "tree": _tree(replay.state)}
    result: Fields = {"ok": getattr(answer, "ok", True)}
    if op == "prefill":
        result["reqs"] = [_prefilled(one) for one in answer]
    elif op == "match":
        result["hit_tokens"] = answer.tokens
    elif op in {"start", "chunk"}:
        result = _prefilled(answer)
        if answer.ok and row is not None:
            result |= {"prefill_done": len(row.slots) == len(row.tokens), "tree_len": row.protected}
    elif op == "decode" and row is not None:
        result |= {"slots": answer.slots.tolist(), "kv_len": row.written} if answer.ok else {"why": "decode needs retraction"}
    elif op in {"finish", "abort"} and row is not None:
        unit = replay.state.unit
        result |= {"kv_len": row.written, "kept": row.written // unit * unit if op == "finish" else 0}
    result |= replay.cache.sizes()._asdict()
    return result | {"evicted": [e.slots.tolist() for e in events if isinstance(e, Evicted)], "events": wire(events)}


def _prefilled(answer: Answer) -> Fields:
    result: Fields = {"ok": answer.ok}
    if answer.hit_tokens is not None:
        result["hit_tokens"] = answer.hit_tokens
    if not answer.ok:
        return result | {"why": "not reached" if answer.why == "not_reached" else "NO_TOKEN"}
    return result | {"new_tokens": len(answer.slots), "slots": answer.slots.tolist()}


def _tree(state: State) -> Fields:
    """Return the root with all that hangs below it."""
    nodes: dict[int, Fields] = {
        id: {
            "tokens": node.tokens,
            "slots": node.slots,
            "lock_ref": node.lock,
            "hit_count": node.hits,
            "salt": node.space.salt,
            "extra_key": node.space.extra_key,
        }
        for id, node in state.nodes.items()
    }
    for id, node in state.nodes.items():
        nodes[id]["children"] = [nodes[child] for child in node.children]
    return nodes[ROOT]


# ---------------------------------------------------------------------- what a line may hold
class Engine(NamedTuple):
    """A kind of trace: the cache that its header makes, the fields of header and operations, how a result is told."""

    cache: Callable[..., Any]
    header: Shape
    ops: dict[str, Shape]
    tell: Callable[[Replay, str, Any, Row | None, list[Event]], Fields]


_ID = Shape(("id",))

ENGINES = {
    "vllm": Engine(
        BlockCache,
        Shape(("num_blocks", "block_size"), ("enable_caching", "hash", "hash_seed", "watermark", "max_num_batched_tokens")),
        {
            "start": Shape(("id", "tokens"), ("salt", "lora", "items", "embeds", "skip_read", "max_output")),
            "decode": Shape(("id",), ("token", "last")),
            "finish": _ID,
            "preempt": _ID,
            "resume": _ID,
            "lookup": Shape(("tokens",), ("salt", "lora", "items", "embeds")),
            "reset": Shape(),
        },
        _tell_vllm,
    ),
    "sglang": Engine(
        RadixCache,
        Shape(("num_tokens", "page_size"), ("policy", "overlap", "enable", "chunk")),
        {
            "start": Shape(("id", "tokens"), ("salt", "extra_key", "lora", "priority", "max_new")),
            "prefill": Shape(("reqs",)),
            "chunk": _ID,
            "decode": Shape(("id", "token")),
            "finish": Shape(("id",), ("reason",)),
            "abort": _ID,
            "retract": _ID,
            "match": Shape(("tokens",)),
            "evict": Shape(("n",)),
            "reset": Shape(),
            "dump": Shape(),
        },
        _tell_sglang,
    ),
}
