"""The byte account against printed numbers, against a step counted matrix by matrix, and its algebra."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from artifact import account, keep_ratio
from artifact.account import Mode, Scope, Setting
from artifact.errors import UserError
from artifact.shapes import Shape, known_shape

K = 1024
NOMINAL = Setting(r_p=0.5, r_kv=0.3)
LLAMA = known_shape("Llama-3.1-8B")

shapes = st.builds(
    lambda layers, kv_heads, group, head_dim, hidden, intermediate, vocab: Shape(
        "drawn", hidden, layers, kv_heads * group, kv_heads, head_dim, intermediate, vocab, 1 << 17, False
    ),
    st.integers(1, 80),
    st.integers(1, 16),
    st.integers(1, 16),
    st.sampled_from([64, 80, 96, 128, 256]),
    st.integers(64, 16384),
    st.integers(64, 65536),
    st.integers(1000, 300_000),
)
keeps = st.floats(0.01, 0.99)
lengths = st.integers(1, 1 << 20)
settings_drawn = st.builds(
    Setting,
    r_p=keeps,
    r_kv=keeps,
    weight_bits=st.sampled_from([4, 4.5, 8, 16, 32]),
    kv_bits=st.sampled_from([2, 8, 16]),
)


@pytest.mark.parametrize(
    ("name", "all_k", "ffn_k"),
    [
        ("Llama-3.1-8B", "74.3", "60.0"),
        ("Llama-3.2-3B", "34.3", "25.7"),
        ("Qwen3-8B", "65.7", "51.4"),
        ("Mistral-7B-v0.3", "74.3", "60.0"),
        ("Llama-3.1-70B", "291.4", "240.0"),
    ],
)
def test_crossovers_to_the_printed_digit(name: str, all_k: str, ffn_k: str) -> None:
    shape = known_shape(name)
    assert f"{account.n_star(shape, NOMINAL) / K:.1f}" == all_k
    assert f"{account.n_star(shape, Setting(r_p=0.5, r_kv=0.3, scope=Scope.FFN)) / K:.1f}" == ffn_k


def test_crossover_of_the_embedded_model() -> None:
    shape = known_shape("SmolLM2-135M")
    assert f"{account.n_star(shape, NOMINAL) / K:.2f}" == "6.43"
    assert f"{account.n_star(shape, Setting(r_p=0.5, r_kv=0.3, scope=Scope.FFN)) / K:.2f}" == "4.82"


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (2, "1.841 1.012 1.884"),
        (8, "1.767 1.049 1.926"),
        (32, "1.566 1.184 2.072"),
        (64, "1.420 1.342 2.225"),
        (128, "1.277 1.596 2.442"),
    ],
)
def test_bounds_of_llama_8b(k: int, expected: str) -> None:
    bounds = [account.bound(LLAMA, NOMINAL, k * K, mode) for mode in (Mode.PROJECTION, Mode.KV, Mode.BOTH)]
    assert " ".join(f"{value:.3f}" for value in bounds) == expected


def test_bytes_of_llama_8b() -> None:
    assert f"{account.projection_bytes(LLAMA, NOMINAL) / 1e9:.3f}" == "13.959"
    assert f"{account.head_bytes(LLAMA, NOMINAL) / 1e9:.3f}" == "1.051"
    assert f"{account.kv_token_bytes(LLAMA) * K / 1e6:.1f}" == "134.2"


def test_other_printed_figures() -> None:
    batched = Setting(r_p=0.5, r_kv=0.3, batch=4, u_b=0.92)
    assert f"{account.n_star(LLAMA, batched) / K:.2f}" == "2.97"
    assert f"{account.n_star(LLAMA, Setting(r_p=0.5, r_kv=0.3, weight_bits=4)) / K:.1f}" == "18.6"
    s_a100, s_a6000 = (account.gap_ms_per_k(LLAMA, NOMINAL, gbps) for gbps in (0.78 * 2039, 768))
    assert (f"{s_a100:.3f}", f"{1 / s_a100:.1f}", f"{s_a6000:.3f}") == ("0.059", "16.9", "0.122")
    keep = [account.r_p_for(LLAMA, Setting(r_kv=0.1), k * K) for k in (35.7, 48.1, 57.8)]
    assert [f"{value:.3f}" for value in keep] == ["0.691", "0.584", "0.500"]


def test_kernel_cost_of_one_millisecond_moves_the_crossing_by_17k() -> None:
    crossing = account.latency_crossing(LLAMA, NOMINAL, 0.78 * 2039, cost_p_ms=2.0, cost_kv_ms=1.0)
    assert round((account.n_star(LLAMA, NOMINAL) - crossing) / K) == 17


def test_cats_skips_two_of_three_matrices() -> None:
    assert account.ffn_bound(LLAMA, 0.5) == pytest.approx(1.5)
    assert account.ffn_bound(LLAMA, 0.5, Scope.FFN) == pytest.approx(2.0)
    gated = Setting(r_p=0.5, r_kv=0.3, scope=Scope.FFN_GATED)
    assert account.n_star(LLAMA, gated) == pytest.approx(40.0 * K)


@given(shapes, settings_drawn, lengths, st.sampled_from(list(Mode)), st.sampled_from(list(Scope)))
def test_step_bytes_equal_a_count_matrix_by_matrix(
    shape: Shape, setting: Setting, n: int, mode: Mode, scope: Scope
) -> None:
    """Independent of the account: walk over layers and matrices and count what each mode reads."""
    sparse = {Scope.ALL: "q k v o gate up down", Scope.FFN: "gate up down", Scope.FFN_GATED: "up down"}[scope].split()
    setting = Setting(setting.r_p, setting.r_kv, setting.weight_bits, setting.kv_bits, scope=scope)
    bits = shape.vocab * shape.hidden * setting.weight_bits
    for _ in range(shape.layers):
        for matrix in shape.projections:
            skipped = mode in (Mode.PROJECTION, Mode.BOTH) and matrix.name in sparse
            bits += matrix.inputs * matrix.outputs * setting.weight_bits * (setting.r_p if skipped else 1)
        entries = n * (setting.r_kv if mode in (Mode.KV, Mode.BOTH) else 1)
        bits += 2 * shape.kv_heads * shape.head_dim * entries * setting.kv_bits
    assert account.step_bytes(shape, setting, n, mode) == pytest.approx(bits / 8, rel=1e-9)


@given(shapes, st.integers(1, 16), lengths)
def test_kv_bytes_do_not_depend_on_query_heads(shape: Shape, group: int, n: int) -> None:
    regrouped = Shape(
        "drawn", shape.hidden, shape.layers, shape.kv_heads * group, shape.kv_heads, shape.head_dim,
        shape.intermediate, shape.vocab, shape.window, shape.tied_head,
    )  # fmt: skip
    assert account.kv_bytes(regrouped, NOMINAL, n) == account.kv_bytes(shape, NOMINAL, n)
    assert account.kv_bytes(shape, NOMINAL, n) == shape.layers * shape.kv_heads * 2 * shape.head_dim * 2 * n


@given(shapes, settings_drawn)
def test_savings_are_equal_at_n_star_and_ordered_around_it(shape: Shape, setting: Setting) -> None:
    crossing = account.n_star(shape, setting)
    fixed = account.projection_saving(shape, setting)
    assert account.kv_saving(shape, setting, crossing) == pytest.approx(fixed, rel=1e-9)
    assert (
        account.kv_saving(shape, setting, crossing * 0.99) < fixed < account.kv_saving(shape, setting, crossing * 1.01)
    )


@given(shapes, settings_drawn, lengths, lengths)
def test_bounds_are_monotone_and_composition_is_largest(shape: Shape, setting: Setting, a: int, b: int) -> None:
    near, far = min(a, b), max(a, b)
    projection, kv, both = (
        [account.bound(shape, setting, n, mode) for n in (near, far)] for mode in (Mode.PROJECTION, Mode.KV, Mode.BOTH)
    )
    assert projection[1] <= projection[0] * (1 + 1e-12)
    assert kv[1] >= kv[0] * (1 - 1e-12)
    assert all(c >= max(p, k) * (1 - 1e-12) for c, p, k in zip(both, projection, kv, strict=True))
    assert min(projection + kv + both) >= 1


@given(shapes, settings_drawn, st.integers(2, 64), st.floats(0, 1))
def test_batched_crossover_is_at_most_its_share(shape: Shape, setting: Setting, batch: int, union: float) -> None:
    u_b = setting.r_p + (1 - setting.r_p) * union
    batched = Setting(setting.r_p, setting.r_kv, setting.weight_bits, setting.kv_bits, batch, u_b)
    assert account.n_star(shape, batched) <= account.n_star(shape, setting) / batch * (1 + 1e-12)


@given(shapes, keeps, st.integers(1, 4096))
def test_fixed_budget_crossing_lies_above_the_budget(shape: Shape, r_p: float, budget: int) -> None:
    setting = Setting(r_p=r_p, budget_tokens=budget)
    expected = budget + shape.projection_params * (1 - r_p) / (2 * shape.kv_heads * shape.head_dim)
    crossing = account.n_star(shape, setting)
    assert crossing == pytest.approx(expected) and crossing > budget
    assert account.kv_saving(shape, setting, crossing) == pytest.approx(account.projection_saving(shape, setting))
    assert account.kv_saving(shape, setting, budget) == 0


@given(shapes, settings_drawn, st.floats(1, 8000), st.floats(0, 20), st.floats(0, 20))
def test_latency_crossing_is_where_the_times_meet(
    shape: Shape, setting: Setting, gbps: float, cost_p: float, cost_kv: float
) -> None:
    crossing = account.latency_crossing(shape, setting, gbps, cost_p, cost_kv)
    s = account.gap_ms_per_k(shape, setting, gbps)
    formula = account.n_star(shape, setting) - (cost_p - cost_kv) / s * K
    assume(abs(formula) > 1)
    assert crossing == pytest.approx(max(0.0, formula), rel=1e-6, abs=1e-3)
    if crossing > 0:
        p = account.step_ms(shape, setting, crossing, Mode.PROJECTION, gbps) + cost_p
        kv = account.step_ms(shape, setting, crossing, Mode.KV, gbps) + cost_kv
        assert p == pytest.approx(kv, rel=1e-6)


@given(shapes, settings_drawn)
def test_inversions_return_the_keep_ratios(shape: Shape, setting: Setting) -> None:
    crossing = account.n_star(shape, setting)
    assert account.r_p_for(shape, setting, crossing) == pytest.approx(setting.r_p, rel=1e-6)
    assert account.r_kv_for(shape, setting, crossing) == pytest.approx(setting.r_kv, rel=1e-6)


def test_inversion_without_a_solution_is_refused() -> None:
    with pytest.raises(UserError, match="no projection keep ratio"):
        account.r_p_for(LLAMA, Setting(r_kv=0.3), 1000 * K)
    with pytest.raises(UserError, match="no KV keep ratio"):
        account.r_kv_for(LLAMA, Setting(r_p=0.5), 1 * K)


def test_branches_that_save_nothing() -> None:
    assert account.n_star(LLAMA, Setting(r_p=0.5)) == math.inf
    assert account.n_star(LLAMA, Setting(r_kv=0.3)) == 0
    assert all(account.bound(LLAMA, Setting(), 4 * K, mode) == 1 for mode in Mode)


@pytest.mark.parametrize(
    "options",
    [
        {"r_p": 0},
        {"r_p": 1.1},
        {"r_kv": -0.1},
        {"r_kv": math.nan},
        {"r_p": True},
        {"r_p": "0.5"},
        {"weight_bits": 0},
        {"kv_bits": math.inf},
        {"batch": 0},
        {"batch": 2.0},
        {"batch": 4, "r_p": 0.5},
        {"batch": 4, "r_p": 0.5, "u_b": 0.4},
        {"r_p": 0.5, "u_b": 0.6},
        {"budget_tokens": 0},
        {"budget_tokens": 2048, "r_kv": 0.3},
    ],
    ids=str,
)
def test_settings_no_branch_can_have(options: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Setting(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("gbps", [0, -1, math.nan, math.inf])
def test_a_bandwidth_no_machine_has(gbps: float) -> None:
    with pytest.raises(UserError, match="bandwidth"):
        account.latency_crossing(LLAMA, NOMINAL, gbps, 1, 1)


def test_a_context_before_the_first_token() -> None:
    with pytest.raises(UserError, match="context"):
        account.step_bytes(LLAMA, NOMINAL, -1)


def test_effective_keep_ratios_count_metadata() -> None:
    assert keep_ratio.pruned_key_bytes(128, 26, signs=True, statistics=2) == 85
    assert keep_ratio.channel_r_kv(85, 256, 128) == pytest.approx((85 + 256) / 512)
    assert f"{keep_ratio.headwise_r_kv(128 * K, 0.4, 1.0, 2048):.3f}" == "0.409"
    assert f"{1 / keep_ratio.headwise_r_kv(128 * K, 0.4, 1.0, 2048):.2f}" == "2.44"
    assert keep_ratio.headwise_r_kv(1000, 0.4, 1.0, 2048) == 1
    assert keep_ratio.paged_r_kv(0.3, 16) == pytest.approx(0.3625)


def test_effective_keep_ratios_refuse_more_than_dense() -> None:
    with pytest.raises(UserError, match="kept channels"):
        keep_ratio.pruned_key_bytes(128, 129)
    with pytest.raises(UserError, match="key bytes"):
        keep_ratio.channel_r_kv(300, 256, 128)


def test_the_account_imports_no_torch() -> None:
    code = "import sys, artifact.account, artifact.predict; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
