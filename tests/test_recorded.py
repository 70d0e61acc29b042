"""The runs that ship with the repository: complete, named by commit, and judged as docs/h200.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from artifact.records import read_json
from artifact.verify import read_results
from paper_tables.recorded import machines, opened

FINDINGS = (Path(__file__).parent.parent / "docs" / "h200.md").read_text(encoding="utf-8")
H200 = ("h200/llama-3.1-8b", "h200/llama-3.2-3b")


def test_every_model_of_a_machine_is_a_run_of_its_own() -> None:
    assert set(H200) <= set(machines())


@pytest.mark.parametrize("name", H200)
def test_a_recorded_run_names_its_commit_and_gpu_and_holds_seven_blocks(name: str) -> None:
    with opened(name) as folder:
        system, results = read_json(folder / "system.json"), read_results(folder)
    assert re.fullmatch(r"[0-9a-f]{40}", system["commit"]) and system["gpus"][0]["name"] == "NVIDIA H200"
    assert {"crossover", "speedup_bounds", "selection_cost"} <= results["claims"].keys()
    for claim in results["claims"].keys() & {"speedup_bounds", "baseline_sensitivity"}:
        assert results["claims"][claim]["verdict"] == "reproduced"
        assert all(finding["interval"]["n"] >= 7 for finding in results["claims"][claim]["findings"])
    assert results["claims"]["selection_cost"]["verdict"] == "reproduced"


def test_the_crossings_of_the_8b_model_are_those_that_the_documentation_prints() -> None:
    with opened(H200[0]) as folder:
        findings = read_results(folder)["claims"]["crossover"]["findings"]
    crossings = [finding for finding in findings if finding["predicate"].startswith("crossing at")]
    assert [round(finding["extra"]["measured_tokens"]) for finding in crossings] == [61139, 43950, 38595]
    assert [finding["verdict"] for finding in crossings] == ["reproduced"] * 3


def test_two_crossings_of_the_3b_model_contradict_their_prediction_as_the_documentation_says() -> None:
    with opened(H200[1]) as folder:
        findings = read_results(folder)["claims"]["crossover"]["findings"]
    crossings = [finding for finding in findings if finding["predicate"].startswith("crossing at")]
    assert [finding["verdict"] for finding in crossings] == ["reproduced", "contradicted", "contradicted"]
    assert [round(finding["interval"]["point"]) for finding in crossings] == [-690, -2487, -4148]


def test_methods_on_the_8b_model_are_judged_as_the_documentation_says() -> None:
    with opened("h200/llama-3.1-8b-methods") as folder:
        system, claims = read_json(folder / "system.json"), read_results(folder)["claims"]
    assert re.fullmatch(r"[0-9a-f]{40}", system["commit"]) and system["gpus"][0]["name"] == "NVIDIA H200"
    assert {name: claim["verdict"] for name, claim in claims.items()} == dict.fromkeys(
        ("catekv_efficiency", "dispatch", "spark_storage"), "reproduced"
    )
    findings = [f for claim in claims.values() for f in claim["findings"] if f["interval"]]
    points = {f["predicate"]: f["interval"]["point"] for f in findings}
    assert round(points["decode step"], 2) == 1.30 and round(points["speedup of the gate"], 2) == 1.51
    assert round(points["step at 80%"], 2) == 0.13 and round(points["saved on top of SnapKV"], 1) == 33.8


def test_the_composition_is_judged_as_the_documentation_says() -> None:
    with opened("h200/llama-3.1-8b-composition") as folder:
        system, claims = read_json(folder / "system.json"), read_results(folder)["claims"]
    assert re.fullmatch(r"[0-9a-f]{40}", system["commit"]) and system["gpus"][0]["name"] == "NVIDIA H200"
    assert {name: claim["verdict"] for name, claim in claims.items()} == {"composition_gain": "reproduced"}
    findings = claims["composition_gain"]["findings"]
    points = {f["predicate"]: f["interval"]["point"] for f in findings if f["interval"]}
    assert round(points["gain of the composition"], 3) == 1.152 and round(points["gain in every block"], 3) == 1.151


def test_routed_steps_and_equal_memory_are_judged_as_the_documentation_says() -> None:
    found = {}
    for name in ("masked", "equal-memory", "finetuned"):
        with opened(f"h200/llama-3.1-8b-{name}") as folder:
            system, claims = read_json(folder / "system.json"), read_results(folder)["claims"]
        assert re.fullmatch(r"[0-9a-f]{40}", system["commit"]) and system["gpus"][0]["name"] == "NVIDIA H200"
        found |= claims
    claims_recorded = ("token_routing", "catekv_efficiency", "sats_finetuned", "batching")
    assert [found[name]["verdict"] for name in claims_recorded] == ["reproduced"] * 4
    findings = {f["predicate"]: f for claim in found.values() for f in claim["findings"] if f["interval"]}
    least = findings["faster than dense"]
    assert least["interval"]["n"] == 7 and round(least["interval"]["point"], 2) == 1.03
    static = least["extra"]["dense over static, Llama-3.1-8B, bfloat16"]
    assert static == pytest.approx(1.143, abs=0.001) and f"static SATS {static:.2f}x" in FINDINGS
    equal = findings["throughput at equal memory"]
    assert (equal["extra"]["dense batch"], equal["extra"]["CateKV batch"]) == (3, 9)
    assert round(equal["interval"]["point"], 2) == 1.97 and round(equal["extra"]["byte bound here"], 2) == 2.56


def test_a_small_model_contradicts_what_the_papers_say_of_large_ones() -> None:
    with opened("h200/smollm2-135m") as folder:
        claims = read_results(folder)["claims"]
    verdicts = {f["predicate"]: f["verdict"] for claim in claims.values() for f in claim["findings"]}
    assert verdicts["formats differ little, dense"] == verdicts["formats differ little, thresholded"] == "reproduced"
    assert verdicts["lower perplexity at 50%"] == verdicts["faster than dense"] == "contradicted"
