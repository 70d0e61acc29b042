"""What this machine is: `system.json`. No host or user name, no serial number, no path. Imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from artifact.profiles import thread_count

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1
PACKAGES = (
    "torch",
    "transformers",
    "numba",
    "numpy",
    "llvmlite",
    "safetensors",
    "gguf",
    "datasets",
    "tokenizers",
    "triton",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-ml-py",
    "flash-attn",
    "ray",
    "scipy",
)
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def describe() -> dict[str, Any]:
    """The system record:

    hardware, operating system, Python, package versions, commit. Values that are unknown are None.
    """
    memory = psutil.virtual_memory()
    return {
        "schema": SCHEMA,
        "cpu": {
            "model": cpu_model(),
            "architecture": platform.machine(),
            "physical_cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(),
            "usable_threads": thread_count(),
            "caches": caches(),
            "vector_extensions": vector_extensions(),
        },
        "memory_bytes": memory.total,
        "os": {"system": platform.system(), "release": platform.release(), "name": os_name()},
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "packages": packages(),
        "gpus": gpus(),
        "commit": commit(),
    }


def packages() -> dict[str, str | None]:
    """Installed versions of the packages that a measurement can depend on; None for a missing one."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str | None:
    """The processor's marketing name."""
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string")
    found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or None


def vector_extensions() -> list[str]:
    """The instruction sets that decide how wide a float32 vector is."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    return sorted(flags & {"avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "neon", "asimd", "sve"})


def caches() -> dict[str, int]:
    """Bytes of each cache of the first core, by level and kind, such as {"L2 unified": 1048576}."""
    sizes: dict[str, int] = {}
    for index in sorted(CACHES.glob("index[0-9]*")):
        level, kind, size = (_read(index / name) for name in ("level", "type", "size"))
        if level and kind and size and (number := re.fullmatch(r"(\d+)([KM]?)", size)):
            sizes[f"L{level} {kind.lower()}"] = int(number[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[number[2]]
    return sizes


def last_level_cache_bytes() -> int | None:
    """Bytes of the largest cache: a working set below it measures the cache, not the memory."""
    return max(caches().values(), default=None)


def os_name() -> str | None:
    """The distribution's own name, such as "Debian GNU/Linux 12 (bookworm)"."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    found = re.search(r'^PRETTY_NAME="?([^"\n]+)"?$', _read(Path("/etc/os-release")) or "", re.MULTILINE)
    return found.group(1) if found else None


def gpus() -> list[dict[str, str]]:
    """Name, memory, driver, power limit and maximal clocks of every NVIDIA GPU, as the driver's own tool reports
    them.
    """
    fields = (
        "name",
        "memory.total",
        "driver_version",
        "power.limit",
        "clocks.max.sm",
        "clocks.max.memory",
        "compute_cap",
    )
    output = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    lines = [line.split(", ") for line in (output or "").splitlines()]
    return [dict(zip(fields, line, strict=True)) for line in lines if len(line) == len(fields)]


def commit() -> str | None:
    """The commit of a clean checkout or of an archive of one; None elsewhere, because then a commit would not say what
    was run.
    """
    if not (ROOT / ".git").exists():
        archived = _read(ROOT / "artifact" / "archived-commit.txt") or ""
        return archived if re.fullmatch(r"[0-9a-f]{40}", archived) else None
    status = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return _output("git", "-C", str(ROOT), "rev-parse", "HEAD") if status == "" else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, env=os.environ | {"LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
