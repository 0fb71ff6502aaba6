"""The embedded tiny model, its adapters and held-out pictures, and what `polylens demo` does with them."""

from polylens.demo.data import ADAPTERS, DOMAINS, PROMPT, adapter_paths, heldout, model_path, score

__all__ = ["ADAPTERS", "DOMAINS", "PROMPT", "adapter_paths", "heldout", "model_path", "score"]
