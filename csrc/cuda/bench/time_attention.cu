// How fast attention is, in captured graphs, over more memory than the second-level cache holds. One JSON line a case:
// attention alone, and for decode passes what comes before it too, as two launches and joined.
#include <algorithm>
#include <numeric>

#include "cuda/bench/support.cuh"
#include "cuda/small/ops.h"

namespace tide::cuda::bench {
namespace {

constexpr int64_t kMoreThanCache = int64_t{512} << 20;
constexpr int kLaunches = 24;
constexpr int64_t kBlock = 16;
using T = __nv_bfloat16;

struct Shape {
    const char* name;
    int64_t heads, kv_heads, dim;
};

const Shape kLarge = {"8b", 32, 8, 128}, kDemo = {"demo", 9, 3, 64};

// queries: of every row, or 0: 1 to 8, one more from row to row.
struct Case {
    Shape shape;
    int64_t rows, context, queries, max_context;

    int64_t queries_of(int64_t row) const { return queries > 0 ? queries : 1 + row % 8; }
    int64_t most_queries() const { return queries > 0 ? queries : std::min<int64_t>(rows, 8); }
};

enum class Mode { kAlone, kTwo, kJoined };

void time_case(const Buffer& arena, const Case& c, std::initializer_list<Mode> modes) {
    const int64_t heads = c.shape.heads, kv_heads = c.shape.kv_heads, dim = c.shape.dim;
    const int64_t blocks = (c.context + kBlock - 1) / kBlock;
    std::vector<int32_t> order, starts = {0}, lengths(c.rows, static_cast<int32_t>(c.context));
    for (int64_t r = 0; r < c.rows; ++r) starts.push_back(static_cast<int32_t>(starts.back() + c.queries_of(r)));
    const int64_t tokens = starts.back();
    const int64_t block_bytes = kv_heads * kBlock * dim * 2, copy_blocks = c.rows * blocks;
    const int64_t half = arena.bytes() / 2 / 1024 * 1024, width = (heads + 2 * kv_heads) * dim;
    const int64_t copies = std::max<int64_t>(
        1, std::min<int64_t>({half / (copy_blocks * block_bytes), kMoreThanCache / (copy_blocks * block_bytes), 64}));
    order.resize(copies * copy_blocks);
    std::vector<int64_t> all_slots, all_positions;
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = static_cast<int64_t>(order.size()) - 1; i > 0; --i)  // pages lie anywhere
        std::swap(order[i], order[static_cast<int64_t>((noise(i, 9) + 1.0f) * 0.5f * static_cast<float>(i))]);
    for (int64_t row = 0; row < copies * c.rows; ++row) {
        for (int64_t position = c.context - c.queries_of(row % c.rows); position < c.context; ++position) {
            all_slots.push_back(order[row * blocks + position / kBlock] * kBlock + position % kBlock);
            all_positions.push_back(position);
        }
    }
    const Buffer tables(static_cast<int64_t>(order.size()) * 4), query_starts((c.rows + 1) * 4), lens(c.rows * 4);
    const Buffer slots(copies * tokens * 8), positions(copies * tokens * 8), turns(c.max_context * dim * 2);
    const Buffer qkv(tokens * width * 2), q(tokens * heads * dim * 2), out(tokens * heads * dim * 2);
    const Buffer workspace(paged_attention_workspace(tokens, heads, dim, c.max_context));
    workspace.fill_bytes(0);
    tables.put(order);
    query_starts.put(starts);
    lens.put(lengths);
    slots.put(all_slots);
    positions.put(all_positions);
    fill(qkv.get<T>(), tokens * width, 7, 1.0f);
    fill(q.get<T>(), tokens * heads * dim, 7, 1.0f);
    fill(turns.get<T>(), c.max_context * dim, 6, 1.0f);
    const int launches = static_cast<int>(std::max<int64_t>(kLaunches, copies));
    for (const Mode mode : modes) {
        const double us = time_graph(launches, [&](int i, cudaStream_t stream) {
            PagedAttentionParams p = {};
            p.q = mode == Mode::kJoined ? qkv.get() : q.get();
            p.k_pool = arena.get();
            p.v_pool = arena.get<char>() + half;
            p.block_tables = tables.get<int32_t>() + i % copies * copy_blocks;
            p.query_starts = query_starts.get<int32_t>();
            p.context_lens = lens.get<int32_t>();
            p.out = out.get();
            p.workspace = workspace.get();
            p.rows = c.rows;
            p.num_tokens = tokens;
            p.max_queries = c.most_queries();
            p.max_context = c.max_context;
            p.num_heads = heads;
            p.num_kv_heads = kv_heads;
            p.head_dim = dim;
            p.block_size = kBlock;
            p.max_blocks = blocks;
            p.num_blocks = half / block_bytes;
            p.q_token_stride = mode == Mode::kJoined ? width : heads * dim;
            p.q_head_stride = dim;
            p.scaling = 0.088f;
            RotaryWriteParams r = {};
            r.q = {qkv.get(), heads, width, dim};
            r.k = {qkv.get<T>() + heads * dim, kv_heads, width, dim};
            r.v = {qkv.get<T>() + (heads + kv_heads) * dim, kv_heads, width, dim};
            r.cos = r.sin = turns.get();
            r.positions = positions.get<int64_t>() + i % copies * tokens;
            r.slots = slots.get<int64_t>() + i % copies * tokens;
            r.q_out = q.get();
            r.k_pool = arena.get();
            r.v_pool = arena.get<char>() + half;
            r.rows = tokens;
            r.q_out_token_stride = heads * dim;
            r.q_out_head_stride = dim;
            r.key_dim = r.value_dim = dim;
            r.num_positions = c.max_context;
            r.num_blocks = half / block_bytes;
            r.block_size = kBlock;
            if (mode == Mode::kTwo) rotary_write(DType::kBFloat16, r, stream);
            if (mode == Mode::kJoined) return attend_joined(DType::kBFloat16, p, r, stream);
            paged_attention(DType::kBFloat16, p, stream);
        });
        const double total = static_cast<double>(c.rows * c.context * kv_heads * dim * 2 * 2);
        const char* op = mode == Mode::kAlone ? "paged_attention" : mode == Mode::kTwo ? "two ops" : "attend_joined";
        std::printf(
            "{\"op\": \"%s\", \"shape\": \"%s\", \"rows\": %ld, \"context\": %ld, \"queries\": %ld, "
            "\"max_context\": %ld, \"us\": %.2f, \"kv_mb\": %.1f, \"gb_s\": %.0f, \"share\": %.3f}\n",
            op, c.shape.name, c.rows, c.context, c.queries, c.max_context, us, total * 1e-6, total / us * 1e-3,
            total / us / kPeakBytesPerUs);
        std::fflush(stdout);
    }
}

}  // namespace

