"""The tasks of the gate-mask claims end to end on a tiny model: calibrating, scoring, counting, timing, training."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from artifact.cli import main
from artifact.engine import models
from artifact.errors import UserError
from artifact.measure import finetune_cells, format_cells, masked_bench, masked_cells, masked_timing
from artifact.measure.finetune import Recipe
from artifact.measure.masked_bench import MaskedBench, open_bench
from artifact.measure.masked_plan import Arm, Sizes, arm_of, sizes_of
from artifact.measure.masked_timing import Setting
from artifact.measure.quality import Protocol
from artifact.profiles import Profile
from artifact.projection import gate_calibration, gate_stats
from artifact.projection.lora import load_adapter
from artifact.projection.masked import GateMask
from artifact.records import Run
from artifact.shapes import Shape
from tests.models_fixture import Loaded

Tiny = Callable[[str], Loaded]
Row = dict[str, Any]
pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = Sizes(480, 120, 60, 240, Protocol(16, 40, 3))
STEPS = 8


class Letters:
    """A tokenizer with one token per character and no special ones."""

    bos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[2 + ord(c) % 300 for c in text])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    draw = random.Random(4)
    words = ["".join(draw.choice("etaoinshrdlu") for _ in range(draw.randint(1, 9))) for _ in range(1500)]
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text("\n".join(" ".join(words[i : i + 9]) for i in range(0, len(words), 9)), encoding="utf-8")
    return str(file)


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARTIFACT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(models, "load_tokenizer", lambda source: Letters())
    monkeypatch.setattr("artifact.engine.prompts.beginning", lambda tokenizer: [])


def params(tiny: Tiny, text: str, **more: Any) -> Row:
    return {
        "model": str(tiny("llama").path), "text": text, "device": "cpu", "dtype": "float32",
        "sizes": SIZES.record(), **more,
    }  # fmt: skip


def opened(tiny: Tiny, text: str) -> MaskedBench:
    return open_bench(str(tiny("llama").path), text, "cpu", "float32", SIZES)


def rows_of(task: Any, request: Row) -> list[Row]:
    return [row for row in task(request) if "kind" in row]


def test_arms_are_told_apart_by_their_labels_and_survive_a_request() -> None:
    arms = [
        Arm(), Arm("cats", 0.5), Arm("sats", 0.3), Arm("sats", 0.5, 0.25), Arm("sats", 0.5, 0.25, "random", 2),
        Arm("sats", 0.5, adapter="one"), Arm("sats", 0.5, adapter="one", fused=False), Arm("sats-inner", 0.5),
    ]  # fmt: skip
    assert [arm.label for arm in arms] == [
        "dense", "cats50", "sats30", "sats50-routed25", "sats50-random25-2", "sats50-lora", "sats50-lora apart",
        "sats-inner50",
    ]  # fmt: skip
    assert [arm_of(arm.record()) for arm in arms] == arms and sizes_of(SIZES.record()) == SIZES
    with pytest.raises(UserError, match="no arm is called"):
        Arm("wanda", 0.5)
    with pytest.raises(UserError, match="does not go with"):
        Arm("dense", 0.5)


def test_pieces_of_the_text_are_disjoint_and_a_short_text_is_refused(tiny: Tiny, text: str, tmp_path: Path) -> None:
    bench = opened(tiny, text)
    whole = Letters()(bench.calibration_text.text).input_ids
    assert torch.cat((bench.calibration_tokens, bench.corpus, bench.held_out)).tolist() == whole
    assert (len(bench.calibration_tokens), len(bench.corpus)) == (480, 240)
    with pytest.raises(UserError, match="share"):
        bench.require_apart(bench.held_out[None, :200])
    short = tmp_path / "short.txt"
    short.write_text("a few words\nand a few more\n" * 20, encoding="utf-8")
    with pytest.raises(UserError, match="give a longer text"):
        open_bench(str(tiny("llama").path), str(short), "cpu", "float32", SIZES)


def test_a_calibration_is_kept_read_again_and_refused_for_another_model(
    tiny: Tiny, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tiny, text)
    file = next(first.folder.glob("gate-*.safetensors"))
    assert file.stat().st_size < 200_000
    origin = first.calibration.origin
    assert origin.model == first.weights.identity and origin.text_sha256 == first.calibration_text.sha256
    assert (origin.tokens, origin.rows) == (480 - 4 * gate_stats.SKIP, 60)

    monkeypatch.setattr(gate_calibration, "calibrate", None)
    again = opened(tiny, text)
    assert again.calibration.origin == origin
    for name in ("candidates", "errors", "shares"):
        assert torch.equal(getattr(again.calibration.curves, name), getattr(first.calibration.curves, name))
    with pytest.raises(UserError, match="not"):
        gate_calibration.load(file, tiny("qwen3").weights)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="no gate calibration"):
        gate_calibration.load(file, first.weights)
    with pytest.raises(UserError, match="no gate-mask method"):
        first.calibration.mask("teal", 0.5)


def test_inner_sats_holds_the_outer_layers_at_their_percentile(tiny: Tiny, text: str) -> None:
    calibration = opened(tiny, text).calibration
    inner, percentile = (calibration.mask(method, 0.5).limits for method in ("sats-inner", "cats"))
    assert torch.equal(inner[[0, 2]], percentile[[0, 2]])
    curves = calibration.curves.layers(1, 2)
    assert inner[1] == curves.mask(curves.budget(0.5)).limits[0]


def test_windows_are_scored_under_every_arm(tiny: Tiny, text: str) -> None:
    arms = [Arm(), Arm("cats", 0.5), Arm("sats", 0.5), Arm("sats", 0.5, 0.5), Arm("sats", 0.5, 0.5, "random", 1)]
    rows = rows_of(masked_cells.scored, params(tiny, text, arms=[arm.record() for arm in arms]))
    assert len(rows) == 15 and {row["protocol"] for row in rows} == {rows[0]["protocol"]}
    by_label = {label: [row for row in rows if row["label"] == label] for label in {row["label"] for row in rows}}
    dense, static, routed = (by_label[label][0] for label in ("dense", "sats50", "sats50-routed50"))
    assert dense["counted_r_p"] == 1.0 and dense["counted_sparsity"] == 0.0 and len(dense["nll"]) == 40
    assert static["counted_sparsity"] == pytest.approx(0.5, abs=0.05)
    assert static["counted_sparsity"] == pytest.approx(sum(static["layer_sparsity"]) / 3)
    assert (
        routed["counted_sparsity"] < static["counted_sparsity"] and routed["masked_share"] < 1 == static["masked_share"]
    )
    assert static["budget"] == pytest.approx(opened(tiny, text).calibration.curves.budget(0.5))
    assert all(row["stepwise_difference_nats"] < 1e-3 for row in rows)
    assert static["nll"] != by_label["cats50"][0]["nll"] != dense["nll"]


def test_another_format_is_scored_with_the_same_thresholds(
    tiny: Tiny, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = [Arm().record(), Arm("sats", 0.5).record()]
    base = rows_of(masked_cells.scored, params(tiny, text, arms=arms))
    calibrations = list(Path(opened(tiny, text).folder).glob("gate-*"))
    other = rows_of(format_cells.scored, params(tiny, text, arms=arms, stored="bfloat16"))
    assert list(Path(opened(tiny, text).folder).glob("gate-*")) == calibrations
    assert [row["kind"] for row in other] == ["format"] * 6 and {row["dtype"] for row in other} == {"bfloat16"}
    assert {row["dtype"] for row in base} == {"float32"}
    for one, two in zip(base, other, strict=True):
        same = ("label", "window", "window_tokens_hash", "budget", "calibration")
        assert [one[name] for name in same] == [two[name] for name in same]
        assert 0 < max(abs(a - b) for a, b in zip(one["nll"], two["nll"], strict=True)) < 0.5
        assert two["counted_sparsity"] == pytest.approx(one["counted_sparsity"], abs=0.02)
        assert two["stepwise_difference_nats"] < 1e-3


def test_widened_weights_are_the_same_numbers(tiny: Tiny) -> None:
    path = str(tiny("llama").path)
    narrow, full = models.load(path, "cpu", torch.bfloat16), tiny("llama").weights
    wide = models.widened(narrow)
    assert models.widened(full) is full and wide.dtype == torch.float32 and wide.identity == narrow.identity
    assert torch.equal(wide.head, narrow.head.float()) and not torch.equal(wide.head, full.head)
    for one, two in zip(wide.layers, narrow.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            assert torch.equal(getattr(one, name).w, getattr(two, name).w.float())


@pytest.mark.parametrize(
    ("differences", "kept"), [([1e-5], 1e-5), ([0.06, 1e-5], 1e-5), ([0.06, math.nan, 1e-5], 1e-5), ([0.06] * 9, None)]
)
def test_one_window_of_three_must_agree_with_its_decode_steps(
    monkeypatch: pytest.MonkeyPatch, differences: list[float], kept: float | None
) -> None:
    """A channel within rounding of its threshold once moved the mean of eight tokens by 0.056 nats: no fault."""
    left = iter(differences)
    monkeypatch.setattr(masked_cells, "difference_nats", lambda bench, branch, window: next(left))
    bench: Any = SimpleNamespace(weights=SimpleNamespace(dtype=torch.float32))
    windows = torch.zeros(6, 4)
    if kept is not None:
        assert masked_cells.check_steps(bench, None, windows) == kept
        return
    with pytest.raises(RuntimeError, match="differs from decode steps"):
        masked_cells.check_steps(bench, None, windows)
    assert len(list(left)) == 9 - masked_cells.CHECKED_WINDOWS


def test_the_count_again_agrees_with_the_calibration(tiny: Tiny, text: str) -> None:
    rows = rows_of(masked_cells.recounted, params(tiny, text, targets=[0.3, 0.5]))
    for row, target in zip(rows, (0.3, 0.5), strict=True):
        assert sum(row["layer_sparsity"]) / 3 == pytest.approx(target, abs=0.005)
        assert max(row["layer_errors"]) <= row["budget"] * 1.001
        assert max(row["layer_errors"]) >= row["budget"] * 0.98  # the budget is some layer's own error


def test_a_wrong_limit_shows_in_the_count_again(tiny: Tiny, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = gate_calibration.GateCalibration.mask
    monkeypatch.setattr(
        gate_calibration.GateCalibration, "mask", lambda self, *at: GateMask(mask(self, *at).limits * 1.2)
    )
    row = rows_of(masked_cells.recounted, params(tiny, text, targets=[0.5]))[0]
    assert abs(sum(row["layer_sparsity"]) / 3 - 0.5) > 0.005 and max(row["layer_errors"]) > row["budget"] * 1.01


def test_scores_come_from_the_corpus_and_are_kept(tiny: Tiny, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = opened(tiny, text)
    scores = bench.scores
    assert int(scores.counts.sum()) == 240 - 2 * 2  # two sequences, without their first and last token
    monkeypatch.setattr(masked_bench, "losses", None)
    assert torch.equal(opened(tiny, text).scores.values, scores.values)


def test_decode_steps_are_gated_counted_and_timed(tiny: Tiny, text: str) -> None:
    arms = [
        Arm(),
        Arm("sats", 0.5),
        Arm("sats", 0.5, adapter="random"),
        Arm("sats", 0.5, adapter="random", fused=False),
    ]
    arms.append(Arm("sats", 0.5, 0.5, "scores", 1, "random"))
    rows = rows_of(
        masked_timing.timed,
        params(tiny, text, arms=[arm.record() for arm in arms], context=20, steps=STEPS, order_seed=0),
    )
    assert [row["label"] for row in rows] == [arm.label for arm in arms]
    assert all(len(row["ms"]) == STEPS and row["gate_error"] < 1e-4 for row in rows)
    dense, static, fused, apart, _ = rows
    assert static["step_bytes"] < fused["step_bytes"] < apart["step_bytes"] < dense["step_bytes"] * 1.5
    assert set(apart["ops_ms"]) - set(fused["ops_ms"]) == {"low_rank"}


def test_a_gpu_times_both_formats_and_leaves_out_what_has_no_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = Profile("gpu", "llama-3.1-8b", "cuda", "float16", None, 2)
    arms, models = [Arm(), Arm("sats", 0.5, adapter="random")], ("Llama-3.1-8B", "Qwen3-8B")
    found = {}
    for free in (None, 100 * 10**9, 45 * 10**9):
        monkeypatch.setattr(masked_timing.gpu_state, "free_bytes", lambda free=free: free)
        with Run(tmp_path / str(free), profile) as run:
            run.start_claim("token_routing", Path(__file__))
            found[free] = masked_timing.settings(run, "token_routing", arms, 1100, models)
            left = run.rows("token_routing")
    assert found[None] == found[100 * 10**9] and len(found[None]) == 4
    assert [one.dtype for one in found[45 * 10**9]] == ["bfloat16"] * 2
    assert [row["dtype"] for row in left] == ["float32"] * 2 and "Qwen3-8B in float32 needs 6" in left[1]["reason"]
    with Run(tmp_path / "keys", profile) as run:
        cells = [masked_timing.timing_cell(run, "token_routing", SIZES, arms, 20, 4, 3, one) for one in found[None]]
    assert len({cell.key for cell in cells}) == 4 and cells[0].params["dtype"] == "float32"
    embedded = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)
    with Run(tmp_path / "cpu", embedded) as run:
        assert masked_timing.settings(run, "token_routing", arms, 1100, ("",)) == [Setting("", "float32")]


def test_an_arm_that_did_not_do_what_it_says_is_an_error(
    tiny: Tiny, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked_bench.MaskedBench, "branch", lambda self, arm, read: self.calibration.mask("cats", 0.1))
    with pytest.raises(RuntimeError, match=r"read .* of the projection bytes"):
        rows_of(
            masked_timing.timed,
            params(tiny, text, arms=[Arm("cats", 0.9).record()], context=20, steps=STEPS, order_seed=0),
        )


def test_synthetic_branches_drop_what_they_are_asked_to() -> None:
    shape = Shape("tiny", 96, 3, 6, 2, 32, 160, 211, 1024, False)
    weights = models.synthetic(shape, "cpu", torch.float32)
    tokens = torch.randint(211, (240,), generator=torch.Generator().manual_seed(0))
    statistics = gate_stats.collect(weights, [tokens], rows=64, skip=40)
    arms = [Arm(), Arm("cats", 0.5), Arm("sats", 0.5), Arm("sats", 0.5, 0.5, "random", 3, "random")]
    branches = masked_timing.synthetic_branches(weights, statistics, arms)
    assert branches["dense"] is None
    for label in ("cats50", "sats50"):
        rows = branches[label].rows(weights)  # type: ignore[union-attr]
        for index, layer in enumerate(weights.layers):
            rows.mlp(index, layer, statistics.inputs[index], tokens[:64])
        assert rows.sparsity == pytest.approx(0.5, abs=0.02)  # type: ignore[attr-defined]
    routed = branches["sats50-random50-3-lora"].mask.routed  # type: ignore[union-attr]
    assert float(routed.double().mean()) == pytest.approx(0.5, abs=0.01)


def test_an_adapter_is_trained_once_and_found_afterwards(tiny: Tiny, text: str) -> None:
    recipe = Recipe(rank=2, sequence=16, batch=2, steps=3)
    request = params(tiny, text, arm=Arm("sats", 0.5).record(), recipe=recipe.__dict__)
    first, second = (rows_of(finetune_cells.found_or_trained, request)[0] for _ in range(2))
    assert not first["made_before"] and second["made_before"]
    assert first["adapter"] == second["adapter"] and "/" not in first["adapter"]
    assert first["losses"] == second["losses"] and len(first["losses"]) == 3
    arms = [Arm("sats", 0.5).record(), Arm("sats", 0.5, adapter=first["adapter"]).record()]
    scored = rows_of(masked_cells.scored, params(tiny, text, arms=arms))
    assert scored[0]["nll"] != scored[1]["nll"]


def test_the_verb_trains_and_says_where_the_adapter_lies(
    tiny: Tiny, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    words = ["finetune", "--model", str(tiny("llama").path), "--text", text, "--method", "cats", "--rank", "2"]
    code = main([*words, "--steps", "3", "--sequence", "16", "--out", str(out), "--quick"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    found = json.loads(printed.out.splitlines()[-1])
    assert found["steps"] == 3 and found["tokens"] == 3 * 2 * 16 and found["out"] == str(out)
    assert load_adapter(out).rank == 2
    assert main([*words, "--learning-rate", "0"]) == 2
    assert "learning rate is 0" in capsys.readouterr().err
