"""Verification of claims about sparse LLM decoding: the library and the `artifact` command."""

import kernels as _kernels  # noqa: F401  first of all, so that transformers never takes it for Hugging Face's `kernels`
