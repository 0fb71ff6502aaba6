"""An engine without a model, for scheduler tests: what it stores says exactly what was computed from what.

The "KV" of a token is a hash of all a real one depends on: the adapter's language digest, every token and media
row before it, and the rest of its bidirectional span. Before computing a chunk the simulation reads all earlier
slots and compares them with hashes made from scratch, so a page that is shared, kept or reused wrongly shows.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from itertools import pairwise

from polylens.core import Adapter, Digests, SamplingParams
from polylens.engine.pages import PageAllocator
from polylens.engine.prefix_cache import PrefixCache
from polylens.engine.scheduler import AdapterGate, Scheduler
from polylens.engine.sequence import MediaSpan, Sequence
from polylens.engine.step_plan import StepPlan

NUM_TOKEN_IDS = 5
MEDIA_TOKEN = 99
"""Small vocabularies make equal prefixes, and so prefix hits, likely."""


def make_adapter(language_digest: str) -> Adapter:
    digests = Digests("", "", language_digest, "", language_digest)
    return Adapter(language_digest, "nowhere", {}, digests, num_bytes=0)


def make_sequence(name: str, prompt: list[int], *, max_tokens: int = 4, adapter=None, media=(), spans=()) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Sequence(name, adapter, prompt, sampling, media=tuple(media), bidirectional_spans=tuple(spans))


def random_sequence(rng: random.Random, name: str, adapters: list, *, longest_span: int = 9) -> Sequence:
    """A prompt of text runs and media items; an item's tokens may be split in two runs, and may be one span."""
    prompt: list[int] = []
    media: list[MediaSpan] = []
    spans: list[tuple[int, int]] = []
    for item in range(rng.choice((0, 0, 1, 2, 3))):
        prompt += _text(rng)
        length, key = rng.randint(1, longest_span), rng.choice("AB")
        bidirectional = rng.random() < 0.5
        cut = length if bidirectional else rng.randint(1, length)
        spans += [(len(prompt), len(prompt) + length)] if bidirectional else []
        for offset, run in ((0, cut), (cut, length - cut)):
            if run:
                media.append(MediaSpan(len(prompt), run, f"{key}{length}", item, offset))
                prompt += [MEDIA_TOKEN] * run + ([] if bidirectional else _text(rng))
    prompt += _text(rng) or [0]
    return make_sequence(
        name, prompt, max_tokens=rng.choice((1, 3, 12, 30)), adapter=rng.choice(adapters), media=media, spans=spans
    )


def _text(rng: random.Random) -> list[int]:
    start = rng.choice((0, 0, 0, 1))
    return [(start + index) % NUM_TOKEN_IDS for index in range(rng.choice((0, 1, 4, 11)))]


def contents(seq: Sequence) -> list[bytes]:
    """What the KV of each token of `seq` depends on, made from scratch."""
    rows: dict[int, tuple] = {}
    for span in seq.media:
        for index in range(span.length):
            rows[span.start + index] = (span.vision_key, span.offset_in_item + index)
    state = _hash("root", seq.adapter.language_digest if seq.adapter else "")
    found: list[bytes] = []
    while len(found) < seq.num_tokens:
        start = len(found)
        stop = next((span[1] for span in seq.bidirectional_spans if span[0] == start), start + 1)
        state = _hash(state, *((seq.token_ids[at], rows.get(at)) for at in range(start, stop)))
        found += [_hash(state, at) for at in range(start, stop)]
    return found


def next_token(content: bytes) -> int:
    return content[0] % NUM_TOKEN_IDS


def answer_alone(seq: Sequence) -> list[int]:
    """The tokens `seq` generates when it is computed with nothing else around."""
    alone = make_sequence("alone", list(seq.prompt_ids), adapter=seq.adapter, media=seq.media)
    alone.bidirectional_spans = seq.bidirectional_spans
    for _ in range(seq.sampling.max_tokens):
        alone.append(next_token(contents(alone)[-1]))
    return alone.output_ids


def _hash(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


@dataclass
class SimulatedEngine:
    """Scheduler, allocator and prefix cache around a store of hashes; every step is checked."""

    page_tokens: int = 4
    num_pages: int = 16
    max_step_tokens: int = 12
    max_running: int = 4
    prefix_cache: bool = True
    gate: AdapterGate | None = None
    done: list[Sequence] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(self.num_pages)
        self.cache = PrefixCache(self.page_tokens, self.allocator) if self.prefix_cache else None
        self.scheduler = Scheduler(
            page_tokens=self.page_tokens,
            max_step_tokens=self.max_step_tokens,
            max_running=self.max_running,
            allocator=self.allocator,
            prefix_cache=self.cache,
            gate=self.gate,
        )
        self.store: dict[tuple[int, int], bytes] = {}
        self.computed: dict[Sequence, int] = {}
        """Tokens computed since the sequence was last admitted, with those it got from the cache."""

    def step(self) -> StepPlan:
        before = {seq: seq.num_preemptions for seq in self.scheduler.running}
        plan = self.scheduler.schedule()
        self.num_preemptions += sum(seq.num_preemptions - count for seq, count in before.items())
        self.check_plan(plan)
        for entry in plan.entries:
            self.compute(entry)
        self.scheduler.on_computed(plan)
        self.scheduler.check_integrity()
        for seq in (entry.seq for entry in plan.entries if entry.samples):
            seq.append(next_token(contents(seq)[-1]))
            if len(seq.output_ids) == seq.sampling.max_tokens:
                self.scheduler.abort(seq)
                self.done.append(seq)
                self.num_cached_tokens += seq.cached_tokens
        self.scheduler.check_integrity()
        return plan

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.entries or not self.scheduler.has_unfinished() or self.gate is not None
        assert len({entry.seq for entry in plan.entries}) == len(plan.entries)
        assert len(self.scheduler.running) <= self.max_running
        if plan.num_tokens > self.max_step_tokens:
            (entry,) = plan.entries
            assert (entry.start, entry.stop) in entry.seq.bidirectional_spans
        adapters = [entry.seq.adapter for entry in plan.entries]
        changes = sum(a is not b for a, b in pairwise(adapters))
        assert changes == max(len(set(map(id, adapters))) - 1, 0), "entries of one adapter are not neighbours"

    def compute(self, entry) -> None:
        seq, expected = entry.seq, contents(entry.seq)
        assert entry.start == seq.num_computed < entry.stop <= seq.num_tokens
        assert entry.samples == (entry.stop == seq.num_tokens)
        for start, stop in seq.bidirectional_spans:
            assert not start < entry.stop < stop, "a span is cut"
        slots = [(seq.page_table[at // self.page_tokens], at % self.page_tokens) for at in range(entry.stop)]
        for at in range(entry.start):
            assert self.store[slots[at]] == expected[at], f"{seq.request_id}: wrong KV at {at}"
        for at in range(entry.start, entry.stop):
            assert self.allocator.users(slots[at][0]) == 1, "written to a page that others use"
            self.store[slots[at]] = expected[at]

    def run(self, limit: int = 20_000) -> list[Sequence]:
        for _ in range(limit):
            if not self.scheduler.has_unfinished():
                return self.done
            self.step()
        raise AssertionError(f"not done after {limit} steps")