void time_attention(const Buffer& arena) {
    const auto all = {Mode::kAlone, Mode::kTwo, Mode::kJoined};
    for (const int64_t queries : {1, 2, 3, 5, 8}) {
        for (const int64_t rows : {1, 4, 8}) time_case(arena, {kDemo, rows, 200, queries, 256}, all);
        for (const int64_t rows : {1, 8, 64}) time_case(arena, {kLarge, rows, 512, queries, 512}, all);
    }
    const Case others[] = {{kDemo, 1, 200, 1, 4096},     {kDemo, 1, 512, 1, 512},     {kDemo, 32, 512, 1, 512},
                           {kDemo, 8, 512, 0, 512},      {kLarge, 1, 200, 1, 256},    {kLarge, 1, 512, 1, 4096},
                           {kLarge, 32, 512, 1, 512},    {kLarge, 32, 512, 4, 512},   {kLarge, 32, 700, 1, 1024},
                           {kLarge, 64, 512, 0, 512},    {kLarge, 8, 512, 0, 512},    {kLarge, 8, 8192, 1, 8192},
                           {kLarge, 8, 8192, 0, 8192},   {kLarge, 8, 8192, 4, 8192},  {kLarge, 8, 8192, 8, 8192},
                           {kLarge, 4, 32768, 1, 32768}, {kLarge, 4, 32768, 0, 32768}};
    for (const Case& c : others) time_case(arena, c, all);
    const Case alone[] = {{kLarge, 1, 2048, 1, 2048},   {kLarge, 1, 8192, 1, 8192},     {kLarge, 1, 8192, 5, 8192},
                          {kLarge, 1, 32768, 1, 32768}, {kLarge, 1, 131072, 1, 131072}, {kLarge, 8, 2048, 1, 2048},
                          {kLarge, 8, 2048, 8, 2048},   {kLarge, 16, 512, 1, 512},      {kLarge, 64, 512, 1, 32768},
                          {kLarge, 32, 1000, 1, 1000},  {kLarge, 32, 1000, 16, 1000},   {kLarge, 64, 2048, 1, 2048},
                          {kLarge, 64, 2048, 8, 2048},  {kLarge, 4, 32768, 8, 32768},   {kLarge, 2, 32768, 1, 32768},
                          {kLarge, 1, 2048, 2048, 2048}};
    for (const Case& c : alone) time_case(arena, c, {Mode::kAlone});
}

}  // namespace tide::cuda::bench
