"""Compile `kernels.c`, keep the result, call it with tensors."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from polylens.disk_cache import default_cache_dir
from polylens.native.processor import instructions

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
COMPILE_S = 60
"""The compiler takes half a second; one that hangs must not hold up a start."""

_SEGMENT_HEAD = struct.Struct("@PPfi")
_SEGMENT_ROWS = struct.Struct("@ii")
_DECODING = struct.Struct("@Pii")
"""As in kernels.c, without gaps; a segment in two parts, of which the first stays the same as long as its adapter."""


def segment_head(a: torch.Tensor, b: torch.Tensor, scaling: float) -> bytes:
    """The part of a segment that tells its adapter: A (r, i) and B (o, r), contiguous float32 that stay in place."""
    return _SEGMENT_HEAD.pack(a.data_ptr(), b.data_ptr(), scaling, a.shape[0])


@functools.lru_cache(4096)
def segment_rows(start: int, stop: int) -> bytes:
    """The part of a segment that tells its rows."""
    return _SEGMENT_ROWS.pack(start, stop)


class Kernels:
    """The compiled kernels. Callers see to dtypes (float32), shapes and contiguity: C reads by address."""

    def __init__(self, library: ctypes.CDLL) -> None:
        p, i, n, f, table = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float, ctypes.c_char_p
        self._linear = library.polylens_linear
        self._linear.argtypes, self._linear.restype = [p, p, p, p, i, i, i, i], None
        self._factored = library.polylens_factored
        self._factored.argtypes, self._factored.restype = [p, p, i, i, table, i, p, i], None
        self._attention = library.polylens_decode_attention
        self._attention.argtypes = [p, n, n, p, p, p, table, i, i, i, i, i, f, i]
        self._attention.restype = None

    def linear(self, x_ti: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + bias (t, o) for x (t, i) and W (o, i), all contiguous. For few rows: W is read once."""
        (num_rows, num_in), num_out = x_ti.shape, weight.shape[0]
        y_to = torch.empty(num_rows, num_out, dtype=torch.float32)
        self._linear(
            x_ti.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y_to.data_ptr(),
            num_rows,
            num_in,
            num_out,
            torch.get_num_threads(),
        )
        return y_to

    def factored_(
        self,
        x_ti: torch.Tensor,
        y_to: torch.Tensor,
        segments: Sequence[bytes],
        num_values: int,
    ) -> None:
        """y[start:stop] += scaling (x[start:stop] Aᵀ) Bᵀ for every segment (`segment_head`, then `segment_rows`).

        num_values: the sum of rows times rank over the segments.
        """
        h = torch.empty(num_values, dtype=torch.float32)
        self._factored(
            x_ti.data_ptr(),
            y_to.data_ptr(),
            x_ti.shape[1],
            y_to.shape[1],
            b"".join(segments),
            len(segments) // 2,
            h.data_ptr(),
            torch.get_num_threads(),
        )

    def decode_attention_(
        self,
        out_the: torch.Tensor,
        q_the: torch.Tensor,
        keys_sge: torch.Tensor,
        values_sge: torch.Tensor,
        sequences: Sequence[tuple[int, torch.Tensor]],
        scale: float,
    ) -> None:
        """out[row] = softmax(scale q[row] kᵀ) v over the slots of each (row, slots (c,) int64): heads of a group, h / g
        neighbours, share keys and values. q may have any strides but 1 in the last; the others are contiguous."""
        table = b"".join(_DECODING.pack(slots_c.data_ptr(), row, slots_c.shape[0]) for row, slots_c in sequences)
        self._attention(
            q_the.data_ptr(),
            q_the.stride(0),
            q_the.stride(1),
            out_the.data_ptr(),
            keys_sge.data_ptr(),
            values_sge.data_ptr(),
            table,
            len(sequences),
            q_the.shape[1],
            keys_sge.shape[1],
            keys_sge.shape[2],
            values_sge.shape[2],
            scale,
            torch.get_num_threads(),
        )


@functools.cache
def compiled_kernels() -> Kernels | None:
    """The kernels for this machine; None, told in the log, where they cannot be compiled."""
    try:
        return _kept() or _made()
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        logger.warning("decoding runs without compiled kernels, so slower: %s", error)
        return None


def _kept() -> Kernels | None:
    """Those that this machine has made before; None, too, where they are damaged or need what is not here."""
    file = kernels_file(find_compiler())
    if not file.is_file():
        return None
    try:
        return _load(file)
    except (OSError, AttributeError) as error:
        logger.warning("compiling the kernels again, as those in %s cannot be used: %s", file, error)
        return None


def _made() -> Kernels:
    """Compiled now; kept for other starts where the cache can be written."""
    compiler = find_compiler()
    kept = kernels_file(compiler)
    with _workplace(kept.parent) as folder:
        made = _compile(compiler, Path(folder) / kept.name)
        kernels = _load(made)  # in memory from here on, wherever the file goes
        if made.parent.parent == kept.parent:
            os.replace(made, kept)
    return kernels


def _workplace(cache: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder to compile in: in the cache, or among the temporary files where that cannot be written."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="making-", dir=cache)
    except OSError as error:
        logger.warning("cannot keep the compiled kernels in %s (%s): the next start compiles again", cache, error)
        return tempfile.TemporaryDirectory(prefix="polylens-native-")


def _load(file: Path) -> Kernels:
    """Raises OSError for what is no library, AttributeError for another one."""
    return Kernels(ctypes.CDLL(str(file)))


def kernels_file(compiler: str) -> Path:
    """Where the compiled file is kept: its name tells all that it depends on."""
    facts = (SOURCE.read_text(encoding="utf-8"), FLAGS, compiler, platform.machine(), instructions())
    return default_cache_dir() / "native" / f"kernels-{hashlib.sha256(repr(facts).encode()).hexdigest()}.so"


def find_compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise FileNotFoundError("no C compiler (cc, gcc, clang or $CC) was found")


def _compile(compiler: str, target: Path) -> Path:
    done = subprocess.run(
        [compiler, *FLAGS, "-o", str(target), str(SOURCE), "-lm"],
        capture_output=True,
        text=True,
        timeout=COMPILE_S,
        check=False,
    )
    if done.returncode:
        raise OSError(f"{compiler} failed: {' '.join(done.stderr.split())[:300]}")
    return target
