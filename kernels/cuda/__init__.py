"""GPU backend: the operations of a decode step on one NVIDIA GPU, in Triton; on recent GPUs the sparse products and the
masked up projection in CUDA C++ (`sparse_rows.py`, `masked_rows.py`; `nvrtc.py` compiles and launches them).

Weights and caches are float16 or bfloat16, for which launches were measured, or float32; products of batches take half
precision alone. Vectors are float32, sums float32 in a fixed order: two runs give the same bits. No result is
accumulated with atomics; where several programs share an output, each writes its partial sums to a workspace and the
one that arrives last (an integer counter says which) adds them in index order.

Selection needs no launch of its own: every program compares its own slice of x with the threshold as it reads it. Nor
do norms (applied while reading) and residual additions (on writing). Products of batches are the exception: one launch
ahead of each norms the inputs, decides, and leaves them in halves.

Overlap. On compute capability 9.0 and later, launches carry programmatic dependent launch: a kernel starts while its
predecessor drains, loads the weights that do not depend on it, and waits only before touching its results.
`token.bind_advance` never releases its successor early, so lengths and positions may be read before the wait.

Every kernel asks for one split of L1 and shared memory (`common.SHARED_MEMORY_PERCENT`): a multiprocessor drains before
the split changes, which undoes the overlap between kernels that differ.

A launch owns the small tensors it reads (tile tables, addresses): keep the list of launches as long as a graph made of
it. Workspaces and counters are shared by all launches of a device, so run the launches of a process on one stream at a
time.
"""
