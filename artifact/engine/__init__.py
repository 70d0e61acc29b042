"""The decode engine: models and their files, caches, the decode step, prefill, the numeric gate, clocks."""
