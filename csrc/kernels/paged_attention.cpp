// Attention of a few queries over paged keys and values, for one row and one kv head.
//
// Pages are walked in order with an online softmax; all query heads of the kv head's group meet a page
// while it lies in cache. Page borders are fixed by position alone and each query adds up its positions in
// order, so a query's result does not depend on the other queries, rows or threads.
#include "kernels/convert.h"
#include "kernels/dot_tile.h"
#include "kernels/kernels.h"
#include "kernels/vector_math.h"

namespace tide::TIDE_ISA {
namespace {

constexpr int kMaxSharedRows = kNumRegisters == 32 ? 4 : 2;

TIDE_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
TIDE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
TIDE_INLINE int64_t round_up(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Float32 working memory of one task. A "lane" below is one query head of one query:
// query * group + head within the group.
struct Scratch {
    float* q;       // [lanes, key_dim]
    float* scores;  // [lanes, score_stride] scores of one page, then probabilities
    float* sums;    // [lanes, value_dim] probabilities times values so far
    float* peaks;   // [lanes] largest score so far
    float* totals;  // [lanes] sum of probabilities so far
    float* keys;    // [block_size, key_dim] the page in float32, unused for float32 pools
    float* values;  // [block_size, value_dim]
    int64_t score_stride;
};

int64_t lay_out(const PagedAttentionParams& p, int64_t num_queries, float* memory, Scratch* scratch) {
    const int64_t lanes = num_queries * (p.num_heads / p.num_kv_heads);
    float* next = memory;
    auto take = [&next](int64_t count) {
        float* taken = next;
        next += count;
        return taken;
    };
    scratch->score_stride = round_up(p.block_size);
    scratch->q = take(lanes * p.key_dim);
    scratch->scores = take(lanes * scratch->score_stride);
    scratch->sums = take(lanes * p.value_dim);
    scratch->peaks = take(lanes);
    scratch->totals = take(lanes);
    scratch->keys = take(p.block_size * p.key_dim);
    scratch->values = take(p.block_size * p.value_dim);
    return next - memory;
}

// Scores of kRows lanes for the page's slots [first, last).
template <int kRows>
void score_rows(const float* q, const float* keys, int64_t key_dim, int64_t first, int64_t last, float* scores,
                int64_t stride) {
    constexpr int kCols = 4;  // at most 4 x 4 or 2 x 4 accumulators, half the registers
    int64_t slot = first;
    for (; slot + kCols <= last; slot += kCols) {
        float dots[kRows][kCols];
        dot_tile<kRows, kCols>(q, key_dim, keys + slot * key_dim, key_dim, key_dim, dots);
        for (int m = 0; m < kRows; ++m)
            for (int n = 0; n < kCols; ++n) scores[m * stride + slot + n] = dots[m][n];
    }
    for (; slot < last; ++slot) {
        float dots[kRows][1];
        dot_tile<kRows, 1>(q, key_dim, keys + slot * key_dim, key_dim, key_dim, dots);
        for (int m = 0; m < kRows; ++m) scores[m * stride + slot] = dots[m][0];
    }
}

// Turns the scores of slots [first, last) into probabilities and rescales what was summed before if a
// larger score came. Slots outside the range get probability 0.
void soften(const PagedAttentionParams& p, float* scores, int64_t stride, int64_t first, int64_t last, float* peak,
            float* total, float* sums) {
    for (int64_t slot = 0; slot < first; ++slot) scores[slot] = -__builtin_inff();
    for (int64_t slot = last; slot < stride; ++slot) scores[slot] = -__builtin_inff();
    Vec peaks = splat(*peak);
    for (int64_t slot = 0; slot < stride; slot += kLanes) {
        Vec s = load(scores + slot) * p.scaling;
        if (p.softcap > 0.0f) {
            const IntVec outside = s == -__builtin_inff();
            s = select(outside, s, p.softcap * vector_tanh(s / p.softcap));
        }
        peaks = vector_max(s, peaks);
        store(scores + slot, s);
    }
    float new_peak = *peak;
    for (int lane = 0; lane < kLanes; ++lane) new_peak = peaks[lane] > new_peak ? peaks[lane] : new_peak;
    if (new_peak > *peak) {
        const float shrink = vector_exp(splat(*peak - new_peak))[0];
        *total *= shrink;
        for (int64_t d = 0; d < p.value_dim; ++d) sums[d] *= shrink;
        *peak = new_peak;
    }
    Vec page_total = {};
    for (int64_t slot = 0; slot < stride; slot += kLanes) {
        const Vec s = load(scores + slot);
        const Vec probability = select(s == -__builtin_inff(), Vec{}, vector_exp(s - new_peak));
        store(scores + slot, probability);
        page_total += probability;
    }
    *total += lane_sum(page_total);
}

// sums[m, d...] += probabilities[m, slot] * values[slot, d...] for kRows lanes and kVectors vectors of d.
template <int kRows, int kVectors>
void add_columns(const float* probabilities, int64_t stride, const float* values, int64_t value_dim, int64_t first,
                 int64_t last, float* sums) {
    Vec acc[kRows][kVectors];
    for (int m = 0; m < kRows; ++m)
        for (int c = 0; c < kVectors; ++c) acc[m][c] = load(sums + m * value_dim + c * kLanes);
    auto add = [&](int64_t slot, auto weight_of) __attribute__((always_inline)) {
        Vec v[kVectors];
        for (int c = 0; c < kVectors; ++c) v[c] = load(values + slot * value_dim + c * kLanes);
        for (int m = 0; m < kRows; ++m)
            for (int c = 0; c < kVectors; ++c) acc[m][c] = weight_of(m, acc[m][c], v[c]);
    };
    int64_t slot = first;
#if defined(__aarch64__)
    // A multiply-add can take one lane of a register; broadcasting from memory costs an operation here.
    for (; slot + 4 <= last; slot += 4) {
        float32x4_t weights[kRows];
        for (int m = 0; m < kRows; ++m) weights[m] = vld1q_f32(probabilities + m * stride + slot);
#define TIDE_ADD_SLOT(lane)                                                                \
    add(slot + lane, [&](int m, Vec sum, Vec v) __attribute__((always_inline)) {           \
        return bit_cast<Vec>(vfmaq_laneq_f32(bit_cast<float32x4_t>(sum), bit_cast<float32x4_t>(v), weights[m], lane)); \
    });
        TIDE_ADD_SLOT(0) TIDE_ADD_SLOT(1) TIDE_ADD_SLOT(2) TIDE_ADD_SLOT(3)
#undef TIDE_ADD_SLOT
    }
#endif
    for (; slot < last; ++slot) {
        add(slot, [&](int m, Vec sum, Vec v) __attribute__((always_inline)) {
            return sum + splat(probabilities[m * stride + slot]) * v;
        });
    }
    for (int m = 0; m < kRows; ++m)
        for (int c = 0; c < kVectors; ++c) store(sums + m * value_dim + c * kLanes, acc[m][c]);
}

// The same over the whole width, for kRows lanes that attend the same slots.
template <int kRows>
void add_values(const float* probabilities, int64_t stride, const float* values, int64_t value_dim, int64_t first,
                int64_t last, float* sums) {
    constexpr int kVectors = 4;
    int64_t d = 0;
    for (; d + kVectors * kLanes <= value_dim; d += kVectors * kLanes)
        add_columns<kRows, kVectors>(probabilities, stride, values + d, value_dim, first, last, sums + d);
    for (; d + kLanes <= value_dim; d += kLanes)
        add_columns<kRows, 1>(probabilities, stride, values + d, value_dim, first, last, sums + d);
    for (; d < value_dim; ++d)
        for (int m = 0; m < kRows; ++m)
            for (int64_t slot = first; slot < last; ++slot)
                sums[m * value_dim + d] += probabilities[m * stride + slot] * values[slot * value_dim + d];
}

// Calls body(Count<k>, first row) over blocks of at most kMaxSharedRows rows.
template <typename Body>
TIDE_INLINE void for_row_blocks(int64_t rows, Body body) {
    int64_t row = 0;
    for (; row + kMaxSharedRows <= rows; row += kMaxSharedRows) body(Count<kMaxSharedRows>{}, row);
    if (rows - row == 3) body(Count<3>{}, row);
    if (rows - row == 2) body(Count<2>{}, row);
    if (rows - row == 1) body(Count<1>{}, row);
}

template <typename T>
const float* page_as_float(const T* page, int64_t first, int64_t last, int64_t dim, float* scratch) {
    if constexpr (sizeof(T) == sizeof(float)) return page;
    convert_to_float(page + first * dim, scratch + first * dim, (last - first) * dim);
    return scratch;
}

// Where the pools hold the first position of a row's block, in slots of one head.
TIDE_INLINE int64_t first_slot(const PagedAttentionParams& p, const AttentionTask& task, int64_t block) {
    const int64_t page = p.block_tables[task.row * p.max_blocks + block];
    return (page * p.num_kv_heads + task.kv_head) * p.block_size;
}

// Pages lie anywhere in the pool, so the processor cannot foresee the next one.
TIDE_INLINE void prefetch_bytes(const void* start, int64_t num_bytes) {
    for (int64_t byte = 0; byte < num_bytes; byte += kCacheLineBytes)
        __builtin_prefetch(static_cast<const char*>(start) + byte, 0, 2);
}

}  // namespace

int64_t attention_scratch_floats(const PagedAttentionParams& params, int64_t max_queries) {
    Scratch unused;
    return lay_out(params, max_queries, nullptr, &unused);
}

template <typename T>
void paged_attention(const PagedAttentionParams& p, const AttentionTask& task, float* memory) {
    Scratch s;
    lay_out(p, task.num_queries, memory, &s);
    const T* k_pool = static_cast<const T*>(p.k_pool);
    const T* v_pool = static_cast<const T*>(p.v_pool);
    const int64_t group = p.num_heads / p.num_kv_heads;
    const int64_t lanes = task.num_queries * group;
    for (int64_t lane = 0; lane < lanes; ++lane) {
        const T* q = static_cast<const T*>(p.q) + (task.first_query + lane / group) * p.q_token_stride +
                     (task.kv_head * group + lane % group) * p.q_head_stride;
        convert_to_float(q, s.q + lane * p.key_dim, p.key_dim);
        s.peaks[lane] = -__builtin_inff();
        s.totals[lane] = 0.0f;
    }
    for (int64_t i = 0; i < lanes * p.value_dim; ++i) s.sums[i] = 0.0f;

    const int64_t reach = p.window > 0 ? p.window : INT64_MAX / 2;
    const int64_t begin = larger(0, task.first_position - reach + 1);
    const int64_t end = task.first_position + task.num_queries;
    for (int64_t block = begin / p.block_size; block * p.block_size < end; ++block) {
        const int64_t page_start = block * p.block_size;
        const int64_t first = larger(begin - page_start, 0);
        const int64_t last = smaller(end - page_start, p.block_size);
        const int64_t page_slot = first_slot(p, task, block);
        const float* keys = page_as_float(k_pool + page_slot * p.key_dim, first, last, p.key_dim, s.keys);
        const float* values = page_as_float(v_pool + page_slot * p.value_dim, first, last, p.value_dim, s.values);
        const int64_t next_slot = page_start + p.block_size < end ? first_slot(p, task, block + 1) : page_slot;
        prefetch_bytes(k_pool + next_slot * p.key_dim, p.block_size * p.key_dim * sizeof(T));
        for_row_blocks(lanes, [&](auto count, int64_t lane) __attribute__((always_inline)) {
            score_rows<decltype(count)::value>(s.q + lane * p.key_dim, keys, p.key_dim, first, last,
                                               s.scores + lane * s.score_stride, s.score_stride);
        });
        prefetch_bytes(v_pool + next_slot * p.value_dim, p.block_size * p.value_dim * sizeof(T));
        for (int64_t query = 0; query < task.num_queries; ++query) {
            const int64_t position = task.first_position + query;
            const int64_t query_first = larger(first, position - reach + 1 - page_start);
            const int64_t query_last = smaller(last, position + 1 - page_start);
            if (query_first >= query_last) continue;
            for (int64_t lane = query * group; lane < (query + 1) * group; ++lane) {
                soften(p, s.scores + lane * s.score_stride, s.score_stride, query_first, query_last, s.peaks + lane,
                       s.totals + lane, s.sums + lane * p.value_dim);
            }
            for_row_blocks(group, [&](auto count, int64_t head) __attribute__((always_inline)) {
                const int64_t lane = query * group + head;
                add_values<decltype(count)::value>(s.scores + lane * s.score_stride, s.score_stride, values,
                                                   p.value_dim, query_first, query_last,
                                                   s.sums + lane * p.value_dim);
            });
        }
    }

    for (int64_t lane = 0; lane < lanes; ++lane) {
        T* out = static_cast<T*>(p.out) + ((task.first_query + lane / group) * p.num_heads +
                                           task.kv_head * group + lane % group) * p.value_dim;
        const float* sums = s.sums + lane * p.value_dim;
        const Vec total = splat(s.totals[lane]);
        int64_t d = 0;
        for (; d + kLanes <= p.value_dim; d += kLanes) store(out + d, load(sums + d) / total);
        if (d < p.value_dim) {
            const int64_t rest = p.value_dim - d;
            store_partial(out + d, load_partial(sums + d, rest) / total, rest);
        }
    }
}

#define TIDE_INSTANTIATE(T) \
    template void paged_attention<T>(const PagedAttentionParams&, const AttentionTask&, float*);
TIDE_FOR_EACH_DTYPE(TIDE_INSTANTIATE)

}  // namespace tide::TIDE_ISA
