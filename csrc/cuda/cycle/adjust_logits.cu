// Bias, masks and penalties of rows, and the counts that penalties need. The arithmetic is that of
// tide_core/sampling/adjust.py bit for bit: no product and sum become one instruction.
#include "cuda/common/block.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/pack.cuh"
#include "cuda/cycle/cycle.h"
#include "cuda/cycle/row_meta.h"

namespace tide::cuda {
namespace {

constexpr int kAdjustThreads = 256;
constexpr int kAdjustChunk = kAdjustThreads * kPack;  // columns of a CTA
constexpr uint16_t kMostOutputs = 0x7fff;             // the bit above marks a token of the prompt

// The token ids of a chunk that have entries, in shared memory.
class IdTable {
  public:
    static constexpr int kAbsent = -1;

    // Every thread clears its part; a barrier must follow.
    __device__ void clear() {
        for (int i = threadIdx.x; i < kSize; i += kAdjustThreads) {
            ids_[i] = kAbsent;
            first_[i] = INT32_MAX;
            last_[i] = -1;
        }
    }
    __device__ void insert(int32_t id, int32_t entry) {
        int at = hash(id);
        for (;; at = (at + 1) % kSize) {
            const int32_t held = atomicCAS(&ids_[at], kAbsent, id);
            if (held == kAbsent || held == id) break;
        }
        atomicMin(&first_[at], entry);
        atomicMax(&last_[at], entry);
    }
    // Call this and what follows after a barrier.
    __device__ int find(int32_t id) const {
        for (int at = hash(id);; at = (at + 1) % kSize) {
            if (ids_[at] == id) return at;
            if (ids_[at] == kAbsent) return kAbsent;
        }
    }
    // All entries of an id lie between these two.
    __device__ int32_t first(int at) const { return first_[at]; }
    __device__ int32_t last(int at) const { return last_[at]; }

  private:
    static constexpr int kBits = 10, kSize = 1 << kBits;
    static_assert(kSize > kMostEntries, "a search must find a free place");
    static __device__ int hash(int32_t id) { return static_cast<uint32_t>(id) * 2654435761u >> (32 - kBits); }

    int32_t ids_[kSize], first_[kSize], last_[kSize];
};

// What the request of a row asks for, where the drafts before `distance` are output too.
struct Adjustments {
    const uint16_t* counts;  // [vocabulary]
    const int32_t* entry_ids;
    const float* entry_values;
    const int32_t* entry_until;
    const int64_t* drafted;  // of the row, `rows` apart
    int64_t rows, entries, distance, num_outputs;
    double presence, frequency;
    float repetition;

    static __device__ Adjustments of(const AdjustLogitsParams& p, int64_t row, int64_t distance, int64_t slot) {
        Adjustments a;
        a.counts = p.counts + slot * p.vocabulary;
        a.entry_ids = p.entry_ids + slot * p.entries;
        a.entry_values = p.entry_values + slot * p.entries;
        a.entry_until = p.entry_until + slot * p.entries;
        a.drafted = p.drafted + row;
        a.rows = p.rows;
        a.entries = p.entries;
        a.distance = distance;
        a.num_outputs = p.positions[p.starts[row]] + distance + 1 - p.row_meta[kPromptLen * p.rows + row];
        a.repetition = static_cast<float>(p.penalties[slot]);
        a.presence = p.penalties[p.slots + slot];
        a.frequency = p.penalties[2 * p.slots + slot];
        return a;
    }

    __device__ bool applies(int64_t entry) const { return entry_until[entry] > num_outputs; }

