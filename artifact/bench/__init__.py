"""Benchmarks of parts: kernels and steps against the bandwidth of this machine and against the libraries people use."""
