"""Split-K attention, rotation, append and scoring against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels import attention as attention_op
from kernels import rope_append as rope_op
from kernels import score as score_op
from kernels.cuda import attention, gather, rope_append, score
from tests.cuda.test_projections import draw, error

TOLERANCE = 2e-3  # queries and softmax weights pass through half precision
FULL_TOLERANCE = 2e-5  # float32 throughout; one product of tensor-core halves rounds to 5e-4
TOLERANCES = {torch.float16: TOLERANCE, torch.float32: FULL_TOLERANCE}
both_precisions = pytest.mark.parametrize("dtype", TOLERANCES, ids=["float16", "float32"])


def caches(
    device: torch.device, kv_heads: int, capacity: int, dim: int, live: list[int], dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values whose slots past the live ones hold NaN."""
    keys = draw(device, kv_heads, capacity, dim, dtype=dtype)
    values = draw(device, kv_heads, capacity, dim, dtype=dtype)
    for head, n in enumerate(live):
        keys[head, n:] = float("nan")
        values[head, n:] = float("nan")
    return keys, values


@both_precisions
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(2, 2, 64), (6, 2, 128), (8, 2, 80), (5, 1, 96), (6, 1, 64), (7, 1, 64), (16, 1, 64), (9, 3, 64), (2, 1, 256)],
)
def test_attention_equals_float64_for_every_group_and_head_size(
    device: torch.device, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(heads)
    lengths = [0, 37, 95][:kv_heads]
    keys, values = caches(device, kv_heads, 112, dim, [n + 1 for n in lengths], dtype)
    query, out = draw(device, heads, dim), torch.full((heads * dim,), float("nan"), device=device)
    length = torch.tensor(lengths, dtype=torch.int32, device=device)
    launch = attention.bind(query, keys, values, length, out, dim**-0.5, chosen=attention.Config(3, 16, 2, 1, 1))
    launch()
    expected = attention_op.reference(
        query.double().cpu(), keys.double().cpu(), values.double().cpu(), length, dim**-0.5
    )
    assert error(out, expected) < TOLERANCES[dtype]


@both_precisions
@pytest.mark.parametrize("chosen", [None, attention.Config(4, 16, 4, 1, 1, cyclic=True)])
def test_one_launch_serves_every_length(
    device: torch.device, chosen: attention.Config | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    keys, values = caches(device, 1, 200, 64, [200], dtype)
    query, out = draw(device, 4, 64), torch.empty(256, device=device)
    length = torch.zeros(1, dtype=torch.int32, device=device)
    launch = attention.bind(query, keys, values, length, out, 0.125, chosen=chosen)
    for n in (0, 15, 16, 63, 64, 199):
        length.fill_(n)
        launch()
        expected = attention_op.reference(
            query.double().cpu(), keys.double().cpu(), values.double().cpu(), length, 0.125
        )
        assert error(out, expected) < TOLERANCES[dtype]


@both_precisions
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("read_packed", [False, True])
def test_the_fused_step_equals_rotation_append_and_attention(
    device: torch.device, normed: bool, read_packed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    heads, kv_heads, dim, at = 6, 2, 80, 50
    qkv, inv_freq = draw(device, (heads + 2 * kv_heads) * dim), 10000.0 ** -(torch.arange(dim // 2, device=device) / 40)
    position = torch.tensor([at], dtype=torch.int32, device=device)
    full, lengths = (
        caches(device, kv_heads, 64, dim, [at, at], dtype),
        torch.tensor([at, at], dtype=torch.int32, device=device),
    )
    short = torch.tensor([0, 21], dtype=torch.int32, device=device)
    packed = (*caches(device, kv_heads, 32, dim, [0, 21], dtype), short)
    q_norm, k_norm = (draw(device, dim), draw(device, dim)) if normed else (None, None)
    live = short if read_packed else lengths
    out = torch.full((heads * dim,), float("nan"), device=device)
    attention.bind_step(
        qkv, inv_freq, position, full, packed if read_packed else None, live, out, 0.1, q_norm, k_norm, 1e-6, 1.1,
        chosen=attention.Config(3, 16, 2, 1, 1),
    )()  # fmt: skip

    angles = at * inv_freq.double()
    split = qkv.double().reshape(-1, dim)
    wide = (None if q_norm is None else q_norm.double(), None if k_norm is None else k_norm.double())
    query = rope_op.rotate(rope_op.normalise(split[:heads], wide[0], 1e-6), angles, 1.1)
    key = rope_op.rotate(rope_op.normalise(split[heads : heads + kv_heads], wide[1], 1e-6), angles, 1.1)
    for h in range(kv_heads):
        for store, slot in ((full, at), (packed, int(short[h])))[: 2 if read_packed else 1]:
            assert error(store[0][h, slot], key[h]) < TOLERANCES[dtype]
            assert error(store[1][h, slot], split[heads + kv_heads + h]) < TOLERANCES[dtype]
    keys, values = packed[:2] if read_packed else full
    expected = attention_op.reference(query.cpu(), keys.double().cpu(), values.double().cpu(), live, 0.1)
    assert error(out, expected) < TOLERANCES[dtype]

    again, other = torch.zeros(heads, dim, device=device), caches(device, kv_heads, 64, dim, [at, at], dtype)
    rope_append.bind(qkv, inv_freq, position, again, other, packed, q_norm, k_norm, 1e-6, 1.1)()
    assert error(again, query) < 1e-5
    assert torch.equal(other[0][:, at], full[0][:, at]) and torch.equal(other[1][:, at], full[1][:, at])


@pytest.mark.parametrize("aggregate", ["mean", "max"])
@pytest.mark.parametrize(("tokens", "rows"), [(100, 8), (65, 1), (20, 20)])
def test_scores_equal_float64(device: torch.device, aggregate: str, tokens: int, rows: int) -> None:
    torch.manual_seed(3)
    queries, keys = draw(device, 6, rows, 80), draw(device, 2, tokens, 80, dtype=torch.float16)
    expected = score_op.reference(queries.double().cpu(), keys.double().cpu(), 0.1, aggregate=aggregate)
    assert error(score.snapkv(queries, keys, 0.1, aggregate), expected) < TOLERANCE


def test_gather_copies_ragged_rows_exactly(device: torch.device) -> None:
    torch.manual_seed(4)
    keys, values = (draw(device, 2, 50, 80, dtype=torch.bfloat16) for _ in range(2))
    index = torch.stack([torch.randperm(50)[:20] for _ in range(2)]).to(device)
    counts = torch.tensor([20, 3], dtype=torch.int32, device=device)
    packed = [torch.zeros(2, 24, 80, dtype=torch.bfloat16, device=device) for _ in range(2)]
    gather.gather(keys, values, index, counts, *packed)
    for source, target in zip((keys, values), packed, strict=True):
        for h, n in enumerate((20, 3)):
            assert torch.equal(target[h, :n], source[h, index[h, :n]])
            assert not target[h, n:].any()
