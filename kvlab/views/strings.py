"""Every word that the pictures say. Another language is another file with these names."""

from __future__ import annotations

POLICY = {"vllm": "vLLM", "sglang": "SGLang", "none": "No reuse"}
UNIT = {"vllm": ("block", "blocks"), "sglang": ("page", "pages"), "none": ("block", "blocks")}
SOURCE = {
    "system": "system",
    "timestamp": "timestamp",
    "tools": "tools",
    "history": "history",
    "retrieved": "retrieved",
    "question": "question",
    "generated": "generated",
    "unknown": "unknown",
}
STATE = {"used": "in use", "idle": "cached idle", "free": "free", "null": "never used"}
MARK = {
    "reused": "reused",
    "computed": "computed now",
    "idle": "cached idle",
    "free": "free",
    "evicted": "just evicted",
    "pending": "not computed yet",
}
STOPPED = {
    "diverged": "other or no cached tokens",
    "unit": "less than a {unit} left",
    "last_token": "the last token is always computed",
    "skipped": "does not read the cache",
    "end": "all of it matched",
}
OUTCOME = {"stop": "stopped", "length": "full length", "abort": "aborted", "refused": "refused", "failed": "failed"}

# ---------------------------------------------------------------- numbers
_ORDINALS = ("first", "second", "third")


def number(value: int) -> str:
    """Return 1,040 for 1040."""
    return f"{value:,}"


def count(value: int, one: str, many: str) -> str:
    """Return "1 block" or "62 blocks"."""
    return f"{value:,} {one if value == 1 else many}"


def tokens(value: int) -> str:
    """Return "1,040 tokens"."""
    return count(value, "token", "tokens")


def seconds(value: float) -> str:
    """Return a time with two or three digits that matter: 12.3 s, 0.65 s, 48 ms, 0.8 ms."""
    if value >= 10:
        return f"{value:.1f} s"
    if value >= 0.0995:
        return f"{value:.2f} s"
    if value >= 0.00995:
        return f"{value * 1000:.0f} ms"
    return f"{value * 1000:.1f} ms" if value > 0 else "0 s"


def ordinal(place: int) -> str:
    """Return "first" for 1, "22nd" for 22."""
    if place <= len(_ORDINALS):
        return _ORDINALS[place - 1]
    suffix = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place:,}{suffix}"


def used(times: int) -> str:
    """Return how many requests went through a node: "used once" (when it was made), "used 3 times"."""
    return "used once" if times == 1 else f"used {times:,} times"


def span(start: int, stop: int) -> str:
    """Return the first and last of positions [start, stop)."""
    return f"token {start:,}" if stop - start == 1 else f"tokens {start:,}–{stop - 1:,}"  # noqa: RUF001 - a range has an en dash


def unit(policy: str, size: int) -> str:
    """Return what a policy shares at once: "block of 16", "single token"."""
    return "single token" if size == 1 else f"{UNIT[policy][0]} of {size:,}"


def units(policy: str, size: int) -> str:
    """Return how a policy matches: "in blocks of 16", "token by token"."""
    return "token by token" if size == 1 else f"in {UNIT[policy][1]} of {size:,}"


# ---------------------------------------------------------------- what to do when there is nothing to see
EMPTY = "Press Run to send the first request."
EMPTY_TREE = "The tree is empty. Press Run to send the first request."
EMPTY_TIME = "No time measured yet. Press Run to send the first request."
MORE_REQUESTS = "… {n} earlier not shown"
MORE_NODES = "… {n} more {nodes}"
MORE_ROWS = "… {n} more rows"

