// The likeliest tokens of rows of logits and their log-probabilities; a CTA for each row that wants them.
// Every number has a rank of its own: its key, then its place. A few neighbouring threads have a column of the row and
// find its largest. The k-th largest of these is a bound: all of the first k lie at or above it, in k columns.
#include "cuda/common/block.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/ordered.cuh"
#include "cuda/common/pack.cuh"
#include "cuda/cycle/row_meta.h"

namespace tide::cuda {
namespace {

constexpr int kTopThreads = 1024;
constexpr int kTopWarps = kTopThreads / kWarp;
constexpr int kTeam = 4;  // threads of a column: with more columns they take longer to rank, with fewer to search
constexpr int kColumns = kTopThreads / kTeam;
constexpr int kCandidates = 1024;  // numbers at or above the bound; more of them are taken one by one

using Rank = unsigned long long;  // atomics and shuffles have this type
constexpr Rank kNoRank = 0;

__device__ Rank rank_of(float value, int64_t place) {
    return Rank{key_of(value)} << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(place));
}
__device__ int64_t place_of(Rank rank) {
    return static_cast<uint32_t>(~static_cast<uint32_t>(rank));
}

// Of all lanes of a warp, or of each team of neighbours in it.
template <int kLanes = kWarp>
__device__ Rank warp_most(Rank mine) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
        mine = max(mine, __shfl_xor_sync(kAllLanes, mine, distance));
    return mine;
}

struct Memory {
    alignas(16) Rank most[kColumns];  // of each column
    Rank candidates[kCandidates];
    Rank of_warps[kTopWarps];
    float sums[kTopWarps];
    uint32_t columns[kMostLogprobs];  // those with the k largest
    uint32_t count;
};

template <typename T>
struct Row {
    const T* x;
    int64_t width;
    bool aligned;

    __device__ float at(int64_t place) const { return to_float(x[place]); }

    // Packs of numbers, from pack `first` on, `apart` packs from one to the next; -inf after the end.
    template <typename Each>
    __device__ void each_pack(int64_t first, int64_t apart, Each&& with) const {
        for (int64_t begin = first * kPack; begin < width; begin += apart * kPack)
            with(load_pack(x + begin, width - begin, aligned, -INFINITY), begin);
    }
    // The same, number by number.
    template <typename Each>
    __device__ void each(int64_t first, int64_t apart, Each&& with) const {
        each_pack(first, apart, [&](const Pack& pack, int64_t begin) {
#pragma unroll
            for (int i = 0; i < kPack; ++i) {
                if (begin + i < width) with(pack.at[i], begin + i);
            }
        });
    }
};

// Of a thread: its largest number and the sum of exponentials relative to that.
struct Part {
    Rank most = kNoRank;
    float best = -INFINITY, sum = 0.0f;

    __device__ void add(const Pack& pack, int64_t begin, int64_t width) {
        float largest = best;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            if (begin + i < width) most = max(most, rank_of(pack.at[i], begin + i));
            largest = fmaxf(largest, pack.at[i]);
        }
        if (largest == -INFINITY) return;
        float more = 0.0f;
#pragma unroll
        for (int i = 0; i < kPack; ++i) more += expf(pack.at[i] - largest);
        sum = (best == -INFINITY ? 0.0f : sum * expf(best - largest)) + more;
        best = largest;
    }
};

// The logarithm of the sum of all exponentials.
__device__ float log_sum(const Part& mine, float best, Memory& memory) {
    return logf(block_sum(mine.sum == 0.0f ? 0.0f : mine.sum * expf(mine.best - best), memory.sums));
}

// Where in the order of all a rank stands, of which `count` are in shared memory.
__device__ uint32_t count_above(Rank rank, const Rank* ranks, uint32_t count) {
    uint32_t above = 0;
    for (uint32_t i = 0; i < count; ++i) above += ranks[i] > rank;
    return above;
}

