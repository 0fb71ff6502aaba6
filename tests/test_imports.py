"""Imports go downward only: errors, config, core < adapters | models < lora < engine < server < cli."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import polylens

SOURCE = Path(polylens.__file__).parent

BASE = {"errors", "config", "core", "disk_cache", "native"}
ENGINE = BASE | {"adapters", "models", "lora", "engine"}

ALLOWED = {
    "errors": set(),
    "config": {"errors"},
    "core": {"errors", "config"},
    "disk_cache": set(),
    "native": {"disk_cache"},
    "adapters": BASE,
    "models": BASE,
    "lora": BASE | {"adapters", "models"},
    "engine": BASE | {"adapters", "models", "lora"},
    "server": ENGINE,
    # Leaves: nothing but the command line imports them.
    "demo": ENGINE,
    "bench": ENGINE,
    "hosts": ENGINE | {"server"},
    "cli": ENGINE | {"server", "demo", "bench", "hosts"},
    "__main__": {"cli"},
    "__init__": {"core", "errors", "engine"},
}
"""What each part of polylens may import beside itself. `import polylens` alone gives only what __init__ does."""


def part_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(tree: ast.Module) -> set[str]:
    """Names right below `polylens` that a file imports, wherever in the file it does so."""
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            parts |= {alias.name.partition("polylens.")[2].split(".")[0] for alias in node.names if is_ours(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where something comes from"
            if node.module == "polylens":
                parts |= {alias.name for alias in node.names}
            elif node.module and is_ours(node.module):
                parts.add(node.module.split(".")[1])
    return parts


def is_ours(module: str) -> bool:
    return module.split(".")[0] == "polylens"


def forbidden(part: str, parts: set[str]) -> set[str]:
    allowed = ALLOWED[part] | {part}
    # `from polylens import LLM`, `import polylens`: allowed to whom the engine is.
    from_top = {name for name in parts if name not in ALLOWED}
    wrong = parts - from_top - allowed
    return wrong if "engine" in allowed or part == "__init__" else wrong | from_top


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_go_downward_only(file: Path):
    wrong = forbidden(part_of(file), imported_parts(ast.parse(file.read_text())))
    assert not wrong, f"{part_of(file)} must not import {sorted(wrong)}"


@pytest.mark.parametrize(
    ("part", "line", "wrong"),
    [
        ("models", "from polylens.lora.context import RoutingContext", {"lora"}),
        ("adapters", "def f():\n    import polylens.models.loading", {"models"}),
        ("engine", "from polylens.demo import data", {"demo"}),
        ("lora", "from polylens import LLM", {"LLM"}),
        ("cli", "from polylens import LLM, __version__", set()),
        ("cli", "from polylens.engine.llm import LLM", set()),
        ("core", "import torch", set()),
    ],
)
def test_the_check_can_fail(part: str, line: str, wrong: set[str]):
    assert forbidden(part, imported_parts(ast.parse(line))) == wrong


def test_there_is_no_utils():
    assert not [file for file in SOURCE.rglob("*") if file.stem in {"utils", "util", "helpers", "misc"}]
