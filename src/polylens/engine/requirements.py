"""What the engine needs of libraries, beyond what the package lets be installed.

One wheel must install beside a vLLM that pins older versions (`hosts/vllm`, which does not use the engine).
"""

from __future__ import annotations

from importlib.metadata import version

from polylens.errors import ModelLoadError

MINIMUM = {"transformers": (5, 24), "llguidance": (1, 9)}
"""Of transformers, the version that the modelling code's borders were read and run with."""


def check_requirements() -> None:
    """Raise ModelLoadError, in one line, for a library that is too old for the engine."""
    for library, needed in MINIMUM.items():
        found = version(library)
        if tuple(int(part) for part in found.split(".")[:2]) < needed:
            wanted = ".".join(map(str, needed))
            raise ModelLoadError(f"polylens' engine needs {library} >= {wanted}, found {found}: upgrade it")
