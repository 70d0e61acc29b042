"""Tests of the GPU kernels. pytest imports this folder as `cuda`; NVIDIA's `cuda.bindings` stays importable."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
