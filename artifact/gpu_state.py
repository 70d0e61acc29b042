"""The state of every NVIDIA GPU at one moment: clocks, power, temperature and why clocks are held back.

Read through nvidia-ml-py where it is installed, otherwise through nvidia-smi; on machines without an NVIDIA driver
there is nothing to read. Changes no setting.
"""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from typing import Any

DRIVER = Path("/proc/driver/nvidia/version")
FIELDS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "throttle_reasons": "clocks_throttle_reasons.active",
    "free_mib": "memory.free",
}
State = dict[str, float | str]


def sample() -> list[State]:
    """One state per GPU, in the driver's order; empty without an NVIDIA driver."""
    if not DRIVER.exists():
        return []
    return _by_library() or _by_tool()


def free_bytes() -> int | None:
    """Free memory of the first GPU, None when nobody says."""
    states = sample()
    return int(float(states[0]["free_mib"]) * (1 << 20)) if states and "free_mib" in states[0] else None


def _by_library() -> list[State]:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
        return [_state(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []


def _state(nvml: Any, handle: Any) -> State:
    return {
        "sm_mhz": float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "memory_mhz": float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "throttle_reasons": f"0x{nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle):016x}",
        "free_mib": float(nvml.nvmlDeviceGetMemoryInfo(handle).free >> 20),
    }


def _by_tool() -> list[State]:
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse(done.stdout) if done.returncode == 0 else []


def parse(output: str) -> list[State]:
    """States from the tool's lines; a value that it cannot tell is left out."""
    found = []
    for line in output.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(FIELDS):
            found.append({name: _value(text) for name, text in zip(FIELDS, values, strict=True) if text[:1] != "["})
    return found


def _value(text: str) -> float | str:
    return text if text.startswith("0x") else float(text)
