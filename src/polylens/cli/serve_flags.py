"""The flags of `polylens serve`, as a table: the parser and the table in docs/serving.md are made of it.

Names follow vLLM's where they mean the same, because that is where many users come from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from polylens.config import MAX_QUEUE, EngineConfig
from polylens.errors import RequestError
from polylens.server.options import (
    DRAIN_S,
    MAX_BODY_BYTES,
    MAX_IMAGES,
    MAX_VIDEOS,
    MediaPolicy,
)


@dataclass(frozen=True)
class Flag:
    """One flag. takes: what its value is called in help and docs; empty: it is a switch. many: it takes several
    values and may be repeated. unneeded: accepted for vLLM's sake, and why nothing comes of it."""

    name: str
    help: str
    takes: str = ""
    kind: Callable[[str], Any] = str
    default: Any = None
    many: bool = False
    choices: Sequence[str] = ()
    unneeded: bool = False


_DEFAULT = EngineConfig()
_MEDIA = MediaPolicy()

MODEL_HELP = (
    "The base model: a local folder, or a Hugging Face hub id. Without it: the demo model of this package, "
    "with its adapters unless --lora-modules names others."
)

GROUPS: tuple[tuple[str, tuple[Flag, ...]], ...] = (
    (
        "Model",
        (
            Flag("served-model-name", "What requests call the base model; the first one is shown.", "NAME", many=True),
            Flag(
                "dtype",
                "Number format of the weights; auto: as the model's config says.",
                "DTYPE",
                default=_DEFAULT.dtype,
                choices=("auto", "float32", "bfloat16", "float16"),
            ),
            Flag("device", "Where to run: cpu, cuda, cuda:1, …", "DEVICE", default=_DEFAULT.device),
            Flag("max-model-len", "Most tokens of prompt plus answer, if fewer than the model takes.", "TOKENS", int),
            Flag("gpu-memory-utilization", "Part of a GPU's memory to use, weights included; 0.9.", "PART", float),
            Flag("kv-bytes", "Memory for the KV cache. Not said: as `polylens plan` shows.", "BYTES", int),
            Flag("vision-cache-bytes", "Memory for features of pictures. Not said: as planned.", "BYTES", int),
            Flag("max-num-seqs", "Requests that run together.", "N", int, _DEFAULT.max_running),
            Flag("max-num-batched-tokens", "Tokens of one step.", "TOKENS", int, _DEFAULT.max_step_tokens),
            Flag("no-prefix-caching", "Compute every prompt anew."),
            Flag("chat-template", "A Jinja file to use in place of the model's own chat template.", "FILE"),
            Flag(
                "generation-config",
                "Where sampling defaults come from. auto: the model's generation config; none, or vllm: OpenAI's "
                "(temperature 1, nothing cut); else a folder with a generation_config.json.",
                "SOURCE",
                default="auto",
            ),
            Flag(
                "override-generation-config",
                "Sampling defaults that win over the model's, for example '{\"temperature\": 0}'. `max_new_tokens` "
                "also bounds what a request may ask for.",
                "JSON",
            ),
            Flag("trust-remote-code", "Allow Python code that comes with the model's files (never an adapter's)."),
        ),
    ),
    (
        "Adapters",
        (
            Flag(
                "lora-modules",
                'Adapters to load at the start: NAME=PATH, or vLLM\'s {"name": …, "path": …}.',
                "MODULE",
                many=True,
            ),
            Flag(
                "lora-dir", "Every adapter folder below DIR, by its path from there; read when first asked for.", "DIR"
            ),
            Flag(
                "adapter-device-bytes",
                "Memory for adapters on the device; the others come in when asked for. Not said: as planned.",
                "BYTES",
                int,
            ),
            Flag(
                "adapter-host-bytes",
                "CPU memory for adapters that are not on the device; others are read from disk again. Not said: all.",
                "BYTES",
                int,
            ),
            Flag(
                "default-adapter",
                "image=NAME or video=NAME: requests that name the base model and have such media get this adapter.",
                "KIND=NAME",
                many=True,
            ),
            Flag(
                "no-adapter-processor",
                "Do not use picture and video settings saved in adapters' folders.",
            ),
            Flag("no-adapter-template", "Do not use chat templates and tokenizers saved in adapters' folders."),
            Flag("enable-adapter-loading", "Allow POST /v1/load_lora_adapter and /v1/unload_lora_adapter."),
            Flag("adapter-root", "Folder below which adapters loaded over HTTP must lie.", "DIR"),
            Flag("allow-hub", "Adapters loaded over HTTP may be hub ids."),
            Flag("enable-lora", "Not needed: adapters are always on.", unneeded=True),
            Flag(
                "enable-tower-connector-lora", "Not needed: adapters always reach tower and connector.", unneeded=True
            ),
            Flag("max-loras", "Not needed: a batch may hold any number of adapters.", "N", int, unneeded=True),
            Flag("max-lora-rank", "Not needed: adapters may have any rank.", "N", int, unneeded=True),
            Flag("max-cpu-loras", "Not needed: --adapter-host-bytes bounds the memory.", "N", int, unneeded=True),
        ),
    ),
    (
        "Network and keys",
        (
            Flag("host", "Address to listen on; 0.0.0.0 for all.", "HOST", default="127.0.0.1"),
            Flag("port", "Port to listen on; 0 takes a free one, which the first line says.", "PORT", int, 8000),
            Flag("api-key", "Keys that open the API; also $POLYLENS_API_KEYS, by commas.", "KEY", many=True),
            Flag("api-key-file", "A file with one such key a line.", "FILE"),
            Flag(
                "admin-api-key",
                "Keys that also allow loading and unloading; also $POLYLENS_ADMIN_API_KEYS.",
                "KEY",
                many=True,
            ),
            Flag("admin-api-key-file", "A file with one such key a line.", "FILE"),
            Flag(
                "allowed-origins", "Web pages of these origins may call the API (CORS); * for all.", "ORIGIN", many=True
            ),
        ),
    ),
    (
        "Limits",
        (
            Flag("max-queue", "Requests that may wait; more are answered with 429.", "N", int, MAX_QUEUE),
            Flag("max-body-bytes", "Largest body of a request.", "BYTES", int, MAX_BODY_BYTES),
            Flag("request-timeout", "Longest time a request may take; it is then ended with 504.", "SECONDS", float),
            Flag("drain-timeout", "Time running requests get to finish after SIGTERM.", "SECONDS", float, DRAIN_S),
            Flag(
                "limit-mm-per-prompt",
                f"Most pictures and videos of a request: image=8 or vLLM's JSON form. Not said: {MAX_IMAGES} pictures, "
                f"{MAX_VIDEOS} videos.",
                "LIMIT",
                many=True,
            ),
        ),
    ),
    (
        "Media",
        (
            Flag("allowed-local-media-path", "Folder whose files requests may name as file:// addresses.", "DIR"),
            Flag("allow-remote-media", "Fetch http(s) addresses of public hosts that requests name."),
            Flag("allowed-media-domains", "Fetch from these hosts (and hosts below them) only.", "HOST", many=True),
            Flag("media-fetch-timeout", "Longest time of one fetch.", "SECONDS", float, _MEDIA.timeout_s),
            Flag("max-media-bytes", "Largest fetched or local file.", "BYTES", int, _MEDIA.max_bytes),
        ),
    ),
    (
        "Log",
        (
            Flag(
                "log-level",
                "How much is written on standard error.",
                "LEVEL",
                default="info",
                choices=("debug", "info", "warning", "error"),
            ),
            Flag("enable-log-requests", "Write prompts into the log as well. Without it, the log has none of them."),
        ),
    ),
)


