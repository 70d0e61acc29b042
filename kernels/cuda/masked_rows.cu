// Masked up projection of one token, z = x or its RMSNorm:
//     s[n] = silu(g[n]),   kept: not |s[n]| <= t,   act[n] = s[n] (w[n] . z) where kept, 0 elsewhere
// RANK > 0 adds the update of an adapter: g[n] += gate_b[n] . a_gate, w[n] . z += up_b[n] . a_up, and the sums of
// act[n] down_a[n] go behind act; a_gate and a_up lie behind g.
//
// Rows are dealt to the blocks in turn, one block to a multiprocessor. PIECES warps share a row, each with its piece of
// z in registers; a team of them takes every TEAMS-th kept row and has DEPTH rows under way. Sums are added in a fixed
// order: the same bits every time.
//
// Macros: K, WARPS, PIECES, VECTORS (K = 256 PIECES VECTORS), DEPTH, OWNED (most rows of a block), NORMED, RANK, BF16,
// WIDE (factors of the update are float32, not of the weights' type).
#include "warp.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int TEAMS = WARPS / PIECES;
constexpr int R = RANK > 0 ? RANK : 1;
constexpr int GROUPS = THREADS / R;  // of threads that add the columns of an update's sums
static_assert(K == 256 * PIECES * VECTORS && WARPS % PIECES == 0 && OWNED <= THREADS && RANK <= THREADS, "shapes");

#if WIDE
using Factor = float;
__device__ __forceinline__ float widened(const float* p) { return *p; }
#else
using Factor = unsigned short;
__device__ __forceinline__ float widened(const unsigned short* p) {
    float low, high;
    widen(*p, low, high);
    return low;
}
#endif

// Of a weight row that this step reads once: past L1.
__device__ __forceinline__ uint4 streamed(const char* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ float dot(const uint4& q, const float* z) {
    const unsigned pairs[4] = {q.x, q.y, q.z, q.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float low, high;
        widen(pairs[i], low, high);
        sum = fmaf(low, z[2 * i], sum);
        sum = fmaf(high, z[2 * i + 1], sum);
    }
    return sum;
}

// Add the R columns of `rows` rows, value(i, j), in a fixed order; thread j < R returns its column's sum. `parts` is
// handed in: shared memory declared here would exist once per type of `value`.
template <typename Value>
__device__ __forceinline__ float column_sum(float (*parts)[R], int rows, Value value) {
    const int j = threadIdx.x % R, group = threadIdx.x / R;
    float sum = 0.0f;
    if (group < GROUPS) {
        for (int i = group; i < rows; i += GROUPS) sum += value(i, j);
        parts[group][j] = sum;
    }
    __syncthreads();
    sum = 0.0f;
    if (threadIdx.x < R)
        for (int i = 0; i < GROUPS; i++) sum += parts[i][threadIdx.x];
    __syncthreads();
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
masked_rows(const float* gate, const float* x, const float* gain, const char* w, float* act, const float* limit,
            int* kept, const Factor* gate_b, const Factor* up_b, const Factor* down_a, int* counts,
            float* sums, int* arrivals, float eps, int width) {
    __shared__ int rows[OWNED];
    __shared__ float activated[OWNED], partial[OWNED][PIECES];
    __shared__ float extra[RANK > 0 ? OWNED : 1], factors[RANK > 0 ? OWNED : 1][R + 1];
    __shared__ float parts[RANK > 0 ? GROUPS : 1][R];
    __shared__ float squares[WARPS];
    __shared__ int found[WARPS], last;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int piece = warp % PIECES, team = warp / PIECES;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    // What does not depend on the kernel before: gains, the limit, factors of the gate's update.
    const int column = piece * 256 * VECTORS + lane * 8;
    float z[VECTORS][8];
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 four = {1.0f, 1.0f, 1.0f, 1.0f};
            if (NORMED) four = *reinterpret_cast<const float4*>(gain + column + v * 256 + 4 * half);
            z[v][4 * half] = four.x, z[v][4 * half + 1] = four.y;
            z[v][4 * half + 2] = four.z, z[v][4 * half + 3] = four.w;
        }
    const float threshold = *limit;
    const int row = blockIdx.x + gridDim.x * thread;
    const bool own = thread < OWNED && row < width;
    float gate_factors[R] = {};
    if (RANK > 0 && own)
#pragma unroll
        for (int j = 0; j < RANK; j++) gate_factors[j] = widened(gate_b + static_cast<long long>(row) * RANK + j);
    asm volatile("griddepcontrol.wait;" ::: "memory");

    float g = own ? __ldcg(gate + row) : 0.0f;
    float square = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float4 four = __ldcg(reinterpret_cast<const float4*>(x + column + v * 256 + 4 * half));
            square += four.x * four.x + four.y * four.y + four.z * four.z + four.w * four.w;
            z[v][4 * half] *= four.x, z[v][4 * half + 1] *= four.y;
            z[v][4 * half + 2] *= four.z, z[v][4 * half + 3] *= four.w;
        }
    if (RANK > 0 && own)
#pragma unroll
        for (int j = 0; j < RANK; j++) g += gate_factors[j] * __ldcg(gate + width + j);
    const float silu = g / (1.0f + expf(-g));
    const bool keep = own && !(fabsf(silu) <= threshold);
    const unsigned chosen = __ballot_sync(~0u, keep);
    square = warp_sum(square);
    if (lane == 0) squares[warp] = square, found[warp] = __popc(chosen);
    __syncthreads();
    int at = __popc(chosen & ((1u << lane) - 1)), count = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        at += i < warp ? found[i] : 0;
        count += found[i];
    }
    if (keep) rows[at] = row, activated[at] = silu;
    if (own && !keep) act[row] = 0.0f;
    __syncthreads();

    const char* source = w + column * 2;
    uint4 under_way[DEPTH][VECTORS];
    auto ask = [&](int stage, int i) {
        if (i < count) {
            const char* from = source + static_cast<long long>(rows[i]) * (2 * K);
#pragma unroll
            for (int v = 0; v < VECTORS; v++) under_way[stage][v] = streamed(from + v * 512);
        }
    };