template <typename T>
__global__ void __launch_bounds__(kTopThreads) top_logprobs_kernel(TopLogprobsParams p, bool aligned) {
    __shared__ Memory memory;
    let_next_start();
    wait_for_previous();
    const int64_t t = blockIdx.x;
    if (t >= p.starts[p.rows]) return;
    const int64_t wanted = p.row_meta[kLogprobs * p.rows + p.sources[t] % p.rows];
    if (wanted < 0) return;  // or not, for all threads
    const Row<T> row = {static_cast<const T*>(p.logits) + t * p.logits_stride, p.width, aligned};
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    Part mine;
    row.each_pack(threadIdx.x, kTopThreads, [&](const Pack& pack, int64_t begin) { mine.add(pack, begin, row.width); });

    const Rank of_column = warp_most<kTeam>(mine.most), of_warp = warp_most(of_column);
    if (lane == 0) memory.of_warps[warp] = of_warp;
    if (lane % kTeam == 0) memory.most[threadIdx.x / kTeam] = of_column;
    if (threadIdx.x == 0) memory.count = 0;
    __syncthreads();
    const Rank first = warp_most(memory.of_warps[lane]);
    static_assert(kTopWarps == kWarp, "a lane for each warp");
    const float best = row.at(place_of(first));
    const float all = log_sum(mine, best, memory);
    const auto logprob = [&](float value) { return (value - best) - all; };
    if (threadIdx.x == 0) p.chosen[t] = logprob(row.at(p.following[t]));

    const uint32_t k = static_cast<uint32_t>(min(wanted, p.most));
    if (k == 0) return;
    const auto write = [&](uint32_t place, Rank rank) {
        p.ids[t * p.most + place] = place_of(rank);
        p.logprobs[t * p.most + place] = logprob(row.at(place_of(rank)));
    };
    if (threadIdx.x < kColumns && memory.most[threadIdx.x] != kNoRank) {
        const uint32_t above = count_above(memory.most[threadIdx.x], memory.most, kColumns);
        if (above < k) memory.columns[above] = threadIdx.x;
    }
    // With fewer columns than k, all of them have candidates.
    const int64_t filled = ((p.width + kPack - 1) / kPack + kTeam - 1) / kTeam;
    const uint32_t columns = min(k, static_cast<uint32_t>(min(int64_t{kColumns}, filled)));
    __syncthreads();
    const Rank bound = columns < k ? kNoRank : memory.most[memory.columns[k - 1]];
    for (uint32_t number = warp; number < columns; number += kTopWarps) {
        // kTeam neighbouring packs of the column, then those kTopThreads packs after them: a lane for each.
        const int64_t first = memory.columns[number] * kTeam + lane % kTeam + int64_t{lane / kTeam} * kTopThreads;
        row.each(first, int64_t{kWarp / kTeam} * kTopThreads, [&](float value, int64_t place) {
            const Rank rank = rank_of(value, place);
            if (rank < bound) return;
            const uint32_t at = atomicAdd(&memory.count, 1);
            if (at < kCandidates) memory.candidates[at] = rank;
        });
    }
    __syncthreads();
    const uint32_t count = memory.count;
    if (count <= kCandidates) {
        if (threadIdx.x >= count) return;
        const Rank rank = memory.candidates[threadIdx.x];
        const uint32_t place = count_above(rank, memory.candidates, count);
        if (place < k) write(place, rank);
        return;
    }
    // One by one: the thread that has the largest looks for its next.
    Rank last = kNoRank;
    for (uint32_t place = 0; place < k; ++place) {
        if (place > 0 && mine.most == last) {
            mine.most = kNoRank;
            row.each(threadIdx.x, kTopThreads, [&](float value, int64_t here) {
                const Rank rank = rank_of(value, here);
                if (rank < last) mine.most = max(mine.most, rank);
            });
        }
        const Rank most = warp_most(mine.most);
        __syncthreads();
        if (lane == 0) memory.of_warps[warp] = most;
        __syncthreads();
        last = warp_most(memory.of_warps[lane]);
        if (threadIdx.x == 0) write(place, last);
    }
}

}  // namespace

void top_logprobs(DType dtype, const TopLogprobsParams& p, cudaStream_t stream) {
    if (p.most > kMostLogprobs || p.most > p.width)
        throw std::runtime_error("top_logprobs: at most 32 tokens are listed, and no more than there are");
    with_storage("top_logprobs", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        launch("top_logprobs", top_logprobs_kernel<T>, LaunchShape{p.tokens, kTopThreads}, stream, p,
               is_aligned(p.logits, p.logits_stride, sizeof(T)));
    });
}

}  // namespace tide::cuda