    __device__ float with_entries(float x, int32_t id, int32_t first, int32_t last) const {
        for (int32_t entry = first; entry <= last; ++entry) {
            if (entry_ids[entry] == id && applies(entry)) x = __fadd_rn(x, entry_values[entry]);
        }
        return x;
    }
    __device__ int32_t count_drafts(int32_t id) const {
        int32_t count = 0;
        for (int64_t d = 0; d < distance; ++d) count += drafted[d * rows] == id;
        return count;
    }
    // `count` is that of the output.
    __device__ float penalised(float x, bool seen, int32_t count) const {
        if (seen) x = x < 0.0f ? __fmul_rn(x, repetition) : __fdiv_rn(x, repetition);
        if (count == 0) return x;
        return __fadd_rn(x, __double2float_rn(-__dadd_rn(presence, __dmul_rn(frequency, count))));
    }
};

// Fills the table with the ids that `concerns` accepts; false if there are none. Every thread of the CTA calls it.
template <typename Concerns>
__device__ bool fill(IdTable& table, const Adjustments& a, Concerns&& concerns) {
    bool any = false;
    for (int64_t e = threadIdx.x; e < a.entries; e += kAdjustThreads) any |= concerns(a.entry_ids[e]) && a.applies(e);
    if (!__syncthreads_or(any)) return false;
    table.clear();
    __syncthreads();
    for (int64_t e = threadIdx.x; e < a.entries; e += kAdjustThreads) {
        if (concerns(a.entry_ids[e]) && a.applies(e)) table.insert(a.entry_ids[e], static_cast<int32_t>(e));
    }
    __syncthreads();
    return true;
}

struct Aligned {
    bool logits, counts, out;  // 16 bytes at a time may be moved
};

// A CTA has kAdjustChunk columns of a row, a thread kPack of them.
template <typename T>
__global__ void __launch_bounds__(kAdjustThreads)
    adjust_logits_kernel(AdjustLogitsParams p, int chunks, Aligned aligned) {
    __shared__ IdTable table;
    let_next_start();
    wait_for_previous();
    const int64_t n = blockIdx.x / chunks, begin = int64_t{blockIdx.x % chunks} * kAdjustChunk;
    const int64_t column = begin + threadIdx.x * kPack, count = p.width - column;  // none, where that is not positive
    Pack pack = load_pack(static_cast<const T*>(p.logits) + n * p.logits_stride + column, count, aligned.logits);
    const int64_t row = p.sources[n] % p.rows, distance = p.sources[n] / p.rows;
    const bool exists = p.row_meta[kDrafts * p.rows + row] >= 0;
    const int64_t slot = exists ? p.row_meta[kAdjustSlot * p.rows + row] : -1;
    if (slot >= 0) {  // or not, for all threads
        const Adjustments a = Adjustments::of(p, row, distance, slot);
        const bool every = p.columns == nullptr;
        const bool searches = fill(table, a, [&](int64_t id) {
            return every ? id >= begin && id < begin + kAdjustChunk : id >= 0 && id < p.vocabulary;
        });
        alignas(16) uint16_t counts[kPack];
        const bool together = every && aligned.counts && count >= kPack;
        if (together) *reinterpret_cast<uint4*>(counts) = *reinterpret_cast<const uint4*>(a.counts + column);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            if (i >= count) continue;
            const int32_t id = static_cast<int32_t>(every ? column + i : p.columns[column + i]);
            const uint16_t stored = together ? counts[i] : a.counts[id];
            const int32_t outputs = (stored & kMostOutputs) + a.count_drafts(id);
            const int at = searches ? table.find(id) : IdTable::kAbsent;
            if (at != IdTable::kAbsent) pack.at[i] = a.with_entries(pack.at[i], id, table.first(at), table.last(at));
            pack.at[i] = a.penalised(pack.at[i], stored != 0 || outputs > 0, outputs);
        }
    }
    store_pack(p.out + n * p.width + column, pack, count, aligned.out);
}

// A thread for each row: a token that comes twice is counted twice.
__global__ void __launch_bounds__(kMostCycleRows) count_outputs_kernel(CountOutputsParams p) {
    let_next_start();
    wait_for_previous();
    const int64_t r = threadIdx.x;
    if (r >= p.rows || p.row_meta[kDrafts * p.rows + r] < 0) return;
    const int64_t slot = p.row_meta[kAdjustSlot * p.rows + r];
    if (slot < 0) return;
    const int64_t begin = p.starts[r], gained = p.next_state[p.rows + r] - p.positions[begin];
    for (int64_t i = 0; i < gained; ++i) {
        const bool is_draft = p.drafted && i + 1 < gained;
        const int64_t token = is_draft ? p.drafted[i * p.rows + r] : p.following[begin + i];
        uint16_t* count = p.counts + slot * p.vocabulary + token;
        const uint16_t stored = *count;
        if ((stored & kMostOutputs) != kMostOutputs) *count = static_cast<uint16_t>(stored + 1);
    }
}

}  // namespace

void adjust_logits(DType dtype, const AdjustLogitsParams& p, cudaStream_t stream) {
    const int64_t chunks = (p.width + kAdjustChunk - 1) / kAdjustChunk;
    with_storage("adjust_logits", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        const Aligned aligned = {is_aligned(p.logits, p.logits_stride, sizeof(T)),
                                 is_aligned(p.counts, p.vocabulary, sizeof(uint16_t)),
                                 is_aligned(p.out, p.width, sizeof(float))};
        const LaunchShape shape = {p.count * chunks, kAdjustThreads, 0, 1, Effect::kNone};
        launch("adjust_logits", adjust_logits_kernel<T>, shape, stream, p, static_cast<int>(chunks), aligned);
    });
}

void count_outputs(const CountOutputsParams& params, cudaStream_t stream) {
    if (params.rows <= 0) return;
    const LaunchShape shape = {1, kMostCycleRows, 0, 1, Effect::kNone};
    launch("count_outputs", count_outputs_kernel, shape, stream, params);
}

}  // namespace tide::cuda
