"""The result in a sentence, and one that says why. Every number comes from the record."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvlab.views import strings as say

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvlab.trace.recorder import Record


def sentence(record: Record, instead_of: float | None = None) -> str:
    """Return "992 of 1,040 reused, 48 computed, 0.13 s instead of 0.65 s".

    Parameters
    ----------
    record : Record
        the request.
    instead_of : float, optional
        seconds that its prefill would take without reuse, measured or estimated by the caller.
    """
    hit, total = record.cached_tokens, record.prompt_tokens
    if hit is None:
        return unadmitted(record)
    out = say.SENTENCE.format(hit=say.number(hit), total=say.number(total), computed=say.number(total - hit))
    if record.first_token is None:
        return out
    time = say.seconds(record.prefill_seconds)
    if instead_of is None or not hit:
        return out + say.SENTENCE_TIME.format(time=time)
    return out + say.SENTENCE_INSTEAD.format(time=time, full=say.seconds(instead_of))


def unadmitted(record: Record) -> str:
    """Return what a request does that was never admitted: it waits, or was refused, or ended before."""
    if record.outcome is None:
        return say.WAITING
    if record.outcome != "refused":
        return say.ENDED
    return say.REFUSED_BECAUSE.format(reason=record.reason) if record.reason else say.REFUSED


def headline(records: Mapping[str, Record], instead_of: Mapping[str, float] | None = None) -> str:
    """Return one request under several policies in a sentence or three.

    Parameters
    ----------
    records : dict of policy to Record
        the same request, once for each policy.
    instead_of : dict of policy to float, optional
        seconds of prefill without reuse.
    """
    if not records:
        return say.EMPTY
    instead = instead_of or {}
    first = next(iter(records.values()))
    hits, total = [], None
    for policy, record in records.items():
        words = {"policy": say.POLICY[policy], "total": say.number(record.prompt_tokens)}
        if record.cached_tokens is None:
            hits.append(say.HEADLINE_WAITS.format(**words))
            continue
        other = say.HEADLINE_NEXT if total == record.prompt_tokens else say.HEADLINE_NEXT_OTHER
        text = say.HEADLINE_FIRST if total is None else other
        total = record.prompt_tokens
        hits.append(text.format(hit=say.number(record.cached_tokens), **words))
    out = say.HEADLINE.format(id=first.id) + ", ".join(hits) + "."
    measured = {policy: record for policy, record in records.items() if record.first_token is not None}
    if measured:
        times = []
        for policy, record in measured.items():
            time = say.seconds(record.prefill_seconds)
            if policy in instead and record.cached_tokens:
                time = say.HEADLINE_INSTEAD.format(time=time, full=say.seconds(instead[policy]))
            times.append(time if len(measured) == 1 else say.HEADLINE_POLICY.format(time=time, policy=say.POLICY[policy]))
        out += say.HEADLINE_PREFILL.format(times=", ".join(times))
    return out


def why(record: Record, unit: int, policy: str, others: Iterable[Record] | None = None) -> str:
    """Return one sentence that says why the match of `record` ended where it did.

    Parameters
    ----------
    record : Record
        the request.
    unit : int
        tokens in a block or page.
    policy : {"vllm", "sglang", "none"}
        whose words to use.
    others : iterable of Record, optional
        requests of the same cache; those that started earlier are compared with it token by token. An empty one means that
        there were none, None that nobody knows.
    """
    hit, total = record.cached_tokens, record.prompt_tokens
    one, many = say.UNIT[policy]
    words = {"total": say.tokens(total), "unit": say.unit(policy, unit), "units": many}
    if hit is None:
        if record.outcome == "refused" and record.reason:
            return say.WHY_REASON.format(reason=record.reason)
        return {None: say.WHY_WAITS, "refused": say.WHY_REFUSED}.get(record.outcome, say.WHY_ENDED)
    if policy == "none":
        return say.WHY_NONE.format(**words)
    if record.stopped == "skipped":
        return say.WHY_SKIPPED.format(**words)
    if record.stopped == "end":
        return say.WHY_END.format(**words)
    if record.stopped == "last_token":
        before = say.WHY_LAST_UNIT.format(split=_split(total - 1, unit, policy), units=many) if unit > 1 else ""
        return say.WHY_LAST + before
    if record.stopped == "unit":
        if not hit:
            return say.WHY_BELOW.format(**words)
        text = say.WHY_UNIT_ONE if total - hit == 1 else say.WHY_UNIT
        return text.format(split=_split(total, unit, policy), left=say.number(total - hit), unit=one, units=many)
    return _diverged(record, hit, unit, policy, others)


def _diverged(record: Record, hit: int, unit: int, policy: str, others: Iterable[Record] | None) -> str:
    """Return why a match ended at other or no cached tokens, with the words of the longest common prefix."""
    one = say.UNIT[policy][0]
    earlier = None if others is None else [o for o in others if o.id != record.id and before(o, record)]
    common = max((common_prefix(record.tokens[: record.prompt_tokens], o.tokens) for o in earlier or ()), default=0)
    if earlier is None or common < hit:  # the request that it shares with is not among those we were shown
        return say.WHY_UNKNOWN_END.format(n=say.tokens(hit)) if hit else say.WHY_UNKNOWN_START
    if not earlier:
        return say.WHY_NOTHING.format(total=say.tokens(record.prompt_tokens))
    if common == 0:
        return say.WHY_FIRST[policy]
    ended = common >= record.prompt_tokens
    if ended or common // unit * unit > hit:
        return say.WHY_GONE.format(n=say.tokens(common), hit=say.tokens(hit))
    if hit == 0:
        equal = say.WHY_EQUAL[common > 1].format(n=say.number(common))
        return say.WHY_FIRST_FEW[policy].format(equal=equal, unit=say.unit(policy, unit))
    source = say.SOURCE[record.source(common)]
    inside = record.source(common - 1) == record.source(common)
    if common == hit:
        return (say.WHY_DIFFERS_INSIDE if inside else say.WHY_DIFFERS).format(n=say.tokens(common), source=source)
    left = common - hit
    those = say.WHY_THOSE[left > 1].format(n=say.number(left))
    text = say.WHY_SHARED_INSIDE if inside else say.WHY_SHARED_UNIT
    return text.format(split=_split(common, unit, policy), those=those, unit=one, source=source)


def _split(tokens: int, unit: int, policy: str) -> str:
    """Return "1,000 = 62 blocks of 16 and 8 left over"."""
    whole, left = divmod(tokens, unit)
    text, units = say.WHY_SPLIT if left else say.WHY_WHOLE, say.count(whole, *say.UNIT[policy])
    return text.format(n=say.number(tokens), units=units, size=say.number(unit), left=say.number(left))


def before(other: Record, record: Record) -> bool:
    """Tell whether `other` was looked up before `record`."""
    return (math.inf if other.started is None else other.started) < (math.inf if record.started is None else record.started)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return how many tokens `a` and `b` share from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
