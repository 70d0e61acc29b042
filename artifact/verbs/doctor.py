"""`artifact doctor`:

what this machine can run, what is missing, and the exact command that adds it. Measures nothing.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from artifact import embedded, gpu_state, profiles, shapes, system
from artifact.errors import UserError

NEEDED = ("torch", "transformers", "numba", "numpy", "safetensors", "gguf", "datasets", "scipy")
# Name, import name, what is left out without it, the set of requirements that adds it.
EXTRAS = (
    ("ray", "ray", "campaigns run on this machine alone", "ray"),
    ("lm-eval", "lm_eval", "multiple-choice accuracy is not measured", "eval"),
)
MEMORY_NEEDED_BYTES = 6e9  # peak of the embedded profile
DISK_NEEDED_BYTES = 2e9  # converted weights, text, one run with its samples


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `fix` is the command or step that mends it; empty when nothing is wrong."""

    name: str
    ok: bool
    found: str
    fix: str = ""
    required: bool = True


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(as_json: bool) -> int:
    """Say what this machine can run and how to add what is missing; exit code 4 when the default profile cannot run."""
    record = system.describe()
    checks = all_checks(record)
    runs = all(check.ok or not check.required for check in checks)
    if as_json:
        report = {"system": record, "checks": [asdict(check) for check in checks], "ready": runs}
        click.echo(json.dumps(report, separators=(",", ":"), sort_keys=True))
        return 0 if runs else 4
    for check in checks:
        mark = "ok  " if check.ok else "MISS" if check.required else "-   "
        click.echo(f"{mark} {check.name:<16} {check.found}" + (f"\n     fix: {check.fix}" if check.fix else ""))
    click.echo("ready: make verify-all, or artifact verify-all" if runs else "not ready: run the fix of each MISS")
    return 0 if runs else 4


def all_checks(record: Mapping[str, Any]) -> list[Check]:
    """Every check, the required ones first."""
    return [
        _python(),
        _packages(record),
        _model(),
        _memory(),
        _disk(embedded.data_folder()),
        _text(),
        _threads(record),
        *_gpu(record),
        _attention_paths(),
        _flash_attention(record),
        *(_extra(*extra) for extra in EXTRAS),
    ]


def _python() -> Check:
    version, new_enough = ".".join(map(str, sys.version_info[:3])), sys.version_info >= (3, 11)
    return Check("python", new_enough, version, "" if new_enough else "install Python 3.11 or newer")


def _packages(record: Mapping[str, Any]) -> Check:
    versions = record["packages"]
    missing = [name for name in NEEDED if versions.get(name) is None]
    found = ", ".join(f"{name} {versions[name]}" for name in NEEDED if versions.get(name))
    return Check(
        "packages", not missing, found or "none", f"make setup  (missing: {', '.join(missing)})" if missing else ""
    )


def _model() -> Check:
    try:
        return Check("embedded model", True, f"{embedded.path().name}, verified")
    except UserError as error:
        return Check("embedded model", False, str(error), "make setup" if embedded.in_checkout() else "artifact fetch")


def _memory() -> Check:
    free = psutil.virtual_memory().available
    enough = free >= MEMORY_NEEDED_BYTES
    fix = "" if enough else f"close programs until {MEMORY_NEEDED_BYTES / 1e9:.0f} GB are free"
    return Check("memory", enough, f"{free / 1e9:.1f} GB free", fix)


def _disk(folder: Path) -> Check:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    enough = free >= DISK_NEEDED_BYTES
    fix = "" if enough else "free some space, or point ARTIFACT_DATA to another disk"
    return Check("disk", enough, f"{free / 1e9:.1f} GB free for data", fix)


def _text() -> Check:
    """The default text always exists, because CPython brings one; only which one it will be depends on the machine."""
    found = importlib.util.find_spec("pydoc_data.topics") is not None
    fix = "" if found else "give a text with --text FILE"
    return Check("text", found, "WikiText-2 where cached or reachable, otherwise CPython's documentation", fix)


def _threads(record: Mapping[str, Any]) -> Check:
    cpu = record["cpu"]
    backend = f"Numba on {cpu['usable_threads']} threads of {cpu['model'] or 'an unnamed CPU'}"
    return Check("cpu backend", True, backend, required=False)


def _card(card: Mapping[str, str], state: Mapping[str, Any] | None) -> str:
    """One GPU with driver, clocks and free memory, as far as the driver says them."""
    said = [card["name"], f"driver {card['driver_version']}", f"clocks up to {card['clocks.max.sm']}"]
    if state and "free_mib" in state:
        said.append(f"{float(state['free_mib']) / 1024:.1f} GiB free")
    return ", ".join(said)


