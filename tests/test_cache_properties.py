"""Whatever a scheduler asks for, in any order: the caches keep their invariants, hit what there is, and hit the right K/V."""

from __future__ import annotations

import random

import pytest
from naive import Memory, NaiveCache

from kvlab.cache.block_cache import BlockCache
from kvlab.cache.contract import Grant, Refused, Space
from kvlab.cache.eviction import POLICIES
from kvlab.cache.plain_cache import PlainCache
from kvlab.cache.radix_cache import RadixCache

# Few heads and few different tokens, so that prompts share and part at every place.
HEADS = ([], [1] * 9, [1] * 9 + [2] * 9, [0, 1, 2] * 8)
SPACES = (Space(), Space(), Space(), Space(salt="a"), Space(lora=("l", "adapters/l")), Space(extra_key="l"))


def namespace(cache, space):
    """Return what must be equal for two prompts to share: vLLM knows no extra key, SGLang joins the LoRA's name to it."""
    lora = space.lora[0] if space.lora else None
    return (space.salt, lora or space.extra_key) if cache.policy == "sglang" else (space.salt, lora)


def any_cache(kind, rng):
    unit = rng.choice([1, 2, 4, 5])
    units = rng.choice([None, None, None, 8, 20, 60])
    blocks, tokens = (None, None) if units is None else (units + 1, units * unit)
    match kind:
        case "vllm":
            return BlockCache(blocks, unit)
        case "sglang":
            return RadixCache(tokens, unit, rng.choice(sorted(POLICIES)))
        case "plain":
            return PlainCache(tokens, unit)
        case "off":
            return rng.choice([BlockCache(blocks, unit, enable_caching=False), RadixCache(tokens, unit, enable=False)])


