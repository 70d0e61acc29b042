"""What reads files that others wrote, each as a function of one hostile input.

A target returns, or raises UserError (one sentence); anything else is a fault of ours. Seeds are valid inputs to alter.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from artifact import shapes, text
from artifact.cli import main
from artifact.engine import checkpoints, gguf_file, models
from artifact.errors import UserError
from artifact.samples import SampleLog
from paper_tables import figures
from paper_tables.recorded import machines

Target = Callable[[bytes], None]
EXIT_CODES = {0, 1, 2, 3, 4}
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_act": "silu",
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "vocab_size": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 32},
}  # fmt: skip


@dataclass(frozen=True)
class Fuzzed:
    """A target with valid inputs; `is_json`: its input is a JSON document, to be altered as one."""

    run: Target
    seeds: tuple[bytes, ...]
    is_json: bool = False


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def tensors() -> dict[str, Any]:
    """The tensors of CONFIG, as numpy arrays."""
    rng = np.random.default_rng(0)
    layer = {
        "self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16),
        "self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24),
        "input_layernorm": (16,), "post_attention_layernorm": (16,),
    }  # fmt: skip
    sizes = {"model.embed_tokens.weight": (32, 16), "model.norm.weight": (16,)}
    sizes |= {f"model.layers.0.{name}.weight": size for name, size in layer.items()}
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


@cache
def weights() -> bytes:
    """A whole safetensors file."""
    from safetensors.numpy import save

    return bytes(save(tensors()))


@cache
def gguf_bytes() -> bytes:
    """A small GGUF file, header and tensors, as the conversion takes it."""
    import gguf

    with folder() as where:
        writer = gguf.GGUFWriter(str(where / "a.gguf"), "llama")
        writer.add_block_count(1)
        writer.add_embedding_length(16)
        writer.add_feed_forward_length(24)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_token_list(["a", "b", "<s>"])
        writer.add_array("counts", [1, 2, 3])
        names = {
            "token_embd": (32, 16), "output_norm": (16,), "blk.0.attn_norm": (16,), "blk.0.attn_q": (16, 16),
            "blk.0.attn_k": (8, 16), "blk.0.attn_v": (8, 16), "blk.0.attn_output": (16, 16), "blk.0.ffn_norm": (16,),
            "blk.0.ffn_gate": (24, 16), "blk.0.ffn_up": (24, 16), "blk.0.ffn_down": (16, 24),
        }  # fmt: skip
        for name, size in names.items():
            writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (where / "a.gguf").read_bytes()


def gguf_target(data: bytes) -> None:
    """Everything that is read of a GGUF before transformers sees it."""
    with folder() as where:
        file = where / "model.gguf"
        file.write_bytes(data)
        header = gguf_file._header(file)
        gguf_file._check_tensors(file.name, header)
        gguf_file._check_dimensions(file.name, header)
        gguf_file._rope(file.name, header)


def _load(where: Path) -> None:
    checkpoints.open_checkpoint(str(where))
    models.load(str(where))


def safetensors_target(data: bytes) -> None:
    with folder() as where:
        (where / "config.json").write_text(json.dumps(CONFIG))
        (where / "model.safetensors").write_bytes(data)
        _load(where)


def config_target(data: bytes) -> None:
    with folder() as where:
        (where / "config.json").write_bytes(data)
        (where / "model.safetensors").write_bytes(weights())
        with contextlib.suppress(UserError):
            shapes.shape_from(str(where))
        _load(where)


def index_target(data: bytes) -> None:
    with folder() as where:
        (where / "config.json").write_text(json.dumps(CONFIG))
        (where / "part-1.safetensors").write_bytes(weights())
        (where / "model.safetensors.index.json").write_bytes(data)
        _load(where)


def text_target(data: bytes) -> None:
    with folder() as where:
        (where / "text.txt").write_bytes(data)
        for split in ("calibration", "evaluation"):
            assert text.load(str(where / "text.txt"), split).text.strip()


def samples_target(data: bytes) -> None:
    with folder() as where:
        (where / "samples.jsonl").write_bytes(data)
        log = SampleLog(where / "samples.jsonl")
        for name in log.claims():
            for group in log.groups(name):
                log.rows(group)


def figures_target(data: bytes) -> None:
    figures.parse(data.decode("utf-8", "replace"), "crossover")


@cache
def finished_run() -> Path:
    """A small finished run to damage; removed when the process ends."""
    from tests import run_folder

    place = tempfile.mkdtemp(prefix="fuzzed-run-")
    import atexit

    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return run_folder.make(Path(place) / "run", names=("byte_account",))


def _verbs(run: Path, verbs: tuple[str, ...]) -> None:
    """The reading verbs on a run; each prints something and ends with a documented exit code."""
    for verb in verbs:
        arguments = [verb, str(run), str(run)] if verb == "compare" else [verb, str(run)]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            code = main(arguments)
        assert code in EXIT_CODES, (verb, code)
        assert code != 2 or len(said.getvalue().splitlines()) == 1, said.getvalue()


def record_target(name: str, verbs: tuple[str, ...]) -> Target:
    """One JSON record of a finished run replaced by the input."""

    def run(data: bytes) -> None:
        with folder() as where:
            shutil.copytree(finished_run(), where / "run")
            (where / "run" / name).write_bytes(data)
            _verbs(where / "run", verbs)

    return run


def path_target(data: bytes) -> None:
    """A run, a recorded machine or a table named by anything: nothing outside of what was named is read or written."""
    name = data.decode("utf-8", "replace")
    with folder() as where, contextlib.chdir(where):
        lines = [[verb, "--", name] for verb in ("show", "tables", "report", "predict")]
        for arguments in (*lines, ["compare", "--", name, name], ["tables", f"--recorded={name}"]):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                assert main(arguments) in EXIT_CODES
        # The tables of a machine that is recorded are written to a folder of their own; any other name writes nothing.
        known = {machine.split("/")[0] for machine in machines()} | set(machines())
        places = {file.relative_to(where).parts[:2] for file in where.rglob("*") if file.is_file()}
        assert not places or (name in known and all(top == "runs" and "recorded" in sub for top, sub in places))


def reports_target(name: str) -> Target:
    """One JSON record replaced by the input, then every page and standard record made of the run."""

    def run(data: bytes) -> None:
        from artifact.report import codecheck, html, in_toto, junit, ro_crate
        from artifact.report.stored import open_run

        with folder() as where:
            shutil.copytree(finished_run(), where / "run")
            (where / "run" / name).write_bytes(data)
            stored = open_run(where / "run")
            for made in (junit, in_toto, codecheck, ro_crate):
                assert made.render(stored)
            assert html.render(stored, plots=[], missing={})

    return run


def _record(name: str) -> bytes:
    return (finished_run() / name).read_bytes()


@cache
def targets() -> dict[str, Fuzzed]:
    """All targets by name."""
    config = json.dumps(CONFIG).encode()
    index = json.dumps({"weight_map": dict.fromkeys(tensors(), "part-1.safetensors")}).encode()
    paper = (figures.FOLDER / "crossover.json").read_bytes()
    paths = ("../../../etc/passwd", "runs/../..", "/", "~", "", "\0", "a" * 5000, "h200", "h200/../..", "-", "--help")
    return {
        "gguf": Fuzzed(gguf_target, (gguf_bytes(),)),
        "safetensors": Fuzzed(safetensors_target, (weights(),)),
        "config": Fuzzed(config_target, (config,), is_json=True),
        "index": Fuzzed(index_target, (index,), is_json=True),
        "text": Fuzzed(text_target, (b"One line.\nAnother line.\n" * 20, "Größe\n".encode() * 9)),
        "samples": Fuzzed(samples_target, (_record("samples.jsonl")[:4000], _record("samples.jsonl"))),
        "run.json": Fuzzed(
            record_target("run.json", ("show", "compare", "tables")), (_record("run.json"),), is_json=True
        ),
        "results.json": Fuzzed(reports_target("results.json"), (_record("results.json"),), is_json=True),
        "figures": Fuzzed(figures_target, (paper,), is_json=True),
        "paths": Fuzzed(path_target, tuple(path.encode() for path in paths)),
    }