# ---------------------------------------------------------------- ribbon
RIBBON_MATCHES = "matches {units}"
RIBBON_NONE = "keeps nothing for the next request"
RIBBON_X = "token position"
RIBBON_Y = "request"
REUSED = "{n} reused"
NOTHING_REUSED = "nothing reused"
WAITING = "waiting: it has no slot yet"
REFUSED = "refused: the pool has no room for it"
REFUSED_BECAUSE = "refused: {reason}"
ENDED = "ended before it got a slot"
PREFILLING = "prefill under way"
COMPUTED = "{n} computed"
RIBBON_END = "{computed} in {seconds}"
HOVER_RUN = "Request {id}: {span}, {source}, {mark}"
HOVER_ONE = "Request {id}, token {position}: {source}, {mark}"
HOVER_BLOCK = "{unit} {block} of the prompt"
HOVER_TEXT = "“{text}”"

# ---------------------------------------------------------------- sentences
SENTENCE = "{hit} of {total} reused, {computed} computed"
SENTENCE_TIME = ", {time}"
SENTENCE_INSTEAD = ", {time} instead of {full}"
HEADLINE = "Request {id}: "
HEADLINE_FIRST = "{policy} reuses {hit} of {total} tokens"
HEADLINE_NEXT = "{policy} {hit}"
HEADLINE_NEXT_OTHER = "{policy} {hit} of {total}"
HEADLINE_WAITS = "{policy} has not admitted it yet"
HEADLINE_PREFILL = " Prefill takes {times}."
HEADLINE_INSTEAD = "{time} instead of {full}"
HEADLINE_POLICY = "{time} in {policy}"
SUMMARY_ROW = "Request {id}: {sentence}."

WHY_WAITS = "It has no slot yet, so nothing was looked up."
WHY_REASON = "It was refused: {reason}"
WHY_REFUSED = "The pool has no room for it, so it computed nothing."
WHY_ENDED = "It ended before it was looked up."
WHY_NONE = "Without prefix caching nothing is kept for the next request, so all {total} are computed."
WHY_SKIPPED = "This request does not read the cache, so all {total} are computed."
WHY_LAST = (
    "All of it is cached, but the last token is always computed: K and V are kept, the logits that choose the next token are not."
)
WHY_LAST_UNIT = " Before it stand {split}; only whole {units} are kept."
WHY_SPLIT = "{n} = {units} of {size} and {left} left over"
WHY_WHOLE = "{n} = {units} of {size}"
WHY_BELOW = "The prompt has only {total}, less than one {unit}."
WHY_UNIT = "{split}; those {left} do not fill a {unit}, and only whole {units} are kept."
WHY_UNIT_ONE = "{split}; that one does not fill a {unit}, and only whole {units} are kept."
WHY_END = "All {total} are cached."
WHY_NOTHING = "Nothing was cached yet, so all {total} are computed."
WHY_UNKNOWN_START = "Nothing that begins like this prompt is cached."
WHY_UNKNOWN_END = "What follows the first {n} is not cached."
WHY_FIRST = {
    "vllm": "The first token differs, and a block's key covers all that stands before it.",
    "sglang": "The first token differs, and the tree is walked from the first token on.",
}
WHY_FIRST_FEW = {
    "vllm": "{equal}, less than one {unit}; a block's key covers all that stands before it, so no later block is found.",
    "sglang": "{equal}, less than one {unit}; the tree is walked from the first token on, so nothing later is found.",
}
WHY_EQUAL = ("Only the first token is equal", "Only the first {n} tokens are equal")
WHY_DIFFERS = "The first {n} are equal; then comes the {source}, which differs."
WHY_DIFFERS_INSIDE = "The first {n} are equal; then the {source} differs."
WHY_SHARED_UNIT = "{split}; {those} {unit} with the {source}, which differs."
WHY_SHARED_INSIDE = "{split}; {those} {unit} with text that differs."
WHY_THOSE = ("that one shares a", "those {n} share a")
WHY_GONE = (
    "An earlier request shares the first {n}, but what follows the first {hit} was evicted, was not kept, or belongs to another "
    "namespace (salt or adapter)."
)