class AnyScheduler:
    """A scheduler without sense: it adds, takes, commits, fails and releases as it likes, and holds the cache to its word."""

    def __init__(self, kind, seed):
        self.rng = rng = random.Random(seed)
        self.cache = cache = any_cache(kind, rng)
        cache.events()
        self.state = cache.snapshot()
        self.naive = NaiveCache(cache.unit)
        self.memory = Memory()
        self.born = self.hits = 0
        self.reuses = kind in ("vllm", "sglang")
        self.exact = cache.num_tokens is None  # nothing is evicted then: everything that was computed can be hit

    def run(self, calls):
        for _ in range(calls):
            choices = [self.add, self.peek, self.match, self.reset]
            weights = [6, 2, 2, 0.3]
            if not self.exact:
                choices.append(self.evict)
                weights.append(1)
            if self.state.rows:
                choices += [self.step, self.release]
                weights += [12, 3]
            self.rng.choices(choices, weights)[0]()
            self.verify()

    # ------------------------------------------------------------------ what may happen
    def add(self):
        self.born += 1
        read, priority = self.rng.random() < 0.9, self.rng.randint(-1, 1)
        self.cache.add(f"r{self.born}", self.tokens(), self.space(), read=read, priority=priority)

    def step(self):
        """One batch, a forward pass and its commit; or a fault, and all of it fails."""
        ids = self.batch()
        budget, headroom = self.rng.choice([None, None, self.rng.randint(0, 40)]), self.rng.choice([0, 0, 7])
        before, known, prefilling = self.cache.snapshot(), len(self.naive.kept), self.prefilling(ids)
        answers = self.cache.take(ids, budget, headroom)
        self.judge(ids, answers, budget, before)
        grants = [answer for answer in answers if isinstance(answer, Grant)]
        if self.rng.random() < 0.9:
            self.forward(grants, prefilling)
            return
        for grant in grants:
            self.memory.spoil(grant.slots)
            self.cache.release(grant.id, "failed")
        del self.naive.kept[known:]

    def release(self):
        id, why = self.rng.choice(sorted(self.state.rows)), self.rng.choice(["stop", "length", "abort", "preempt", "preempt"])
        row = self.cache.row(id)
        if why in ("stop", "length") and self.cache.policy == "sglang":
            self.keep(row, row.written)
        self.cache.release(id, why)
        assert self.cache.waits(id) is (why == "preempt")

    def peek(self):
        tokens, space = self.tokens(), self.space()
        before = self.cache.snapshot()
        found = self.cache.peek(tokens, space)
        assert self.cache.snapshot() == before
        self.check_hit(found.tokens, tokens, space)
        assert len(found.slots) == found.tokens
        assert self.memory.holds(namespace(self.cache, space), tokens, found.slots)
        assert self.reuses or found.stopped == "skipped"

    def match(self):
        tokens = self.tokens()
        found = self.cache.match(tokens)
        assert self.memory.holds(namespace(self.cache, Space()), tokens, found.slots)
        if self.cache.policy == "sglang" and self.reuses and self.exact:  # of the full length, unlike peek
            assert found.tokens == self.naive.hit(namespace(self.cache, Space()), [*tokens, -1])

    def evict(self):
        tokens, before = self.rng.randint(0, 20), self.cache.sizes()
        gone = self.cache.evict(tokens)
        assert gone >= min(tokens, before.evictable)
        assert self.cache.sizes().evictable == before.evictable - gone

    def reset(self):
        if self.cache.reset():
            self.naive.kept.clear()
            assert not self.cache.sizes().evictable
        else:
            assert self.cache.runs()

    # ------------------------------------------------------------------ what must be true
    def verify(self):
        self.cache.check_integrity()
        self.state.fold(self.cache.events())
        assert self.state == self.cache.snapshot(), "the events tell another story"
        sizes = self.cache.sizes()
        if sizes.free is not None and not self.cache.runs():
            assert (sum(sizes), sizes.protected) == (self.cache.num_tokens, 0)
        for row in self.state.rows.values():
            key = namespace(self.cache, row.space)
            assert self.memory.holds(key, row.tokens, row.slots[: row.written]), f"{row.id} reads what is not its own"

    def judge(self, ids, answers, budget, before):
        """Hold the answers of one take to the contract; vLLM's blocks can be hit from the moment they are scheduled."""
        assert [answer.id for answer in answers] == ids
        refused = [answer for answer in answers if isinstance(answer, Refused)]
        assert answers[len(answers) - len(refused) :] == refused, "somebody was granted slots after a refusal"
        if refused and before.rows[ids[-1]].running and self.cache.policy == "sglang" and ids[-1] not in self.prefilling(ids):
            pass  # a decode batch is refused as one
        else:
            assert all(answer.why == "not_reached" for answer in refused[1:])
        assert all((answer.hit is None) is (answer.why == "not_reached") for answer in refused)
        grants = [answer for answer in answers if isinstance(answer, Grant)]
        assert budget is None or sum(len(grant.slots) for grant in grants) <= budget
        slots = [slot for grant in grants for slot in grant.slots.tolist()]
        assert len(slots) == len(set(slots)), "a slot was granted twice"
        for grant in grants:
            row, was = self.cache.row(grant.id), before.rows[grant.id]
            assert grant.start == (len(was.slots) if was.running else grant.hit)
            assert grant.todo == len(row.tokens) - len(row.slots)
            if not was.running:
                self.check_hit(grant.hit, row.tokens, row.space, read=row.read)
            if self.cache.policy == "vllm":
                self.keep(row, len(row.slots))

    def check_hit(self, hit, tokens, space, *, read=True):
        most = self.naive.hit(namespace(self.cache, space), tokens) if self.reuses and read else 0
        assert hit == most if self.exact else hit <= most
        self.hits += hit > 0

    def forward(self, grants, prefilling):
        """Write all K/V of the step, then commit; now and then somebody is cancelled in between."""
        for grant in grants:
            row = self.cache.row(grant.id)
            self.memory.write(namespace(self.cache, row.space), row.tokens, grant.start, grant.slots)
        if grants and not self.exact and self.rng.random() < 0.1:  # a block of it loses its key, whoever else reads it
            self.cache.release(grants.pop(0).id, "abort")
        rows = {grant.id: self.cache.row(grant.id) for grant in grants}
        for moved in self.cache.commit(list(rows)):
            rows[moved.id].slots[moved.start : moved.start + len(moved.slots)] = moved.slots
        for grant in grants:
            row = self.cache.row(grant.id)
            assert row.slots.tolist() == rows[grant.id].slots.tolist(), "Moved does not tell where the row stands"
            assert row.written == len(row.slots)
            if grant.id in prefilling:
                self.keep(row, row.written)
            if grant.todo == 0:
                self.cache.append(grant.id, self.rng.randint(0, 2))

    # ------------------------------------------------------------------ for them
    def tokens(self):
        return self.rng.choice(HEADS) + [self.rng.randint(0, 2) for _ in range(self.rng.randint(1, 12))]

    def space(self):
        return self.rng.choice(SPACES)

    def batch(self):
        """Return ids that one `take` allows: SGLang prefills or decodes, never both."""
        ids = sorted(self.state.rows)
        if self.cache.policy == "sglang":
            prefilling = self.prefilling(ids)
            ids = self.rng.choice([group for group in (prefilling, [id for id in ids if id not in prefilling]) if group])
        return self.rng.sample(ids, self.rng.randint(1, min(len(ids), 4)))

    def prefilling(self, ids):
        """Return those of `ids` that will join SGLang's tree when their next slots are committed."""
        return [id for id in ids if self.cache.policy == "sglang" and (self.cache.waits(id) or self.cache.prefills(id))]

    def keep(self, row, count):
        self.naive.keep(namespace(self.cache, row.space), row.tokens[: count // self.cache.unit * self.cache.unit])


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_any_order_of_calls(kind, seed):
    scheduler = AnyScheduler(kind, seed)
    scheduler.run(80)
    assert scheduler.hits or not scheduler.exact


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["plain", "off"])
def test_any_order_of_calls_without_reuse(kind, seed):
    scheduler = AnyScheduler(kind, seed)
    scheduler.run(60)
    assert not scheduler.hits


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["vllm", "sglang", "plain", "off"])
def test_any_order_of_many_calls(kind):
    for seed in range(1000, 1500):
        AnyScheduler(kind, seed).run(150)
