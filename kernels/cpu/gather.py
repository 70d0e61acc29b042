"""Gather of selected cache entries on the CPU, parallel over KV heads."""

from __future__ import annotations

import numba
import torch

from kernels.cpu.common import PRANGE, array


@numba.njit(parallel=PRANGE, cache=True)
def _gather(keys, values, index, counts, packed_keys, packed_values):  # type: ignore[no-untyped-def]
    for h in numba.prange(keys.shape[0]):
        for j in range(counts[h]):
            packed_keys[h, j] = keys[h, index[h, j]]
            packed_values[h, j] = values[h, index[h, j]]


def gather(
    keys: torch.Tensor,
    values: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    packed_keys: torch.Tensor,
    packed_values: torch.Tensor,
) -> None:
    """Copy the indexed entries; arguments are checked by `kernels.gather.gather`."""
    _gather(
        array("keys", keys),
        array("values", values),
        array("index", index, torch.int64),
        array("counts", counts, torch.int32),
        array("packed keys", packed_keys),
        array("packed values", packed_values),
    )
