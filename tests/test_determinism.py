"""The same bits on every run and for every number of threads, in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Widths that no thread count divides, segment bounds inside a vector, lengths around splits, a ragged cache.
SCRIPT = """
import hashlib, os
import numba, torch
assert numba.get_num_threads() == int(os.environ["NUMBA_NUM_THREADS"])
from kernels import attention, gate_up, gemv, masked_mlp, score, sparse_gemv
from kernels.masked_mlp import LowRank
from kernels.norm import Norm
from tests.inputs import draw, filled, selection, vector

outputs = {}
x, w, bias = vector("outliers", 333), draw(337, 333, seed=1), draw(337, seed=2)
y = filled(337)
gemv.bind(x, w, y, bias)()
outputs["gemv"] = y

y, select = filled(337), selection([0.4, 0.9, 0.1], (0, 131, 202, 337))
sparse_gemv.bind(x, w.T.contiguous(), y, select, bias)()
outputs["sparse_gemv"], outputs["kept"] = y, select.kept

w, act = draw(2 * 149, 333, seed=3), filled(149)
gate_up.bind(x, w, act)()
outputs["gate_up"] = act
act = filled(149)
gate_up.bind_sparse(x, w.T.contiguous(), act, selection([0.4, 0.9], (0, 149, 298)))()
outputs["gate_up sparse"] = act

low = LowRank(draw(149, 5, seed=10), draw(149, 5, seed=11), draw(149, 5, seed=12))
act, kept = filled(154), torch.zeros(1, dtype=torch.int32)
gain, limit = Norm(draw(333, seed=6), 1e-5), torch.tensor([0.2])
masked_mlp.bind(draw(159, seed=13), x, w[149:], act, limit, kept, gain, low)()
outputs["masked_mlp"] = act

keys, values, out = draw(3, 1700, 64, seed=4), draw(3, 1700, 64, seed=5), filled(576)
lengths = torch.tensor([1600, 513, 1023], dtype=torch.int32)
attention.bind(draw(9, 64), keys, values, lengths, out, 0.125)()
outputs["attention"] = out

norm, y = Norm(draw(333, seed=6), 1e-5), draw(337, seed=7)
gemv.bind(x, draw(337, 333, seed=1), y, bias, norm, accumulate=True)()
outputs["gemv normed, added"] = y
select, y = selection([0.4, 0.9, 0.1], (0, 131, 202, 337)), draw(337, seed=7)
sparse_gemv.bind(x, draw(337, 333, seed=1).T.contiguous(), y, select, bias, norm, accumulate=True)()
outputs["sparse_gemv normed, added"] = y
act = filled(149)
gate_up.bind(x, w, act, norm)()
outputs["gate_up normed"] = act
qkv, out, at = draw(15 * 64, seed=8), filled(576), torch.tensor([1650], dtype=torch.int32)
full, packed = (keys.clone(), values.clone()), (keys.clone(), values.clone(), lengths)
attention.bind_step(qkv, 10000.0 ** -(torch.arange(32) / 32), at, full, packed, lengths, out, 0.125)()
outputs["step attention"] = out
outputs["score"] = score.snapkv(draw(9, 16, 64), keys, 0.125, "max", 21)

for name, value in outputs.items():
    assert torch.isfinite(value.double()).all(), name
    print(name, hashlib.sha256(value.numpy().tobytes()).hexdigest())
"""


def bits(threads: int, compiled: Path) -> str:
    env = dict(os.environ, NUMBA_NUM_THREADS=str(threads), NUMBA_CACHE_DIR=str(compiled), OMP_WAIT_POLICY="passive")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_results_do_not_depend_on_the_run_the_threads_or_the_cache_of_compiled_code(tmp_path: Path) -> None:
    """The first process compiles, the others load what it compiled: inlining could differ, results must not."""
    one = bits(1, tmp_path)
    assert len(one.splitlines()) == 12 and any(tmp_path.rglob("*.nbc"))
    for threads in (2, 3):
        assert bits(threads, tmp_path) == one, f"{threads} threads"
