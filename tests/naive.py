"""Naive twins of the caches: no tree, no hash, no free list. What they say is right because there is nothing to get wrong."""

from __future__ import annotations


class NaiveCache:
    """Token lists whose K/V exist, never forgotten. Hits = unit * floor(min(common prefix, N - 1) / unit)."""

    def __init__(self, unit):
        self.unit = unit
        self.kept = []

    def keep(self, key, tokens):
        self.kept.append((key, list(tokens)))

    def hit(self, key, tokens):
        longest = max((common_prefix(tokens, there) for k, there in self.kept if k == key), default=0)
        return min(longest, len(tokens) - 1) // self.unit * self.unit


class Memory:
    """K and V as they would stand in the slots: what a slot holds tells the whole prefix that it was computed from."""

    def __init__(self):
        self.slots = {}

    def write(self, key, tokens, start, slots):
        for i, slot in enumerate(slots.tolist(), start):
            self.slots[slot] = (key, tuple(tokens[: i + 1]))

    def spoil(self, slots):
        for slot in slots.tolist():
            self.slots[slot] = "garbage"

    def holds(self, key, tokens, slots):
        """Tell whether `slots` hold the K/V of the first ``len(slots)`` tokens."""
        return all(self.slots.get(slot) == (key, tuple(tokens[: i + 1])) for i, slot in enumerate(slots.tolist()))


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
