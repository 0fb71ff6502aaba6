"""The vision stage: media items in, features out, each item under its own request's adapter.

Features are cached by content (mechanism 2): the key holds the picture's bytes, the processor's settings
and the digest of the adapter's tower and connector deltas. So adapters that leave the vision part alone
share the base model's features, and a reloaded adapter can never meet stale ones.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from polylens.errors import InternalError, PolylensError
from polylens.models.encoder import encode
from polylens.models.features import ItemFeatures
from polylens.models.prepared import ProcessedItem, pixel_tensors
from polylens.models.row_rules import ItemSize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from polylens.core import Adapter
    from polylens.lora.context import RoutingContext
    from polylens.models.loading import LoadedModel


@dataclass(frozen=True, eq=False)
class EncodeJob:
    """One item to encode for one request. `adapter`: None for the base model's features."""

    key: str
    item: ProcessedItem
    adapter: Adapter | None

    @classmethod
    def of(cls, item: ProcessedItem, adapter: Adapter | None, salt: str = "") -> EncodeJob:
        """salt: keeps requests from finding, by the time it takes, what those with other salts have shown."""
        digest = adapter.vision_digest if adapter else ""
        parts = f"{item.kind}\0{item.media_key}\0{item.settings_key}\0{digest}\0{salt}"
        key = hashlib.sha256(parts.encode()).hexdigest()
        return cls(key, item, adapter if digest else None)

    @property
    def digest(self) -> str:
        return self.adapter.vision_digest if self.adapter else ""


class VisionCache:
    """Least-recently-used features within a byte budget. Entries larger than the budget are not kept."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[str, ItemFeatures] = OrderedDict()
        self._digests: dict[str, str] = {}
        """Digest of the vision deltas by key."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> ItemFeatures | None:
        features = self._entries.get(key)
        if features is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return features

    def put(self, key: str, features: ItemFeatures, digest: str = "") -> None:
        if features.num_bytes > self.max_bytes or key in self._entries:
            return
        self._entries[key] = features
        self._digests[key] = digest
        self.num_bytes += features.num_bytes
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))

    def forget(self, digest: str) -> int:
        """Drop what was made with these vision deltas, which are gone; returns the bytes freed."""
        before = self.num_bytes
        for key in [key for key, made_with in self._digests.items() if made_with == digest]:
            self._drop(key)
        return before - self.num_bytes

    def _drop(self, key: str) -> None:
        self.num_bytes -= self._entries.pop(key).num_bytes
        del self._digests[key]

    def clear(self) -> None:
        self._entries.clear()
        self._digests.clear()
        self.num_bytes = 0

    def check_integrity(self) -> None:
        """Raise InternalError unless the counts are those of the entries, within the budget."""
        actual = sum(entry.num_bytes for entry in self._entries.values())
        if self.num_bytes != actual or actual > self.max_bytes or self._digests.keys() != self._entries.keys():
            raise InternalError(
                f"vision cache: {len(self._entries)} entries of {actual} bytes, {self.num_bytes} counted of "
                f"{self.max_bytes}, {len(self._digests)} digests"
            )


class VisionStage:
    """Encodes what a step needs, in batches of at most `max_rows` input rows, sorted by adapter.

    `mixed`: whether one batch may hold several adapters; False where the probe could not prove a row rule
    (then every batch holds one adapter: slower, never wrong).
    """

    def __init__(self, loaded: LoadedModel, context: RoutingContext, cache: VisionCache, max_rows: int) -> None:
        self._loaded = loaded
        self._context = context
        self.cache = cache
        self._max_rows = max_rows
        self.mixed = True
        self.num_runs = 0
        self.num_items = 0
        self.num_rows = 0

    def encode(self, jobs: Sequence[EncodeJob]) -> dict[str, ItemFeatures | PolylensError]:
        """Features by job key. A batch that fails puts its error in place of its items' features."""
        done: dict[str, ItemFeatures | PolylensError] = {}
        missing: dict[str, EncodeJob] = {}
        for job in {job.key: job for job in jobs}.values():
            features = self.cache.get(job.key)
            if features is None:
                missing[job.key] = job
            else:
                done[job.key] = features
        for batch in self._batches(missing.values()):
            done.update(self._run(batch))
        return done

    def _run(self, batch: list[EncodeJob]) -> dict[str, ItemFeatures | PolylensError]:
        items = [job.item for job in batch]
        self.num_runs += 1
        self.num_items += len(items)
        self.num_rows += sum(encoder_rows(self._loaded, item) for item in items)
        try:
            with self._context.encoder([ItemSize.of(item) for item in items], [job.adapter for job in batch]):
                features = encode(self._loaded.inner, items, dtype=self._loaded.dtype, notes=self._loaded.notes)
        except PolylensError as error:
            return {job.key: error for job in batch}
        # A view would keep the whole batch's memory alive in the cache.
        features = [ItemFeatures(f.rows.clone(), tuple(level.clone() for level in f.deepstack)) for f in features]
        for job, item_features in zip(batch, features, strict=True):
            self.cache.put(job.key, item_features, job.digest)
        return {job.key: item_features for job, item_features in zip(batch, features, strict=True)}

    def _batches(self, jobs: Iterable[EncodeJob]) -> Iterator[list[EncodeJob]]:
        """Group by kind (and adapter, unless mixed), sort by adapter, cut at the row budget.

        An adapter that changes what all items share has a group of its own.
        """

        def group(job: EncodeJob) -> tuple[str, str]:
            alone = not self.mixed or (job.adapter is not None and job.adapter.undivided)
            return (job.item.kind, job.digest if alone else "")

        ordered = sorted(jobs, key=lambda job: (job.item.kind, job.digest))
        for _, members in groupby(ordered, key=group):
            yield from self._cut(members)

    def _cut(self, jobs: Iterable[EncodeJob]) -> Iterator[list[EncodeJob]]:
        batch: list[EncodeJob] = []
        num_rows = 0
        for job in jobs:
            rows = encoder_rows(self._loaded, job.item)
            if batch and num_rows + rows > self._max_rows:
                yield batch
                batch, num_rows = [], 0
            batch.append(job)
            num_rows += rows
        if batch:
            yield batch


def encoder_rows(loaded: LoadedModel, item: ProcessedItem) -> int:
    """Input rows of an item in the tower: its patches, or its tiles' pixels in patches."""
    pixels = next(iter(pixel_tensors(item.tensors).values()))
    if pixels.dim() < 4:
        return pixels.shape[:-1].numel()
    patch = getattr(getattr(loaded.config, "vision_config", None), "patch_size", 1)
    side = patch if isinstance(patch, int) else patch[0]
    return pixels.shape[:-3].numel() * (pixels.shape[-2] // side) * (pixels.shape[-1] // side)
