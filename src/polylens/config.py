"""Frozen configuration values. Every limit is a named constant with its reason, or a field here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from polylens.errors import ModelLoadError

ApplyMode = Literal["auto", "factored", "fused"]
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]

MIB = 1 << 20

DEFAULT_PAGE_TOKENS = 16
"""Tokens a KV page holds: small pages waste little at a sequence's end and share prefixes finely."""

MAX_QUEUE = 256
"""Requests that may wait beyond those that run: at a few requests a second already more than anyone waits for."""

MAX_IMAGE_PIXELS = 64 * 1024 * 1024
"""Largest picture decoded (pixels). Far above any processor's input size, far below a decompression bomb."""

MAX_VIDEO_FRAMES = 768
"""Most frames decoded from one video: the Qwen processors' own upper bound."""

MIN_VIDEO_FRAMES = 4
"""Fewest frames taken from a video file that has as many: the Qwen processors' own lower bound."""

VIDEO_FPS = 2.0
"""Frames a second taken from a video file unless the request says otherwise: the Qwen processors' own default."""

MAX_VIDEO_PIXELS = 256 * 1024 * 1024
"""Most pixels (all frames together) kept of one video file; larger frames are scaled down while decoding. It is
768 MiB of RGB, and three times what the Qwen processors' own token budget lets through."""

MAX_SOURCE_FRAMES = 30 * 60 * 60
"""Longest video file read, in frames (an hour at 30 a second): frames must be decoded one after the other."""

MAX_SOURCE_PIXELS = 64 * 1024 * 1024 * 1024
"""Most pixels decoded of one video file, all its frames together: 18 minutes of 1080p at 30 frames a second, an
hour of 480p; some minutes of decoding."""

NUM_SAMPLED_FRAMES = 8
"""Pictures a video becomes for a family that takes no videos; as many as fit the context of small models."""

PROCESSED_ITEMS_BYTES = 256 * MIB
"""Processed pictures and videos kept for requests that repeat them (pixels as the encoder takes them)."""

TEMPLATE_LIMIT_S = 5.0
"""Longest rendering of a chat template that came with an adapter: a real one takes milliseconds, a broken or hostile
one may loop for ever and would keep its worker."""


@dataclass(frozen=True)
class EngineConfig:
    """How an engine loads and runs a model. Sizes in bytes, rows or tokens as the names say."""

    dtype: DTypeName = "auto"
    device: str = "cpu"
    trust_remote_code: bool = False
    apply_mode: ApplyMode = "auto"
    """Force how deltas are applied (tests); "auto" lets the cost model choose."""
    calibrate: bool = True
    """Whether "auto" chooses by constants measured on this machine (once, under half a second, then kept on disk);
    else by those of a 2-core CPU, which makes the choice the same everywhere."""
    compile_kernels: bool = True
    """Whether kernels for decode steps may be compiled here, by the system's C compiler (CPU, float32); without them
    decoding is slower."""
    max_model_len: int | None = None
    """Most tokens of prompt plus answer; None: the model's own context length."""
    page_tokens: int = DEFAULT_PAGE_TOKENS
    gpu_memory_utilization: float | None = None
    """Part of a GPU's memory to use, weights included; None: 0.9. On a CPU half of what is free is used."""
    kv_bytes: int | None = None
    """Memory for keys and values. None here and below: what the memory plan says (`polylens plan`)."""
    vision_cache_bytes: int | None = None
    """Memory for features of pictures and videos that may come again."""
    adapter_device_bytes: int | None = None
    """Adapters on the device at a time; the others come in when asked for."""
    adapter_host_bytes: int | None = None
    """Adapters kept in CPU memory beside those on the device, which spares reading files again; None: all."""
    read_pickles: bool = True
    """Whether an adapter's weights may be in `adapter_model.bin`, which torch's weights-only load reads."""
    max_step_tokens: int = 2048
    """Tokens (prefill chunks plus decodes) in one text step."""
    max_running: int = 64
    """Sequences decoded together in one step."""
    max_encoder_rows: int = 16384
    """Input rows (patches, or tile tokens) of one encoder batch; a larger item runs alone."""
    prefix_cache: bool = True
    adapter_processors: bool = True
    """Use the processor settings in an adapter's folder (pixel limits) for its requests."""
    adapter_templates: bool = True
    """Use the chat template and the tokenizer in an adapter's folder for its requests."""
    show_progress: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("dtype", get_args(DTypeName)), ("apply_mode", get_args(ApplyMode))):
            if getattr(self, name) not in allowed:
                raise ModelLoadError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("page_tokens", "max_step_tokens", "max_running", "max_encoder_rows"):
            self._check_whole(name, 1)
        for name, least in (
            ("max_model_len", 1),
            ("kv_bytes", 1),
            ("vision_cache_bytes", 0),
            ("adapter_device_bytes", 0),
            ("adapter_host_bytes", 0),
        ):
            if getattr(self, name) is not None:
                self._check_whole(name, least)
        for switch in fields(self):
            if isinstance(switch.default, bool) and not isinstance(getattr(self, switch.name), bool):
                raise ModelLoadError(f"{switch.name} must be True or False, got {getattr(self, switch.name)!r:.200}")
        self._check_utilization()

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelLoadError(f"{name} must be a whole number of at least {least}, got {value!r:.200}")

    def _check_utilization(self) -> None:
        part = self.gpu_memory_utilization
        if part is None:
            return
        if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
            raise ModelLoadError(f"gpu_memory_utilization must be above 0 and at most 1, got {part!r:.200}")
        if not self.device.startswith("cuda"):
            raise ModelLoadError(f"gpu_memory_utilization is for GPUs, not for {self.device!r}: give kv_bytes")