def _attention_paths() -> Check:
    """The implementation behind every attention path of the default device, probed on tensors of a small model."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("numba") is None:
        return Check("attention", False, "not probed without torch and numba", required=False)
    import torch

    from artifact.engine.attention_paths import backend_name, paths_here

    device, dtype = ("cuda", torch.float16) if profiles.cuda_available() else ("cpu", torch.float32)
    query, keys = torch.zeros(9, 64, device=device), torch.zeros(3, 256, 64, device=device, dtype=dtype)
    lengths = torch.full((3,), 255, dtype=torch.int32)
    try:
        found = [f"{path}: {backend_name(path, query, keys, lengths)}" for path in paths_here(device)]
    except RuntimeError as error:
        return Check("attention", False, str(error), required=False)
    return Check("attention", True, "; ".join(found), required=False)


def _gpu(record: Mapping[str, Any]) -> list[Check]:
    """Every GPU as the driver describes it, then what would run on it."""
    states = gpu_state.sample()
    cards = [_card(card, states[i] if i < len(states) else None) for i, card in enumerate(record["gpus"])]
    return [*(Check("gpu", True, card, required=False) for card in cards), *_gpu_backend(record)]


def _gpu_backend(record: Mapping[str, Any]) -> list[Check]:
    names = ", ".join(gpu["name"] for gpu in record["gpus"])
    if not names:
        return [Check("gpu backend", False, "no NVIDIA GPU: the embedded profile is the default", required=False)]
    if not profiles.cuda_available():
        version = record["packages"].get("torch")
        found = f"{names}, but torch {version} sees no CUDA device"
        return [Check("gpu backend", False, found, "install the CUDA build of torch, then `pip install .[gpu]`", False)]
    triton = record["packages"].get("triton")
    if triton is None:
        return [Check("gpu backend", False, f"{names}, without triton", "pip install .[gpu]", required=False)]
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    fix = "" if compiler else "install a C compiler (gcc), which Triton needs at run time"
    backend = Check("gpu backend", compiler is not None, f"Triton {triton} on {names}", fix, required=False)
    return [backend, _sparse_products()]


def _sparse_products() -> Check:
    """Which form of the sparse products runs: the streaming one needs a recent GPU, NVRTC for it, and room in the
    shared memory of a block.
    """
    import torch

    from kernels.cuda import nvrtc

    lacking = nvrtc.missing(torch.cuda.current_device())
    if lacking:
        fix = "pip install cuda-bindings nvidia-cuda-nvrtc, which torch's CUDA build brings; or a newer torch"
        fix = "" if lacking.startswith("compute capability") else fix
        return Check("sparse products", False, f"in Triton, a fifth slower ({lacking})", fix, required=False)
    refused = _refused_products("cuda")
    found = "streamed, CUDA C++ compiled by NVRTC"
    if refused:
        found += "; of Llama-3.1-8B in Triton: " + ", ".join(f"{site} ({why})" for site, why in refused.items())
    return Check("sparse products", True, found, required=False)


def _refused_products(device: str) -> dict[str, str]:
    """Why the streaming form does not run here, for every product of Llama-3.1-8B that it does not take."""
    import torch

    from kernels.cuda import sparse_rows
    from kernels.norm import Norm

    shape = shapes.known_shape("Llama-3.1-8B")
    q, kv, hidden, inner = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        shape.hidden,
        shape.intermediate,
    )
    sites = {
        "qkv": (hidden, (0, q, q + kv, q + 2 * kv), True, False),
        "o": (q, (0, hidden), False, False),
        "gate_up": (hidden, (0, inner), True, True),
        "down": (inner, (0, hidden), False, False),
    }
    one, half = torch.zeros(1, device=device), torch.zeros(1, device=device, dtype=torch.float16)
    refused = {}
    for site, (depth, segments, normed, paired) in sites.items():
        x, w_in = one.expand(depth), half.expand(depth, segments[-1] * (1 + paired))
        norm = Norm(x, 1e-5) if normed else None
        refused[site] = sparse_rows.refusal(x, w_in, segments, norm, paired)
    return {site: why for site, why in refused.items() if why}


def _flash_attention(record: Mapping[str, Any]) -> Check:
    if not record["gpus"]:
        return Check("flash-attn", False, "not needed without a GPU", required=False)
    version = record["packages"].get("flash-attn")
    fix = "" if version else "pip install .[gpu]"
    return Check("flash-attn", version is not None, version or "missing: that baseline is not run", fix, required=False)


def _extra(name: str, module: str, without: str, which: str) -> Check:
    if importlib.util.find_spec(module) is not None:
        return Check(name, True, "installed", required=False)
    fix = f"requirements/setup.sh {which}" if embedded.in_checkout() else f"pip install '.[{which}]'"
    return Check(name, False, f"not installed: {without}", fix, required=False)
