"""`polylens batch`: answer a file of requests in one mixed batch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from polylens.cli.batch_file import error_line, read_lines, result_line, write_whole
from polylens.cli.options import (
    BASE_NAME,
    AdapterOption,
    DeviceOption,
    DType,
    DTypeOption,
    KvBytesOption,
    MaxModelLenOption,
    ModelArgument,
    TrustOption,
    open_llm,
    parse_adapters,
)
from polylens.errors import PolylensError, RequestError


def batch(
    model: ModelArgument,
    input_file: Annotated[
        Path, typer.Option("--input", metavar="FILE", help="Requests, one JSON object a line (OpenAI batch format).")
    ],
    output_file: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="Where the answers go, one line a request, same order.")
    ],
    adapter: AdapterOption = None,
    dtype: DTypeOption = DType.AUTO,
    device: DeviceOption = "cpu",
    max_model_len: MaxModelLenOption = None,
    kv_bytes: KvBytesOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Answer a file of requests in the OpenAI batch format, all adapters mixed in one batch.

    A line: {"custom_id": "a", "body": {"model": "gauges", "messages": […], "max_tokens": 32}}. `model` names an
    adapter, or the base model as "base" or as given for MODEL. Pictures: data URLs, or files relative to the
    input file. A line that cannot be served gets an error object in its output line; the others go on.
    """
    adapters = parse_adapters(adapter)
    _check_output(input_file, output_file)
    lines = read_lines(input_file, adapters, base_names=(BASE_NAME, model))
    requests = [line.request for line in lines if line.request is not None]
    with open_llm(
        model,
        adapters,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        max_model_len=max_model_len,
        kv_bytes=kv_bytes,
    ) as llm:
        answers = iter(llm.generate(requests, on_error="return", progress=sys.stderr.isatty()))
        tokenizer = llm.loaded.processing.tokenizer
    written, num_failed = [], 0
    for line in lines:
        outcome = line.error if line.error is not None else next(answers)
        if isinstance(outcome, PolylensError):
            num_failed += 1
            written.append(error_line(line, outcome))
        else:
            written.append(result_line(line, outcome, decode=lambda token: str(tokenizer.decode([token]))))
    write_whole(output_file, "".join(written))
    print(f"{len(lines) - num_failed} of {len(lines)} requests answered: {output_file}", file=sys.stderr)


def _check_output(input_file: Path, output_file: Path) -> None:
    """Refuse before the work what would fail after it."""
    if not output_file.absolute().parent.is_dir():
        raise RequestError(f"--output {output_file}: the folder {output_file.absolute().parent} does not exist")
    if output_file.is_dir():
        raise RequestError(f"--output {output_file} is a folder; name a file")
    if output_file.exists() and input_file.exists() and output_file.samefile(input_file):
        raise RequestError(f"--output {output_file} is the input file; name another")
