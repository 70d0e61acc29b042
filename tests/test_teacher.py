"""Attention of a block by KV head, as a GPU runs it, against the merged parts of the CPU and against float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from artifact.engine import teacher
from tests.inputs import relative

GROUPS = [(9, 3), (4, 4), (6, 1)]
# Heads that retain different numbers of entries, equal ones, and one that retains none and sees its block alone.
LENGTHS = [(37, 20, 29, 37), (31, 31, 31, 31), (0, 20, 37, 5)]


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
@pytest.mark.parametrize("retains", LENGTHS)
@pytest.mark.parametrize("logits", [1 << 27, 1])  # all rows of a head at once, and one row at a time
def test_attention_by_head_equals_the_merged_parts(
    heads: int, kv_heads: int, logits: int, retains: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "LOGITS", logits)
    generator = torch.Generator().manual_seed(heads)
    queries, keys, values = (2.0 * torch.randn(n, 5, 16, generator=generator) for n in (heads, kv_heads, kv_heads))
    past_keys, past_values = (torch.randn(kv_heads, 37, 16, generator=generator) for _ in range(2))
    lengths = torch.tensor(retains[:kv_heads], dtype=torch.int32)
    retained = SimpleNamespace(keys=past_keys, values=past_values, lengths=lengths)
    got = teacher._attend_by_head(queries, keys, values, retained)
    assert relative(got, teacher._attend(queries, keys, values, retained)) < 1e-6
    row, head = 3, heads - 1
    kv = head // (heads // kv_heads)
    seen = torch.cat((past_keys[kv, : retains[kv]], keys[kv, : row + 1])).double()
    mixed = torch.cat((past_values[kv, : retains[kv]], values[kv, : row + 1])).double()
    expected = torch.softmax(seen @ queries[head, row].double() / 4, 0) @ mixed
    assert relative(got[head, row], expected) < 1e-6
