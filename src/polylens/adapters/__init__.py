"""Read, check, fit and digest LoRA adapters. Knows files and names, no model code."""

from polylens.adapters.combine import Combination
from polylens.adapters.describe import AdapterDescription, describe_adapter
from polylens.adapters.load import ComponentReport, LoadReport, load_adapter
from polylens.adapters.merge import merge_into, merged_weight
from polylens.adapters.options import LoraOptions
from polylens.adapters.read import AdapterFiles, read_adapter

__all__ = [
    "AdapterDescription",
    "AdapterFiles",
    "Combination",
    "ComponentReport",
    "LoadReport",
    "LoraOptions",
    "describe_adapter",
    "load_adapter",
    "merge_into",
    "merged_weight",
    "read_adapter",
]
