"""The time axis: when the model worked, with long idle times left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlab.trace.recorder import Record, Step

CUT, KEPT = 0.06, 0.015  # idle times longer than CUT of all work are shortened to KEPT of it


@dataclass(frozen=True)
class Clock:
    """Turns the trace's seconds into places on the axis, where long idle times are left out.

    `cuts` are the places where time is missing, `now` is when anything last happened.
    """

    real: np.ndarray
    axis: np.ndarray
    cuts: tuple[float, ...]
    now: float

    @classmethod
    def of(cls, records: Sequence[Record], steps: Sequence[Step]) -> Clock:
        """Build it from the times at which anything happened."""
        busy = sorted([*((s.begin, s.end) for s in steps), *((r.started, ended(r)) for r in records if r.started is not None)])
        first = min(r.started for r in records if r.started is not None)
        busy = [(max(a, first), b) for a, b in busy if b >= first]
        merged = [list(busy[0])]
        for a, b in busy[1:]:
            if a <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], b)
            else:
                merged.append([a, b])
        work = sum(b - a for a, b in merged) or 1.0
        real, axis, cuts, at = [merged[0][0]], [0.0], [], 0.0
        for i, (a, b) in enumerate(merged):
            if i:
                gap = a - merged[i - 1][1]
                kept = KEPT * work if gap > CUT * work else gap
                if kept < gap:
                    cuts.append(at + kept / 2)
                at += kept
                real.append(a)
                axis.append(at)
            at += b - a
            real.append(b)
            axis.append(at)
        return cls(np.array(real), np.array(axis), tuple(cuts), merged[-1][1])

    def at(self, seconds: float) -> float:
        """Return the place of a moment."""
        return float(np.interp(seconds, self.real, self.axis))


def ended(record: Record) -> float:
    """Return when a request ended, or until when it is known to have worked."""
    times = [t for t in (record.started, record.first_token, record.finished) if t is not None]
    running = record.finished is None and record.first_token is not None
    return max(times) + (record.decode_seconds if running else 0.0)
