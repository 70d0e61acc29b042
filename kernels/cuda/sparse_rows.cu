// Thresholded product of one token, z = x or its RMSNorm:
//     y[n] (+)= sum over {i : not |z[i]| <= t} of z[i] w[i, n] (+ bias[n])
// PARTS = 2: y = silu(part 0) * part 1, part p in columns N p + n with a threshold of its own.
//
// A cluster of CLUSTER blocks owns a tile of columns and shares its kept rows; every warp streams its own rows through
// shared memory by asynchronous copies that no other thread waits for. Partial sums meet in the block that owns a
// column and are added in the order of blocks and warps: the same bits every time.
//
// Macros: K, SLICE (channels a block scans: K, or 1 / CLUSTER of them), PARTS, NORMED, ACCUMULATE, BIASED, BF16,
// COLUMNS, CLUSTER, WARPS, DEPTH (stages), ROWS (of a warp's rows per stage).
#include "warp.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int QUADS = (SLICE / 4 + THREADS - 1) / THREADS;   // groups of four channels that a thread decides over
constexpr int WORDS = 4 * QUADS * WARPS;                     // of 32 decisions
constexpr int LANES = COLUMNS >= 256 ? 32 : COLUMNS / 8;     // lanes that share a row
constexpr int SUB = 32 / LANES;                              // rows that a warp reads at once
constexpr int VECTORS = COLUMNS >= 256 ? COLUMNS / 256 : 1;  // 16-byte pieces of a row per lane
constexpr int TEAM = WARPS / PARTS;                          // warps of a part
constexpr bool DEALT = SLICE == K && CLUSTER > 1;            // every block scans all channels and takes its share
constexpr int LONGEST = DEALT ? (K + CLUSTER - 1) / CLUSTER : SLICE;
constexpr int ROW_BYTES = COLUMNS * 2;
constexpr int STAGE_BYTES = ROWS * SUB * ROW_BYTES;
constexpr int RING_BYTES = DEPTH * STAGE_BYTES;
constexpr int SHARE = (COLUMNS + CLUSTER - 1) / CLUSTER;     // columns that a block writes
static_assert(RING_BYTES >= COLUMNS * 4, "the ring is too short for the sums of a warp");
static_assert(!DEALT || WARPS * RING_BYTES >= 16 * QUADS * THREADS, "the ring is too short for the inputs");
static_assert(SHARE <= THREADS && K % 4 == 0 && SLICE % 4 == 0 && WARPS % PARTS == 0, "shapes");

struct Entry {
    float z;
    int channel;
};

// Four channels by their place in what this block scans: all, or pairs of quads (a sector of x) dealt to the blocks in
// turn, so that rows read at one time are neighbours in memory.
__device__ __forceinline__ int quad_of(int place, int rank) {
    return SLICE == K ? place : (place / 2 * CLUSTER + rank) * 2 + place % 2;
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Write to the same variable of another block of the cluster.
__device__ __forceinline__ void push(void* here, int rank, unsigned value) {
#if CLUSTER > 1
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(value) : "memory");
#else
    *static_cast<unsigned*>(here) = value;
#endif
}

__device__ __forceinline__ void cluster_arrive() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// What a thread read of the inputs: quads of channels, whether they exist, and their values after the norm.
struct Inputs {
    bool real[QUADS];
    float value[QUADS][4];
};

// The kept channels of every part as a bit map, word (4 j + k) WARPS + warp for component k of a warp's quads j, and
// the number of kept channels before each word.
struct Kept {
    unsigned bits[PARTS][WORDS];
    int before[PARTS][WORDS + 1];
};

__device__ __forceinline__ float4 quad_at(const float* base, bool real, int quad) {
    return real ? __ldcg(reinterpret_cast<const float4*>(base) + quad) : float4{};
}

// Multiply by the gains and the inverse root of the mean square over all threads.
__device__ __forceinline__ void normalise(Inputs& in, const float (&gains)[QUADS][4], float eps) {
    __shared__ float sums[WARPS];
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < QUADS; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) square += in.value[j][k] * in.value[j][k];
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = square;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) total += sums[i];
    const float scale = 1.0f / sqrtf(total / K + eps);
#pragma unroll
    for (int j = 0; j < QUADS; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) in.value[j][k] *= gains[j][k] * scale;
}

// Fill the bit map and its prefix sums; NaN is kept.
__device__ __forceinline__ void decide(const Inputs& in, const float (&limit)[PARTS], Kept& kept) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < QUADS; j++)
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const unsigned chosen = __ballot_sync(~0u, in.real[j] && !(fabsf(in.value[j][k]) <= limit[p]));
                if (lane == 0) kept.bits[p][(4 * j + k) * WARPS + warp] = chosen;
            }
    __syncthreads();
    if (warp < PARTS) {
        constexpr int SPAN = (WORDS + 31) / 32;
        const unsigned* bits = kept.bits[warp] + lane * SPAN;
        int sum = 0;
#pragma unroll
        for (int i = 0; i < SPAN; i++) sum += lane * SPAN + i < WORDS ? __popc(bits[i]) : 0;
        int upto = sum;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, upto, step);
            upto += lane >= step ? other : 0;
        }
        int at = upto - sum;
