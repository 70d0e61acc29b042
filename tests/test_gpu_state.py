"""What a GPU's state looks like in a record, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifact import gpu_state

LINE = "1980, 3201, 310.25, 41, 0x0000000000000000, 140000\n"


def test_the_tools_line_becomes_numbers_with_units_in_their_names() -> None:
    assert gpu_state.parse(LINE) == [
        {
            "sm_mhz": 1980.0,
            "memory_mhz": 3201.0,
            "power_w": 310.25,
            "temperature_c": 41.0,
            "throttle_reasons": "0x0000000000000000",
            "free_mib": 140000.0,
        }
    ]


def test_values_that_the_driver_does_not_tell_are_left_out() -> None:
    state = gpu_state.parse("1980, 3201, [N/A], 41, [Not Supported], 100\nnoise\n")
    assert state == [{"sm_mhz": 1980.0, "memory_mhz": 3201.0, "temperature_c": 41.0, "free_mib": 100.0}]


def test_without_a_driver_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_state, "DRIVER", Path("/nonexistent"))
    assert gpu_state.sample() == [] and gpu_state.free_bytes() is None


def test_the_tool_answers_where_the_library_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{LINE}'\n".replace("\n'", "\\n'"))
    tool.chmod(0o755)
    monkeypatch.setattr(gpu_state, "DRIVER", tool)
    monkeypatch.setattr(gpu_state, "_by_library", lambda: [])
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpu_state.free_bytes() == 140000 << 20
