// Attention of a few queries over paged keys and values, for one row and one kv head.
//
// Pages are walked in order with an online softmax; all query heads of the kv head's group meet a page
// while it lies in cache. Page borders are fixed by position alone and each query adds up its positions in
// order, so a query's result does not depend on the other queries, rows or threads.
#include "cpu/kernels/attention_steps.h"
#include "cpu/kernels/convert.h"
#include "cpu/kernels/kernels.h"

namespace tide::TIDE_ISA {
namespace {

TIDE_INLINE int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}
TIDE_INLINE int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}
TIDE_INLINE int64_t round_up(int64_t count) {
    return (count + kLanes - 1) / kLanes * kLanes;
}

// Float32 working memory of one task. A "lane" below is one query head of one query:
// query * group + head within the group.
struct Scratch {
    float* q;           // [lanes, key_dim]
    float* scores;      // [lanes, score_stride] scores of one page, then probabilities
    float* sums;        // [lanes, value_dim] probabilities times values so far
    float* max_scores;  // [lanes] largest score so far
    float* totals;      // [lanes] sum of probabilities so far
    float* keys;        // [block_size, key_dim] the page in float32, unused for float32 pools
    float* values;      // [block_size, value_dim]
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
    scratch->max_scores = take(lanes);
    scratch->totals = take(lanes);
    scratch->keys = take(p.block_size * p.key_dim);
    scratch->values = take(p.block_size * p.value_dim);
    return next - memory;
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

// Copies the task's queries to float32 and empties the sums.
template <typename T>
void begin_task(const PagedAttentionParams& p, const AttentionTask& task, int64_t group, const Scratch& s) {
    for (int64_t lane = 0; lane < task.num_queries * group; ++lane) {
        const T* q = static_cast<const T*>(p.q) + (task.first_query + lane / group) * p.q_token_stride +
                     (task.kv_head * group + lane % group) * p.q_head_stride;
        convert_to_float(q, s.q + lane * p.key_dim, p.key_dim);
        s.max_scores[lane] = -__builtin_inff();
        s.totals[lane] = 0.0f;
    }
    for (int64_t i = 0; i < task.num_queries * group * p.value_dim; ++i) s.sums[i] = 0.0f;
}

// Softmax and weighted values of one query over the page's slots [first, last).
TIDE_INLINE void attend_page(const PagedAttentionParams& p, int64_t first_lane, int64_t group, const float* values,
                             int64_t first, int64_t last, const Scratch& s) {
    for (int64_t lane = first_lane; lane < first_lane + group; ++lane) {
        soften(p, s.scores + lane * s.score_stride, s.score_stride, first, last, s.max_scores + lane, s.totals + lane,
               s.sums + lane * p.value_dim);
    }
    for_row_blocks(group, [&](auto count, int64_t head) __attribute__((always_inline)) {
        const int64_t lane = first_lane + head;
        add_values<decltype(count)::value>(s.scores + lane * s.score_stride, s.score_stride, values, p.value_dim, first,
                                           last, s.sums + lane * p.value_dim);
    });
}

template <typename T>
void write_out(const PagedAttentionParams& p, const AttentionTask& task, int64_t group, const Scratch& s) {
    for (int64_t lane = 0; lane < task.num_queries * group; ++lane) {
        const int64_t head = task.kv_head * group + lane % group;
        T* out = static_cast<T*>(p.out) + ((task.first_query + lane / group) * p.num_heads + head) * p.value_dim;
        const float* sums = s.sums + lane * p.value_dim;
        const Vec total = splat(s.totals[lane]);
        int64_t d = 0;
        for (; d + kLanes <= p.value_dim; d += kLanes) store(out + d, load(sums + d) / total);
        const int64_t rest = p.value_dim - d;
        if (rest > 0) store_partial(out + d, load_partial(sums + d, rest) / total, rest);
    }
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
    const int64_t reach = p.window > 0 ? p.window : INT64_MAX / 2;
    const int64_t begin = larger(0, task.first_position - reach + 1);
    const int64_t end = task.first_position + task.num_queries;
    begin_task<T>(p, task, group, s);
    for (int64_t block = begin / p.block_size; block * p.block_size < end; ++block) {
        const int64_t page_start = block * p.block_size;
        const int64_t first = larger(begin - page_start, 0);
        const int64_t last = smaller(end - page_start, p.block_size);
        const int64_t slot = first_slot(p, task, block);
        const int64_t next_slot = page_start + p.block_size < end ? first_slot(p, task, block + 1) : slot;
        const float* keys = page_as_float(k_pool + slot * p.key_dim, first, last, p.key_dim, s.keys);
        const float* values = page_as_float(v_pool + slot * p.value_dim, first, last, p.value_dim, s.values);

        prefetch_bytes(k_pool + next_slot * p.key_dim, p.block_size * p.key_dim * sizeof(T));
        for_row_blocks(task.num_queries * group, [&](auto count, int64_t lane) __attribute__((always_inline)) {
            score_rows<decltype(count)::value>(s.q + lane * p.key_dim, keys, p.key_dim, first, last,
                                               s.scores + lane * s.score_stride, s.score_stride);
        });
        prefetch_bytes(v_pool + next_slot * p.value_dim, p.block_size * p.value_dim * sizeof(T));
        for (int64_t query = 0; query < task.num_queries; ++query) {
            const int64_t position = task.first_position + query;
            const int64_t query_first = larger(first, position - reach + 1 - page_start);
            const int64_t query_last = smaller(last, position + 1 - page_start);
            if (query_first < query_last) attend_page(p, query * group, group, values, query_first, query_last, s);
        }
    }
    write_out<T>(p, task, group, s);
}

#define TIDE_INSTANTIATE(T) template void paged_attention<T>(const PagedAttentionParams&, const AttentionTask&, float*);
TIDE_FOR_EACH_DTYPE(TIDE_INSTANTIATE)

}  // namespace tide::TIDE_ISA
