"""Verification of claims about sparse LLM decoding: the library and the `artifact` command."""
