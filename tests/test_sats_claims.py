"""The SATS claims on made-up rows: what they reproduce, their seeded faults, and their tables."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from artifact.profiles import Profile
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import sats_calibration, sats_finetuned, sats_vs_cats, token_routing
from paper_tables.figures import FOLDER, figures
from paper_tables.render import FOLDER as TABLES
from paper_tables.render import TableMissing, render, typed_figures

EMBEDDED = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)
PAPER = Profile("paper", "m", "cuda", "float16", None, 2)
GPU = Profile("gpu", "llama-3.1-8b", "cuda", "float16", None, 2)
WINDOWS = 6
Row = dict[str, Any]


def window_rows(costs: dict[str, float], **columns: Any) -> list[Row]:
    """Windows of 0.05 nats spread, every arm a constant above dense."""
    rng = np.random.default_rng(1)
    levels = 2.5 + 0.2 * rng.standard_normal(WINDOWS)
    rows = []
    for label, cost in costs.items():
        noise = 0.002 * rng.standard_normal(WINDOWS)
        method, _, rest = label.partition("-")
        target = float(rest[5:] if rest[5:].isdigit() else rest.split("-")[0][6:]) / 100 if "r" in rest[:2] else 1.0
        for window in range(WINDOWS):
            rows.append({
                "kind": "window", "label": label, "window": window, "protocol": "p", "window_tokens_hash": f"w{window}",
                "nll": [levels[window] + cost + noise[window]] * 4, "share": target,
                "counted_sparsity": 0.0 if label == "dense" else 0.5,
                "masked_share": target if method != "dense" else 0.0, "budget": None, "text": "a text",
                "scored": 4, "origin": "live", **columns,
            })  # fmt: skip
    return rows


def timing_rows(times: dict[str, tuple[float, Row]], blocks: int = 5, model: str = "tiny") -> list[Row]:
    rows = []
    for block in range(blocks):
        for label, (ms, arm) in times.items():
            rows.append({
                "kind": "timing", "label": label, "block": block, "model": model, "dtype": "float32", "context": 256,
                "ms": [ms * (1 + 0.003 * block)] * 8, "step_bytes": 1e6 * ms, "share": 1.0, "adapter": "",
                "fused": True, "text": "a text", "origin": "live", **arm,
            })  # fmt: skip
    return rows


def calibration_rows() -> list[Row]:
    rows: list[Row] = []
    for target, budget in ((0.3, 0.11), (0.5, 0.25)):
        rows.append({
            "kind": "recount", "target": target, "budget": budget, "layer_sparsity": [target - 0.2, target + 0.202],
            "layer_errors": [budget * 0.99, budget * 0.9], "held_out_sparsity": [target] * 2,
            "held_out_errors": [budget * 1.05] * 2,
        })  # fmt: skip
    for label, budget, cost in (("dense", None, 0.0), ("sats10", 0.05, 0.02), ("sats30", 0.1, 0.05),
                                ("sats50", 0.2, 0.2), ("sats70", 0.4, 0.9)):  # fmt: skip
        rows += window_rows({label: cost}, budget=budget)
    return rows


def versus_rows() -> list[Row]:
    costs = {"dense": 0.0, "cats30": 0.05, "sats30": 0.051, "cats50": 0.3, "sats50": 0.25, "sats-inner50": 0.2}
    return window_rows(costs)


def routing_rows() -> list[Row]:
    base, costs = "sats50", {"dense": 0.0, "sats50": 0.4}
    for share, routed, random in ((25, 0.05, 0.09), (50, 0.12, 0.2), (75, 0.25, 0.31)):
        costs[f"{base}-routed{share}"] = routed
        for seed in token_routing.seeds(share / 100):
            costs[f"{base}-random{share}-{seed}"] = random
    rows = window_rows(costs)
    sats, routed_arm = {"method": "sats"}, {"method": "sats", "share": 0.5}
    times = {"dense": (10.0, {"method": "dense"}), "cats50": (8.1, {"method": "cats"})}
    return rows + timing_rows(times | {"sats50": (8.0, sats), "sats50-routed50": (9.0, routed_arm)})


def finetuned_rows() -> list[Row]:
    costs = {"dense": 0.0, "cats50": 0.3, "sats50": 0.4, "cats50-lora": 0.2, "sats50-lora": 0.25}
    rows = window_rows(costs)
    for label in ("cats50", "sats50"):
        rows.append({"kind": "adapter", "label": label, "steps_done": 9, "tokens_seen": 4608, "made_before": False})
    lora = {"method": "sats", "adapter": "one"}
    times = {"dense": (10.0, {"method": "dense"}), "sats50": (8.0, {"method": "sats"}), "sats50-lora": (8.4, lora)}
    times |= {"sats50-lora apart": (9.2, lora | {"fused": False}), "sats50-routed50-lora": (9.3, lora | {"share": 0.5})}
    return rows + timing_rows(times)


def verdict(module: Any, rows: list[Row], profile: Profile) -> Verdict:
    """The verdict over what the profile asserts; accuracy needs data that the artifact does not hold."""
    return summarise([one for one in module.judge(rows, profile) if profile.name in one.predicate.asserted_in])


CLAIMS = {
    "sats_calibration": (sats_calibration, calibration_rows),
    "sats_vs_cats": (sats_vs_cats, versus_rows),
    "token_routing": (token_routing, routing_rows),
    "sats_finetuned": (sats_finetuned, finetuned_rows),
}


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize("profile", [EMBEDDED, PAPER], ids=["embedded", "paper"])
def test_as_published(name: str, profile: Profile) -> None:
    module, honest = CLAIMS[name]
    assert verdict(module, honest(), profile) is Verdict.REPRODUCED


def worse(label: str, nats: float) -> Callable[[list[Row]], None]:
    def fault(rows: list[Row]) -> None:
        for row in rows:
            if row.get("kind") == "window" and row["label"] == label:
                row["nll"] = [value + nats for value in row["nll"]]

    return fault


def slower(label: str, factor: float) -> Callable[[list[Row]], None]:
    def fault(rows: list[Row]) -> None:
        for row in rows:
            if row.get("kind") == "timing" and row["label"] == label:
                row["ms"] = [value * factor for value in row["ms"]]

    return fault


def changed(kind: str, name: str, change: Callable[[Any], Any], label: str = "") -> Callable[[list[Row]], None]:
    def fault(rows: list[Row]) -> None:
        for row in rows:
            if row.get("kind") == kind and label in row.get("label", ""):
                row[name] = change(row[name])

    return fault


FAULTS = [
    ("sats_calibration", changed("recount", "layer_sparsity", lambda s: [v + 0.02 for v in s]), 0),
    ("sats_calibration", changed("recount", "layer_errors", lambda e: [v * 1.1 for v in e]), 1),
    ("sats_calibration", worse("sats10", 2.0), 2),
    ("sats_vs_cats", changed("window", "counted_sparsity", lambda s: s - 0.1, "cats50"), 0),
    ("sats_vs_cats", worse("sats50", 0.2), 1),
    ("sats_vs_cats", worse("sats30", 0.2), 2),
    ("token_routing", worse("sats50-routed75", 0.3), 0),
    ("token_routing", worse("sats50-routed50", 0.2), 1),
    ("token_routing", changed("window", "masked_share", lambda s: min(1.0, s + 0.2), "routed50"), 2),
    ("token_routing", slower("sats50-routed50", 1.3), 3),
    ("token_routing", slower("sats50", 1.3), 4),
    ("sats_finetuned", worse("cats50-lora", 0.3), 0),
    ("sats_finetuned", worse("sats50-lora", 0.3), 1),
    ("sats_finetuned", slower("sats50-routed50-lora", 1.3), 2),
    ("sats_finetuned", slower("sats50-lora", 1.3), 3),
]


@pytest.mark.parametrize(("name", "fault", "number"), FAULTS)
def test_a_fault_turns_the_claim_away(name: str, fault: Callable[[list[Row]], None], number: int) -> None:
    module, honest = CLAIMS[name]
    rows = copy.deepcopy(honest())
    fault(rows)
    assert module.judge(rows, PAPER)[number].verdict is Verdict.CONTRADICTED


def test_orderings_of_8b_models_are_observed_on_the_embedded_one() -> None:
    rows = copy.deepcopy(versus_rows())
    worse("sats50", 0.2)(rows)
    findings = sats_vs_cats.judge(rows, EMBEDDED)
    assert findings[1].verdict is Verdict.OBSERVED and findings[1].interval is not None
    assert findings[1].interval.point > 0 and verdict(sats_vs_cats, rows, EMBEDDED) is Verdict.REPRODUCED


@pytest.mark.parametrize("module", [token_routing, sats_finetuned])
def test_on_synthetic_weights_speed_alone_is_judged(module: Any) -> None:
    name = module.NAME
    rows = [row for row in CLAIMS[name][1]() if row["kind"] == "timing"]
    slow = [row | {"model": "other"} for row in copy.deepcopy(rows)]
    findings = module.judge(rows, GPU)
    assert [finding.verdict for finding in findings[-2:]] == [Verdict.REPRODUCED] * 2
    for row in slow:
        if row["share"] < 1:
            row["ms"] = [value * 2 for value in row["ms"]]
    assert Verdict.CONTRADICTED in [one.verdict for one in module.judge(rows + slow, GPU)[-2:]]


def test_unequal_arms_are_errors() -> None:
    with pytest.raises(ValueError, match="windows"):
        sats_vs_cats.judge(versus_rows()[:-1], EMBEDDED)
    rows = routing_rows()
    rows[-1]["ms"] = rows[-1]["ms"][:-1]
    with pytest.raises(ValueError, match="unequal"):
        token_routing.judge(rows, EMBEDDED)


PAPERS = {"sats": json.loads((FOLDER / "sats.json").read_text(encoding="utf-8"))}
TABLES_OF = {
    "sats_table2": (versus_rows, 4),
    "sats_table4": (finetuned_rows, 5),
    "sats_table6": (routing_rows, 5),
    "sats_table7": (finetuned_rows, 3),
}


@pytest.mark.parametrize("name", TABLES_OF)
def test_tables_have_a_row_per_arm_and_no_typed_figure(name: str) -> None:
    honest, columns = TABLES_OF[name]
    assert typed_figures((TABLES / "templates" / f"{name}.tex.j2").read_text(encoding="utf-8")) == []
    text = render(name, honest(), {}, PAPERS)
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert all(line.count("&") == columns - 1 for line in body)
    assert sum(line.startswith("dense &") for line in body) == 1
    with pytest.raises(TableMissing):
        render(name, [], {}, PAPERS)


def test_table6_prints_rates_and_paired_speedups() -> None:
    text = render("sats_table6", routing_rows(), {}, PAPERS)
    line = next(line for line in text.splitlines() if line.startswith("sats50-routed50 "))
    assert r"\fromlive{1.11}" in line and r"\fromlive{110.4}" in line


def test_every_printed_figure_has_its_place() -> None:
    for figure in figures("sats").values():
        assert figure.place and figure.what and figure.value > 0
