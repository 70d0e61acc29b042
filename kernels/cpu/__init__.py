"""Numba implementations for the CPU: float32, all cores, the same bits on every run and for every thread count.

An output element is always computed by one thread with one order of additions; threads only divide outputs (or, in
attention, fixed-size key splits that are combined in order), so the number of threads cannot change a result.
"""

from __future__ import annotations

from kernels.cpu import compiled

compiled.configure()