#pragma unroll
    for (int d = 0; d < DEPTH; d++) ask(d, team + d * TEAMS);
    if (NORMED) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < PIECES; i++) total += squares[i];
        const float scale = 1.0f / sqrtf(total / K + eps);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int i = 0; i < 8; i++) z[v][i] *= scale;
    }
    if (RANK > 0 && keep) {  // with the first rows under way
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < RANK; j++) {
            const long long factor = static_cast<long long>(row) * RANK + j;
            sum += widened(up_b + factor) * __ldcg(gate + width + RANK + j);
            factors[at][j] = widened(down_a + factor);
        }
        extra[at] = sum;
    }
    for (int base = team; base < count; base += DEPTH * TEAMS)
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int i = base + d * TEAMS;
            if (i < count) {
                float sum = 0.0f;
#pragma unroll
                for (int v = 0; v < VECTORS; v++) sum += dot(under_way[d][v], z[v]);
                ask(d, i + DEPTH * TEAMS);
                sum = warp_sum(sum);
                if (lane == 0) partial[i][piece] = sum;
            }
        }
    __syncthreads();

    if (thread < count) {
        float up = 0.0f;
#pragma unroll
        for (int p = 0; p < PIECES; p++) up += partial[thread][p];
        if (RANK > 0) up += extra[thread];
        const float result = activated[thread] * up;
        act[rows[thread]] = result;
        activated[thread] = result;
    }
    if (RANK > 0) {
        __syncthreads();
        const float sum = column_sum(parts, count, [&](int i, int j) { return activated[i] * factors[i][j]; });
        if (thread < RANK) sums[blockIdx.x * R + thread] = sum;
    }
    // The block that arrives last adds the counts and the sums of all.
    if (thread == 0) counts[blockIdx.x] = count;
    __threadfence();
    __syncthreads();
    if (thread == 0) last = atomicAdd(arrivals, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    int all = 0;
    for (int i = lane; i < gridDim.x; i += 32) all += __ldcg(counts + i);
    all = warp_sum(all);
    if (thread == 0) *kept = all, *arrivals = 0;
    if (RANK > 0) {
        const float sum = column_sum(parts, gridDim.x, [&](int i, int j) { return __ldcg(sums + i * R + j); });
        if (thread < RANK) act[width + thread] = sum;
    }
}
