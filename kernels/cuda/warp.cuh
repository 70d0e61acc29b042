// What the kernels share: halves of a word as float32, sums over a warp. Macro: BF16 (the halves' type).
__device__ __forceinline__ void widen(unsigned pair, float& low, float& high) {
#if BF16
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
#else
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(low), "=f"(high) : "r"(pair));
#endif
}

// The sum of all lanes' values, in every lane.
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}
