"""Shared test set-up: one thread a process (2-core machines, several workers), no hub access."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

torch.set_num_threads(1)

from tests.families.fixtures import checkpoint, own_cache_folder  # noqa: E402, F401
