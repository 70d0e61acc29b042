"""`artifact predict`: the printed numbers, the JSON, and one sentence for every kind of bad option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from artifact import account
from artifact.account import Mode, Setting
from artifact.cli import main
from artifact.shapes import known_shape

K = 1024


@pytest.fixture
def predict(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*options: str) -> tuple[int, str, str]:
        code = main(["predict", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_text_shows_crossover_and_bounds(predict: Any) -> None:
    code, out, _ = predict("Llama-3.1-8B")
    assert code == 0
    assert "byte crossover n*           74.3K (76,069 tokens), inside the 128K window" in out
    cells = [line.split() for line in out.splitlines()]
    assert ["2K", "15.278", "1.841x", "1.012x", "1.884x", "projection"] in cells
    assert ["128K", "32.189", "1.277x", "1.596x", "2.442x", "kv"] in cells
    assert "ms" not in out


def test_bandwidth_and_costs_give_the_latency_crossing(predict: Any) -> None:
    options = ("llama-3.1-8b", "--bandwidth", "1590.42", "--cost-p", "2", "--cost-kv", "0.5", "--context", "32K")
    code, out, _ = predict(*options)
    assert code == 0 and "predicted latency crossing  48.9K" in out
    _, text, _ = predict(*options, "--json")
    report = json.loads(text)
    shape, setting = known_shape("Llama-3.1-8B"), Setting(r_p=0.5, r_kv=0.3)
    assert report["n_lat_tokens"] == account.latency_crossing(shape, setting, 1590.42, 2, 0.5)
    ms = report["contexts"][0]["ms"]
    assert ms["dense"] == account.step_ms(shape, setting, 32 * K, Mode.DENSE, 1590.42)
    assert ms["both"] == pytest.approx(account.step_ms(shape, setting, 32 * K, Mode.BOTH, 1590.42) + 2.5)


def test_json_is_one_line_with_the_same_numbers(predict: Any) -> None:
    code, out, _ = predict("smollm2-135m", "--json")
    report = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert report["n_star_tokens"] / K == pytest.approx(6.43, abs=0.005)
    assert [row["tokens"] // K for row in report["contexts"]] == [2, 4, 8]
    assert [row["leads_by_bytes"] for row in report["contexts"]] == ["projection", "projection", "kv"]


@pytest.mark.parametrize(
    ("options", "n_star_k"),
    [
        (["--weights-bits", "4"], 18.57),
        (["--batch", "4", "--u-b", "0.92"], 2.97),
        (["--ffn-only"], 60.0),
        (["--ffn-only", "--gate-dense"], 40.0),
        (["--r-kv", "0.1"], 57.78),
        (["--budget-tokens", "4096"], 4 + 52.0),
    ],
    ids=str,
)
def test_options_move_the_crossover(predict: Any, options: list[str], n_star_k: float) -> None:
    _, out, _ = predict("Llama-3.1-8B", "--json", *options)
    assert json.loads(out)["n_star_tokens"] / K == pytest.approx(n_star_k, abs=0.005)


def test_branches_that_save_nothing_are_named(predict: Any) -> None:
    assert "none: the KV branch saves nothing" in predict("Llama-3.1-8B", "--r-kv", "1")[1]
    assert "none: the KV branch leads from the first token" in predict("Llama-3.1-8B", "--r-p", "1")[1]
    assert "none: neither branch saves a byte" in predict("Llama-3.1-8B", "--r-p", "1", "--r-kv", "1")[1]
    assert json.loads(predict("Llama-3.1-8B", "--r-kv", "1", "--json")[1])["n_star_tokens"] is None


def test_contexts_are_parsed_sorted_and_marked_beyond_the_window(predict: Any) -> None:
    code, out, _ = predict("qwen3-8b", "--context", "64K,2k", "--context", "1000")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if "x " in line] == ["1,000", "2K", "64K*"]
    assert "* beyond the model's window of 40K" in out


def test_a_config_file_is_enough(predict: Any, tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    from_file, by_name = (json.loads(predict(source, "--json")[1]) for source in (str(file), "Qwen3-4B"))
    assert from_file["contexts"] == by_name["contexts"] and from_file["n_star_tokens"] == by_name["n_star_tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["no-such-model"], "no model is known as"),
        (["missing/config.json"], "does not exist"),
        (["Llama-3.1-8B", "--r-p", "0"], "r_p is 0"),
        (["Llama-3.1-8B", "--r-p", "nan"], "r_p is nan"),
        (["Llama-3.1-8B", "--r-kv", "1.5"], "r_kv is 1.5"),
        (["Llama-3.1-8B", "--r-kv", "x"], "not a valid float"),
        (["Llama-3.1-8B", "--batch", "4"], "needs u_b"),
        (["Llama-3.1-8B", "--batch", "0"], "batch is 0"),
        (["Llama-3.1-8B", "--u-b", "0.9"], "differs from r_p"),
        (["Llama-3.1-8B", "--budget-tokens", "2048", "--r-kv", "0.3"], "give one of them"),
        (["Llama-3.1-8B", "--cost-p", "1"], "need --bandwidth"),
        (["Llama-3.1-8B", "--bandwidth", "-3"], "bandwidth is -3"),
        (["Llama-3.1-8B", "--bandwidth", "9", "--cost-p", "inf"], "kernel cost of the projection branch is inf"),
        (["Llama-3.1-8B", "--gate-dense"], "add --ffn-only"),
        (["Llama-3.1-8B", "--context", "0"], "not a number of tokens"),
        (["Llama-3.1-8B", "--context", "2K,,4K"], "not a number of tokens"),
        (["Llama-3.1-8B", "--context", "-5"], "not a number of tokens"),
        (["Llama-3.1-8B", "--context", "1e9999"], "not a number of tokens"),
        (["Llama-3.1-8B", "--context", ",".join(["2K"] * 65)], "at most 64"),
    ],
    ids=str,
)
def test_bad_options_are_one_sentence_and_exit_2(predict: Any, options: list[str], message: str) -> None:
    code, out, err = predict(*options)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1
