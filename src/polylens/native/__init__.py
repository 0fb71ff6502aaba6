"""C kernels for a CPU's decode steps (`kernels.c`), compiled once a machine with the system's C compiler.

Torch reads a layer's weights at half the memory's speed for a few rows, its calls cost more than their arithmetic
where each of eight adapters has one row, and its attention reads the keys once for every query head. Without a compiler
everything runs as well, slower.
"""

from polylens.native.library import Kernels, compiled_kernels, segment_head, segment_rows

__all__ = ["Kernels", "compiled_kernels", "segment_head", "segment_rows"]
