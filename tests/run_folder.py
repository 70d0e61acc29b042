"""Run folders made of simulated rows, for tests of everything that is derived from a folder. Nothing is measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from artifact import claim as claims
from artifact.profiles import Profile
from artifact.records import Run
from artifact.verify import derive
from tests.faults import baseline_sensitivity, crossover, speedup_bounds

PROFILE = Profile("embedded", "SmolLM2-135M-Instruct.gguf", "cpu", "float32", None, 2)
SYSTEM: dict[str, Any] = {
    "schema": 1,
    "cpu": {"model": "Example CPU <8-Core>", "usable_threads": 2, "vector_extensions": ["avx2", "fma"], "caches": {}},
    "memory_bytes": 25 * 10**9,
    "os": {"system": "Linux", "release": "6.1", "name": "Debian GNU/Linux 12 (bookworm)"},
    "python": {"version": "3.11.2", "implementation": "CPython"},
    "packages": {"torch": "2.13.0", "numba": "0.68.0", "triton": None},
    "gpus": [],
    "commit": "0123456789abcdef0123456789abcdef01234567",
}
STARTED = "2025-01-02T03:04:05Z"
Row = dict[str, Any]


def crossover_rows() -> list[Row]:
    return crossover.honest()


def wasteful_rows() -> list[Row]:
    """Speedups over a dense baseline that repeats KV heads: some predicates hold, the byte bound is contradicted."""
    rows = speedup_bounds.honest()
    speedup_bounds.dense_wastes(rows)
    return rows


def quality_rows(windows: int = 4) -> list[Row]:
    """Window rows of dense decoding, three projection keeps, three selections and a composition."""
    arms = [(1.0, 1.0, 0.0), (0.7, 1.0, 0.05), (0.6, 1.0, 0.11), (0.5, 1.0, 0.3)]
    arms += [(1.0, 0.3, 0.01), (1.0, 0.2, 0.02), (1.0, 0.1, 0.08), (0.7, 0.3, 0.07)]
    rng = np.random.default_rng(2)
    rows: list[Row] = [{"kind": "shape", "shape": crossover_rows()[0]["shape"], "weight_bits": 32, "kv_bits": 32}]
    for window in range(windows):
        noise = rng.normal(0, 0.5, 32)
        for r_p, r_kv, shift in arms:
            parts = ([f"p{100 * r_p:g}"] if r_p < 1 else []) + ([f"kv{100 * r_kv:g}"] if r_kv < 1 else [])
            label = "+".join(parts) or "dense"
            row = {"kind": "window", "window": window, "r_p": r_p, "r_kv": r_kv, "label": label, "context": 4096}
            row |= {"method": "snapkv" if r_kv < 1 else "full", "nll": (2.7 + shift + noise).tolist(), "kv": {}}
            rows.append(row | {"window_tokens_hash": f"w{window}", "protocol": "p", "scored": 32, "text": "simulated"})
    return rows


ROWS = {
    "crossover": crossover_rows,
    "baseline_sensitivity": baseline_sensitivity.honest,
    "speedup_bounds": wasteful_rows,
    "quality_matched_crossover": quality_rows,
}


def make(folder: Path, names: Iterable[str] = ("byte_account", "crossover"), judged: bool = True) -> Path:
    """A run folder with simulated rows of the named claims; `judged` also derives its results."""
    with Run(folder, PROFILE) as run:
        run.write_json("system.json", SYSTEM)
        for name in names:
            if name == "byte_account":
                claims.load(name).measure(run)
                continue
            rows = ROWS[name]()
            run.start_claim(name, Path(__file__))  # so that a claim can be simulated before it is written
            for key, block in sorted({(str(row.get("cell", "windows-0")), int(row.get("block", 0))) for row in rows}):
                own = [row for row in rows if (row.get("cell", "windows-0"), row.get("block", 0)) == (key, block)]
                run.record(name, key, own, block)
    options = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(options | {"started": STARTED}))
    if judged:
        derive(folder)
    return folder