class _Parser(argparse.ArgumentParser):
    """Mistakes become the one line of every command."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{self.prog}: {message} (try `{self.prog} --help`)".removeprefix("polylens "))


def make_parser() -> argparse.ArgumentParser:
    """The parser of everything after `polylens serve`."""
    parser = _Parser(
        prog="polylens serve",
        usage="polylens serve [MODEL] [--lora-modules NAME=PATH …] [options]",
        description="Serve a model and its adapters over HTTP, as OpenAI's API.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    for title, flags in GROUPS:
        add_flags(parser.add_argument_group(title), flags)
    return parser


def add_flags(group: argparse._ArgumentGroup, flags: Sequence[Flag]) -> None:
    """Let a parser's group take the flags."""
    for flag in flags:
        group.add_argument(f"--{flag.name}", **_argument(flag))


def _argument(flag: Flag) -> dict[str, Any]:
    text = flag.help.replace("%", "%%")
    if flag.default is not None:
        text += f" Default: {flag.default}."
    if not flag.takes:
        return {"action": "store_true", "help": text}
    return {
        "metavar": flag.takes,
        "type": flag.kind,
        "default": flag.default,
        "help": text,
        **({"nargs": "+", "action": "extend"} if flag.many else {}),
        **({"choices": flag.choices} if flag.choices else {}),
    }


def unneeded_flags(arguments: argparse.Namespace) -> list[Flag]:
    """The flags that were given and are not needed."""
    flags = [flag for _, group in GROUPS for flag in group if flag.unneeded]
    return [flag for flag in flags if getattr(arguments, flag.name.replace("-", "_")) not in (None, False)]


def flags_table() -> str:
    """All flags as Markdown, for docs/serving.md."""
    lines = []
    for title, flags in GROUPS:
        lines += [f"### {title}", "", "| flag | meaning | default |", "|---|---|---|"]
        for flag in flags:
            value = f" {flag.takes}{' …' if flag.many else ''}" if flag.takes else ""
            default = "" if flag.default is None else f"`{flag.default}`"
            choices = f" One of {', '.join(f'`{choice}`' for choice in flag.choices)}." if flag.choices else ""
            lines.append(f"| `--{flag.name}{value}` | {flag.help}{choices} | {default} |".replace("  |", " |"))
        lines.append("")
    return "\n".join(lines)


FLAGS_BEGIN = "<!-- flags: made by `python -m polylens.cli.serve_flags` -->"
FLAGS_END = "<!-- end of flags -->"


def with_flags(text: str) -> str:
    """docs/serving.md with the table as it should be."""
    head, begin, rest = text.partition(FLAGS_BEGIN)
    _, end, tail = rest.partition(FLAGS_END)
    return f"{head}{begin}\n\n{flags_table()}{end}{tail}"


if __name__ == "__main__":
    from pathlib import Path

    page = Path("docs/serving.md")
    page.write_text(with_flags(page.read_text()))