# ---------------------------------------------------------------- blocks
BLOCKS = {"vllm": "Blocks (vLLM)", "sglang": "Pages (SGLang)", "none": "Blocks (no reuse)"}
SLOTS = {"vllm": "Slots (vLLM)", "sglang": "Slots (SGLang)", "none": "Slots (no reuse)"}
COUNTS = "{used} in use, {idle} cached idle, {free} free"
COUNTS_UNLIMITED = "{used} in use, {idle} cached idle, no limit"
CELL_IS = "a cell is {n} {units}, drawn as most of them are"
SLOT = ("slot", "slots")
HOVER_UNIT = "{name} {id}: {state}"
HOVER_UNITS = "{name} {first} to {last}: {counts}"
HOVER_MARK = "{source}, {mark}"
HOVER_HELD = "held by {requests}"
HOVER_EVICTED = "just evicted"
HOVER_PLACE = "evicted {ordinal} among what is cached"
HOVER_NULL = "{name} 0 is never used: a table entry that says “nothing here”"
REQUESTS = ("request", "requests")
SUMMARY_BLOCKS = "{policy}: {counts}, of {total}."

# ---------------------------------------------------------------- radix tree
TREE = "Radix tree (SGLang)"
TREE_NODES = "{nodes} hold {tokens}"
TREE_NODES_ONE = "{nodes} holds {tokens}"
NODES = ("node", "nodes")
TREE_X = "token position"
LOCKED = "locked by {n}"
EVICTED_PLACE = "evicted {ordinal}"
HOVER_NODE = "Node {id}: {span}"
SUMMARY_TREE = "{nodes} hold {tokens}; {locked} locked. {next}"
SUMMARY_TREE_NEXT = "Node {id} would be evicted first."
SUMMARY_TREE_NONE = "Nothing can be evicted."

# ---------------------------------------------------------------- time
TIME = "Time"
TIME_SUB = "prefill (grey), then decode; dashed: what the cache removed; hatched: estimated"
TIME_SUB_SHORT = "prefill (grey), then decode; dashed: what the cache removed"
TIME_X = "seconds since the first request"
TIME_X_CUT = "seconds of work (idle time left out)"
SPLIT_X = "seconds"
PREFILL = "prefill"
DECODE = "decode"
SAVED = "{time} saved"
TIME_LABEL = "{prefill} + {decode}"
HOVER_TIME = "Request {id}: {phase} {time}"
HOVER_TTFT = "first token after {time}"
HOVER_TPOT = "{time} for each further token"
SUMMARY_TIME = "Request {id}: prefill {prefill}, decode {decode}{saved}."
SUMMARY_SAVED = ", {time} saved"
SPLIT = "Prefill and decode"

# ---------------------------------------------------------------- details
DETAIL_PARENT = "key {key} ← {parent}"
DETAIL_FIRST = "key {key}, the first of its prompt"
DETAIL_USED = "in use by request {ids}"
DETAIL_PLACE = "cached idle, evicted {ordinal} among what is cached"
DETAIL_FREE = "free: nothing cached in it"
DETAIL_BLOCK = "{name} {id}"
DETAIL_LAST_USE = "last used at tick {tick}, made at tick {made}"

# ---------------------------------------------------------------- tables
COLUMN = {
    "request": "request",
    "prompt": "prompt tokens",
    "reused": "reused",
    "computed": "computed",
    "output": "output tokens",
    "stopped": "match ended because",
    "prefill": "prefill s",
    "decode": "decode s",
    "saved": "saved s",
    "ttft": "first token s",
    "outcome": "outcome",
    "after": "text after the match",
    "position": "position",
    "id": "token id",
    "text": "text",
    "source": "source",
    "state": "state",
    "first": "first",
    "last": "last",
    "held": "held by",
    "tokens": "tokens",
    "node": "node",
    "parent": "parent",
    "locks": "locks",
    "hits": "hits",
    "evicted": "evicted",
    "policy": "policy",
}
NO_ROWS = "no data yet"
