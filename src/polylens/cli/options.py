"""Options that several commands share, and the reading of `--adapter`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from polylens.config import EngineConfig
from polylens.core import BASE_NAME
from polylens.errors import AdapterFormatError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polylens.engine.llm import LLM

T = TypeVar("T")

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


class DType(StrEnum):
    """The number format weights are loaded in and computed with."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="The base model: a local folder, or a Hugging Face hub id.")
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[NAME=]PATH",
        help="A PEFT LoRA adapter: a local folder, or a hub id. Repeat for more adapters. "
        "Without NAME= it is named after its folder.",
    ),
]
DTypeOption = Annotated[
    DType, typer.Option("--dtype", help="Number format of the weights; auto: as the model's config says.")
]
DeviceOption = Annotated[str, typer.Option("--device", metavar="DEVICE", help="Where to run: cpu, cuda, cuda:1, …")]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Allow Python code that comes with the model's files (never with an adapter's)."
    ),
]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        min=1,
        metavar="TOKENS",
        help="Most tokens of prompt plus answer, if fewer than the model takes.",
    ),
]
KvBytesOption = Annotated[
    int | None,
    typer.Option(
        "--kv-bytes",
        min=1,
        metavar="BYTES",
        help="Memory for the KV cache. Without it: as `polylens plan` shows.",
    ),
]
NoAdapterProcessorOption = Annotated[
    bool,
    typer.Option("--no-adapter-processor", help="Do not use picture and video settings saved in adapters' folders."),
]
NoAdapterTemplateOption = Annotated[
    bool,
    typer.Option("--no-adapter-template", help="Do not use chat templates and tokenizers saved in adapters' folders."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def parse_adapters(values: Iterable[str] | None, option: str = "--adapter") -> dict[str, str]:
    """Read the values of `option` into {name: path}, in order.

    Raises AdapterFormatError for an empty part, a reserved or repeated name, or a path that is neither a
    folder nor looks like a hub id: before the model is loaded, which can take minutes.
    """
    adapters: dict[str, str] = {}
    for value in values or ():
        name, path = _split(value, option)
        if name == BASE_NAME:
            raise AdapterFormatError(f"{option} {value}: {BASE_NAME!r} means no adapter; give this one another name")
        if name in adapters:
            raise AdapterFormatError(
                f"{option} {value}: the name {name!r} is given twice; tell them apart with NAME=PATH"
            )
        adapters[name] = _checked(path, f"{option} {value}")
    return adapters


def _split(value: str, option: str) -> tuple[str, str]:
    """Split `NAME=PATH`; a bare path is named after its folder. An "=" behind a slash belongs to the path."""
    head, equals, tail = value.partition("=")
    if equals and "/" not in head:
        name, path = head, tail
    else:
        name, path = Path(value).resolve().name, value
    if not name or not path:
        raise AdapterFormatError(f"{option} {value!r}: expected NAME=PATH or PATH")
    return name, path


def _checked(path: str, given: str) -> str:
    if Path(path).is_dir():
        return path
    if Path(path).exists():
        raise AdapterFormatError(f"{given}: {path} is a file; give the folder with adapter_config.json")
    if not _HUB_ID.fullmatch(path):
        raise AdapterFormatError(f"{given}: no such folder: {path}")
    return path


def check_use(name: str | None, adapters: dict[str, str]) -> str | None:
    """The adapter a request shall use: None for the base model. Raises UnknownAdapterError."""
    from polylens.errors import UnknownAdapterError

    if name is None or name == BASE_NAME:
        return None
    if name not in adapters:
        raise UnknownAdapterError(name, tuple(adapters))
    return name


def takes(make: Callable[..., EngineConfig]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a command the options that `make` reads, in place of its parameter `config`: that becomes what it makes."""
    options = inspect.signature(make, eval_str=True).parameters

    def with_options(command: Callable[..., T]) -> Callable[..., T]:
        signature = inspect.signature(command, eval_str=True)
        own = [option for name, option in signature.parameters.items() if name != "config"]

        @functools.wraps(command)
        def run(**given: Any) -> T:
            return command(config=make(**{name: given.pop(name) for name in options}), **given)

        # What typer reads.
        shown = signature.replace(parameters=[*own, *options.values()])
        run.__signature__ = shown  # type: ignore[attr-defined]
        run.__annotations__ = {name: option.annotation for name, option in shown.parameters.items()}
        return run

    return with_options


def model_config(
    dtype: DTypeOption = DType.AUTO,
    device: DeviceOption = "cpu",
    max_model_len: MaxModelLenOption = None,
    kv_bytes: KvBytesOption = None,
    trust_remote_code: TrustOption = False,
) -> EngineConfig:
    """How a command loads its model. Progress is shown where a person looks on."""
    return EngineConfig(
        dtype=dtype.value,
        device=device,
        max_model_len=max_model_len,
        kv_bytes=kv_bytes,
        trust_remote_code=trust_remote_code,
        show_progress=sys.stderr.isatty(),
    )


@takes(model_config)
def adapted_config(
    config: EngineConfig,
    no_adapter_processor: NoAdapterProcessorOption = False,
    no_adapter_template: NoAdapterTemplateOption = False,
) -> EngineConfig:
    """How a command loads a model that gets adapters."""
    return dataclasses.replace(
        config, adapter_processors=not no_adapter_processor, adapter_templates=not no_adapter_template
    )


def open_llm(model: str, adapters: dict[str, str], config: EngineConfig) -> LLM:
    """Load the model and its adapters. What their folders change of the processing is told on standard error."""
    from polylens import LLM

    llm = LLM(model, adapters=adapters, config=config)
    for name in adapters:
        if brought := llm.registry.report(name).processing:
            print(f"polylens: adapter {name!r} has its own {', '.join(brought)}", file=sys.stderr)
    return llm


def read_text_file(path: Path, what: str) -> str:
    """The text of a file the user named. Raises RequestError, naming `what` it was to be."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{what} {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise RequestError(f"cannot read {what} {path}: {error.strerror or error}") from error
