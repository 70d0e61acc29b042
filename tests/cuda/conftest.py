"""Without a GPU the Triton kernels run in Triton's interpreter; the switch must be set before triton is imported."""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _accept_numpy_scalars_of_one_dimension() -> None:
    """Let the interpreter of Triton 3.6 run loops with computed bounds on NumPy >= 2.4, which refuses int() of a (1,)
    array.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    original = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patched


if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    _accept_numpy_scalars_of_one_dimension()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device the kernels are tested on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
