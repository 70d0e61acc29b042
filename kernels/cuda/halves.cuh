// The two halves of a word, of the weights' type, as float32. Macro: BF16.
__device__ __forceinline__ void widen(unsigned pair, float& low, float& high) {
#if BF16
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
#else
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(low), "=f"(high) : "r"(pair));
#endif
}
