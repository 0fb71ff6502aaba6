"""`polylens verify`: are dynamic adapters equal to merged checkpoints, on this model, with these adapters?"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polylens.cli.options import (
    AdapterOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    TrustOption,
    parse_adapters,
)
from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polylens.engine.compare import Comparison
    from polylens.engine.verify import AdapterCheck, LayerCheck, Verification


def verify(
    model: ModelArgument,
    adapter: AdapterOption = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            "--image", metavar="FILE", help="A picture to ask about. Repeat for more. Without any, some are made."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, metavar="N", help="Answer tokens to compare.")] = 16,
    json_output: JsonOption = False,
    device: DeviceOption = "cpu",
    trust_remote_code: TrustOption = False,
) -> None:
    """Check that adapters in a mixed batch answer exactly as their merged checkpoints do.

    All adapters and the base run in one batch, and each adapter alone merged into the weights: by PEFT, or by
    polylens itself where PEFT is not installed. Compared are every adapted layer, the logits and the greedy
    tokens, in float32 (it needs memory for two float32 copies of the model). Exit code 1 if they are not equal.
    """
    adapters = parse_adapters(adapter)
    if not adapters:
        raise RequestError("nothing to verify: give at least one --adapter")
    # Heavy imports come after what can be refused at once, and the model after the pictures.
    from polylens.models.media import load_image

    images = [load_image(path) for path in image or ()]
    from polylens.engine.verify import verify as run_verify

    result = run_verify(
        model,
        adapters,
        images=images,
        max_tokens=max_tokens,
        device=device,
        trust_remote_code=trust_remote_code,
        tell=_tell if sys.stderr.isatty() else lambda _line: None,
    )
    typer.echo(json.dumps(verification_json(result)) if json_output else "\n".join(_lines(result)))
    if not result.ok:
        raise typer.Exit(1)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def verification_json(result: Verification) -> dict[str, Any]:
    """What `--json` prints. A value that is not finite is null: JSON has no word for it."""
    return {
        "reference": result.reference,
        "adapters": {
            name: {
                "layers": [
                    {
                        "name": layer.name,
                        "component": layer.component,
                        "rows": layer.rows,
                        "max_abs_err": _finite(layer.max_abs_err),
                        "rel_err": _finite(layer.rel_err),
                    }
                    for layer in check.layers
                ],
                **_comparison_json(check.comparison),
                "problems": list(check.problems),
            }
            for name, check in result.adapters.items()
        },
        "base": _comparison_json(result.base),
        "ok": result.ok,
    }


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "logits": {"max_abs_err": _finite(comparison.max_logit_error)},
        "tokens_equal": comparison.tokens_equal,
        "ties": comparison.num_ties,
        "requests": comparison.num_requests,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _lines(result: Verification) -> Iterator[str]:
    yield f"reference: {'PEFT merge_and_unload' if result.reference == 'peft' else 'own merge (PEFT is not installed)'}"
    yield _line("base", result.base)
    for name, check in result.adapters.items():
        yield _line(name, check.comparison)
        yield from _layer_lines(check)
        yield from (f"    {problem}" for problem in check.problems)
    yield "equal (--json lists every layer)" if result.ok else "NOT EQUAL (--json lists every layer)"


def _line(name: str, comparison: Comparison) -> str:
    tokens = "tokens equal" if comparison.tokens_equal else "tokens DIFFER"
    return (
        f"{name}: {comparison.num_requests} requests, {tokens}, {comparison.num_ties} ties, "
        f"largest logit error {comparison.max_logit_error:.2g}"
    )


def _layer_lines(check: AdapterCheck) -> Iterator[str]:
    """The worst layer of each component; `--json` has them all."""
    by_component: dict[str, list[LayerCheck]] = {}
    for layer in check.layers:
        by_component.setdefault(layer.component, []).append(layer)
    for component, layers in by_component.items():
        worst = max(layers, key=lambda layer: layer.rel_err)
        rows = max(layer.rows for layer in layers)
        yield f"    {component:<14}  {len(layers)} layers, {rows} rows; relative error at most {worst.rel_err:.1e}"
        yield f"        worst: {worst.name}, absolute {worst.max_abs_err:.1e}"