#pragma unroll
        for (int i = 0; i < SPAN; i++)
            if (lane * SPAN + i < WORDS) {
                kept.before[warp][lane * SPAN + i] = at;
                at += __popc(bits[i]);
            }
        if (lane == 31) kept.before[warp][WORDS] = upto;
    }
    __syncthreads();
}

// List the kept channels that this block scanned, in the order of the bit map.
__device__ __forceinline__ void list_all(const Inputs& in, const Kept& kept, int rank, Entry* list) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned below = (1u << lane) - 1;
#pragma unroll
    for (int j = 0; j < QUADS; j++) {
        const int c = 4 * quad_of(j * THREADS + threadIdx.x, rank);
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const int word = (4 * j + k) * WARPS + warp;
                const unsigned chosen = kept.bits[p][word];
                const int at = kept.before[p][word] + __popc(chosen & below);
                if (chosen >> lane & 1) list[p * LONGEST + at] = {in.value[j][k], c + k};
            }
    }
}

// List this block's share of what all blocks of the cluster scanned: entry i is the kept channel number rank +
// CLUSTER i, looked up in the bit map; listing all of them would cost ten times the instructions.
__device__ __forceinline__ void list_share(const float* inputs, const Kept& kept, int part, int rank, int own,
                                           Entry* list) {
    for (int i = threadIdx.x % (32 * TEAM); i < own; i += 32 * TEAM) {
        const int wanted = rank + CLUSTER * i;
        int word = 0;
#pragma unroll
        for (int step = 4096; step > 0; step /= 2)
            if (step < WORDS && word + step < WORDS && kept.before[part][word + step] <= wanted) word += step;
        unsigned left = kept.bits[part][word];
        int nth = wanted - kept.before[part][word], bit = 0;
#pragma unroll
        for (int half = 16; half > 0; half /= 2) {
            const int low = __popc(left & ((1u << half) - 1));
            if (nth >= low) nth -= low, left >>= half, bit += half;
        }
        const int c = 4 * ((word / WARPS / 4 * WARPS + word % WARPS) * 32 + bit) + word / WARPS % 4;
        list[part * LONGEST + i] = {inputs[c], c};
    }
}

// Stream this warp's rows of the list through its ring and return its sums; lanes of a warp that share a column hold
// parts of its sum. source: the first column of the tile in the weights.
__device__ __forceinline__ void stream(const char* source, long long stride_bytes, int columns, const Entry* entries,
                                       int own, char* ring, float (&acc)[VECTORS][8]) {
    constexpr int PACE = TEAM * SUB;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int sub = lane / LANES, row = warp % TEAM * SUB + sub, column = lane % LANES * 8;
    const int rounds = (own + PACE - 1) / PACE;  // the same for all lanes of a warp
    source += column * 2;
    char* slots = ring + sub * ROW_BYTES + column * 2;
    auto ask = [&](int stage, int round) {
#pragma unroll
        for (int u = 0; u < ROWS; u++) {
            const int r = row + (round + u) * PACE;
            if (r < own) {
                const char* from = source + entries[r].channel * stride_bytes;
                const unsigned to = shared_address(slots + stage * STAGE_BYTES + u * SUB * ROW_BYTES);
#pragma unroll
                for (int v = 0; v < VECTORS; v++)
                    if (column + v * 256 < columns)
                        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                                     ::"r"(to + v * 512), "l"(from + v * 512) : "memory");
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int d = 0; d < DEPTH; d++) ask(d, d * ROWS);
    for (int round = 0, stage = 0; round < rounds; round += ROWS, stage = stage + 1 == DEPTH ? 0 : stage + 1) {
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
#pragma unroll
        for (int u = 0; u < ROWS; u++) {
            const int r = row + (round + u) * PACE;
            if (r < own) {
                const float z = entries[r].z;
                const char* at = slots + stage * STAGE_BYTES + u * SUB * ROW_BYTES;
#pragma unroll
                for (int v = 0; v < VECTORS; v++) {
                    const uint4 q = *reinterpret_cast<const uint4*>(at + v * 512);
                    const unsigned pairs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float low, high;
                        widen(pairs[i], low, high);
                        acc[v][2 * i] = fmaf(z, low, acc[v][2 * i]);
                        acc[v][2 * i + 1] = fmaf(z, high, acc[v][2 * i + 1]);
                    }
                }
            }
        }
        ask(stage, round + DEPTH * ROWS);
    }
    __syncwarp();
}

