"""SnapKV scores on the CPU: torch's matrix product (it keeps the order of a short sum), softmax rows in parallel, then
the sum over rows per KV head in parallel.

None of the loops may be reassociated: code that was just compiled and code loaded from Numba's cache are optimised
differently, and with free summation order their last bits differed here, and with them which entry a tie keeps.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from kernels.cpu.common import EXACT, PRANGE, array, exp32


@numba.njit(parallel=PRANGE, fastmath=EXACT, cache=True)
def _softmax(lines, scale):  # type: ignore[no-untyped-def]
    """Turn q . k of every row into probabilities in place; row r of the last `rows` tokens sees no later token."""
    heads, rows, tokens = lines.shape
    for program in numba.prange(heads * rows):
        head, row = program // rows, program % rows
        line = lines[head, row]
        seen = tokens - rows + row + 1
        highest = np.float32(-np.inf)
        for j in range(seen):
            line[j] *= scale
        for j in range(seen):
            highest = max(highest, line[j])
        for j in range(seen):
            line[j] = exp32(line[j] - highest)
        total = np.float32(0)
        for j in range(seen):
            total += line[j]
        for j in range(seen):
            line[j] /= total
        line[seen:] = np.float32(0)


@numba.njit(parallel=PRANGE, fastmath=EXACT, cache=True)
def _aggregate(probabilities, group, largest, out):  # type: ignore[no-untyped-def]
    heads, rows, tokens = probabilities.shape
    for kv_head in numba.prange(heads // group):
        line = out[kv_head]
        line[:] = np.float32(0)
        summed = np.empty(tokens, dtype=np.float32)
        for g in range(group):
            summed[:] = np.float32(0)
            for row in range(rows):
                source = probabilities[kv_head * group + g, row]
                for j in range(tokens):
                    summed[j] += source[j]
            for j in range(tokens):
                line[j] = max(line[j], summed[j]) if largest else line[j] + summed[j] / np.float32(group)


def snapkv(queries: torch.Tensor, keys: torch.Tensor, scale: float, aggregate: str) -> torch.Tensor:
    """Return unpooled (kv_heads, n) scores; arguments are checked by `kernels.score.snapkv`."""
    heads, rows, dim = queries.shape
    kv_heads, tokens, _ = keys.shape
    group = heads // kv_heads
    products = torch.bmm(queries.float().view(kv_heads, group * rows, dim), keys.float().transpose(1, 2))
    probabilities = array("products", products.view(heads, rows, tokens))
    out = torch.empty(kv_heads, tokens)
    _softmax(probabilities, np.float32(scale))
    _aggregate(probabilities, group, aggregate == "max", array("out", out))
    return out
