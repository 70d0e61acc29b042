"""SnapKV scores on the CPU: softmax rows in parallel, then the sum over rows and pooling per KV head in parallel."""

from __future__ import annotations

import numba
import numpy as np
import torch

from kernels.cpu.common import FASTMATH, array, exp32


@numba.njit(parallel=True, fastmath=FASTMATH, cache=True)
def _probabilities(queries, keys, scale, group, out):  # type: ignore[no-untyped-def]
    heads, rows, dim = queries.shape
    tokens = keys.shape[1]
    for program in numba.prange(heads * rows):
        head, row = program // rows, program % rows
        query, block, line = queries[head, row], keys[head // group], out[head, row]
        seen = tokens - rows + row + 1
        highest = np.float32(-np.inf)
        for j in range(seen):
            dot = np.float32(0)
            for d in range(dim):
                dot += query[d] * block[j, d]
            line[j] = dot * scale
            highest = max(highest, line[j])
        total = np.float32(0)
        for j in range(seen):
            line[j] = exp32(line[j] - highest)
            total += line[j]
        for j in range(seen):
            line[j] /= total
        line[seen:] = np.float32(0)


@numba.njit(parallel=True, fastmath=FASTMATH, cache=True)
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