// Leave a warp's sums at the beginning of its ring, where nothing is in flight any more.
__device__ __forceinline__ void hold(float (&acc)[VECTORS][8], char* ring) {
    const int lane = threadIdx.x % 32;
    float* held = reinterpret_cast<float*>(ring) + lane % LANES * 8;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
#pragma unroll
            for (int step = LANES; step < 32; step *= 2) acc[v][i] += __shfl_xor_sync(~0u, acc[v][i], step);
            if (lane / LANES == 0) held[v * 256 + i] = acc[v][i];
        }
}

extern "C" __global__ void __launch_bounds__(THREADS)
thresholded(const float* x, const float* gain, const char* w, const float* bias, float* y, const float* thresholds,
            int* counts, const int4* tiles, float eps, long long stride_bytes, long long part_bytes) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Kept kept;
    __shared__ float received[PARTS][CLUSTER][SHARE];
    __shared__ int taken[CLUSTER][PARTS];
    char* rings = memory;
    Entry* list = reinterpret_cast<Entry*>(memory + WARPS * RING_BYTES);
    const int thread = threadIdx.x, warp = thread / 32, part = warp / TEAM;
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    cluster_arrive();  // waited for before the first write to another block: by then all have long started

    // What does not depend on the kernel before: the tile, thresholds, gains and bias.
    const int4 tile = tiles[blockIdx.x / CLUSTER];
    const int start = tile.x, columns = tile.y - tile.x;
    float limit[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) limit[p] = thresholds[tile.z + p];
    Inputs in;
    float gains[QUADS][4];
#pragma unroll
    for (int j = 0; j < QUADS; j++) {
        const int place = j * THREADS + thread, quad = quad_of(place, rank);
        in.real[j] = place < SLICE / 4 && quad < K / 4;
        const float4 four = NORMED ? quad_at(gain, in.real[j], quad) : float4{};
        gains[j][0] = four.x, gains[j][1] = four.y, gains[j][2] = four.z, gains[j][3] = four.w;
    }
    const int mine = rank * SHARE + thread;  // the column that this thread writes, if any
    const bool writes = thread < SHARE && mine < COLUMNS && mine < columns;
    float offset = BIASED && writes ? bias[start + mine] : 0.0f;
    asm volatile("griddepcontrol.wait;" ::: "memory");

#pragma unroll
    for (int j = 0; j < QUADS; j++) {
        const float4 four = quad_at(x, in.real[j], quad_of(j * THREADS + thread, rank));
        in.value[j][0] = four.x, in.value[j][1] = four.y, in.value[j][2] = four.z, in.value[j][3] = four.w;
    }
    if (ACCUMULATE && writes) offset += __ldcg(y + start + mine);
    if (NORMED) normalise(in, gains, eps);
    float4* inputs = reinterpret_cast<float4*>(rings);
    if (DEALT)
#pragma unroll
        for (int j = 0; j < QUADS; j++)
            inputs[j * THREADS + thread] = float4{in.value[j][0], in.value[j][1], in.value[j][2], in.value[j][3]};
    decide(in, limit, kept);
    const int all = kept.before[part][WORDS];
    const int own = DEALT ? (all - rank + CLUSTER - 1) / CLUSTER : all;
    if (DEALT) list_share(reinterpret_cast<const float*>(inputs), kept, part, rank, own, list);
    else list_all(in, kept, rank, list);
    if (thread < PARTS) taken[rank][thread] = kept.before[thread][WORDS];
    __syncthreads();

    float acc[VECTORS][8] = {};
    char* ring = rings + warp * RING_BYTES;
    const char* source = w + static_cast<long long>(start) * 2 + part * part_bytes;
    stream(source, stride_bytes, columns, list + part * LONGEST, own, ring, acc);
    hold(acc, ring);
    __syncthreads();
    cluster_wait();
    for (int t = thread; t < PARTS * COLUMNS; t += THREADS) {
        const int p = t / COLUMNS, n = t % COLUMNS;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < TEAM; i++) sum += reinterpret_cast<const float*>(rings + (p * TEAM + i) * RING_BYTES)[n];
        push(&received[p][rank][n % SHARE], n / SHARE, __float_as_uint(sum));
    }
    if (!DEALT && CLUSTER > 1 && tile.w && thread < PARTS) push(&taken[rank][thread], 0, taken[rank][thread]);
    cluster_arrive();
    cluster_wait();
    if (writes) {
        float result[PARTS] = {};
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int i = 0; i < CLUSTER; i++) result[p] += received[p][i][thread];
        float out = result[0];
        if (PARTS == 2) out = out / (1.0f + __expf(-out)) * result[PARTS - 1];
        y[start + mine] = out + offset;
    }
    if (tile.w && rank == 0 && thread < PARTS) {
        int count = 0;
        for (int i = 0; i < (DEALT ? 1 : CLUSTER); i++) count += taken[i][thread];
        counts[tile.z + thread] = count;
    }
}
