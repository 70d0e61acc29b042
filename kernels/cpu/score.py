"""SnapKV scores on the CPU: softmax rows in parallel, then the sum over rows per KV head in parallel.

Nothing here may be reassociated: code that was just compiled and code loaded from Numba's cache are optimised
differently, and with free summation order their last bits differed here, and with them which entry a tie keeps.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from kernels.cpu.common import EXACT, array, exp32


@numba.njit(fastmath=EXACT)
def _scores(query, keys, scale, seen, line):  # type: ignore[no-untyped-def]
    """Write scale q . k of the first `seen` keys to line; eight keys at a time, each a plain sum over its channels."""
    full = seen // 8 * 8
    for j in range(0, full, 8):
        s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        s4, s5, s6, s7 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for d in range(query.shape[0]):
            x = query[d]
            s0 += x * keys[j, d]
            s1 += x * keys[j + 1, d]
            s2 += x * keys[j + 2, d]
            s3 += x * keys[j + 3, d]
            s4 += x * keys[j + 4, d]
            s5 += x * keys[j + 5, d]
            s6 += x * keys[j + 6, d]
            s7 += x * keys[j + 7, d]
        line[j], line[j + 1], line[j + 2], line[j + 3] = s0 * scale, s1 * scale, s2 * scale, s3 * scale
        line[j + 4], line[j + 5], line[j + 6], line[j + 7] = s4 * scale, s5 * scale, s6 * scale, s7 * scale
    for j in range(full, seen):
        s0 = np.float32(0)
        for d in range(query.shape[0]):
            s0 += query[d] * keys[j, d]
        line[j] = s0 * scale


@numba.njit(parallel=True, fastmath=EXACT, cache=True)
def _probabilities(queries, keys, scale, group, out):  # type: ignore[no-untyped-def]
    heads, rows, _ = queries.shape
    tokens = keys.shape[1]
    for program in numba.prange(heads * rows):
        head, row = program // rows, program % rows
        line = out[head, row]
        seen = tokens - rows + row + 1
        _scores(queries[head, row], keys[head // group], scale, seen, line)
        highest = np.float32(-np.inf)
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


@numba.njit(parallel=True, fastmath=EXACT, cache=True)
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
    heads, rows, _ = queries.shape
    kv_heads, tokens, _ = keys.shape
    group = heads // kv_heads
    probabilities = np.empty((heads, rows, tokens), dtype=np.float32)
    out = torch.empty(kv_heads, tokens)
    _probabilities(array("queries", queries), array("keys", keys), np.float32(scale), group, probabilities)
    _aggregate(probabilities, group, aggregate == "max", array("out", out))
    return out
