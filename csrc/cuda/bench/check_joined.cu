// Joined attention against the two ops it stands for, bit by bit: results, and what is left in the pools.
#include <algorithm>
#include <cmath>

#include "cuda/attention/work.cuh"
#include "cuda/bench/support.cuh"
#include "cuda/small/ops.h"

namespace tide::cuda::bench {
namespace {

struct JoinedCase {
    int64_t heads, kv_heads, dim, block_size, window;
    bool normed, by_position;
    std::vector<int> contexts, queries;
    int filled_up;  // rows without queries and tokens without a row, at the end
};

template <typename T>
void check_case(const JoinedCase& c) {
    const int64_t rows = static_cast<int64_t>(c.contexts.size()) + c.filled_up;
    std::vector<int32_t> starts = {0}, lengths;
    std::vector<int64_t> slots, positions;
    int64_t max_context = 1, max_queries = 1;
    for (size_t r = 0; r < c.contexts.size(); ++r) {
        max_context = std::max<int64_t>(max_context, c.contexts[r]);
        max_queries = std::max<int64_t>(max_queries, c.queries[r]);
    }
    const int64_t max_blocks = (max_context + c.block_size - 1) / c.block_size, num_blocks = rows * max_blocks;
    std::vector<int32_t> tables(rows * max_blocks);
    for (int64_t i = 0; i < num_blocks; ++i) tables[i] = static_cast<int32_t>(num_blocks - 1 - i);
    for (size_t r = 0; r < c.contexts.size(); ++r) {
        for (int64_t position = c.contexts[r] - c.queries[r]; position < c.contexts[r]; ++position) {
            const int64_t block = tables[r * max_blocks + position / c.block_size];
            const bool written = slots.size() % 11 != 7;  // some stay as they were
            slots.push_back(written ? block * c.block_size + position % c.block_size : -1);
            positions.push_back(position % 97);
        }
        starts.push_back(static_cast<int32_t>(slots.size()));
        lengths.push_back(c.contexts[r]);
    }
    const int64_t owned = starts.back(), tokens = owned + c.filled_up;
    for (int i = 0; i < c.filled_up; ++i) {
        slots.push_back(-1);
        positions.push_back(0);
        starts.push_back(static_cast<int32_t>(owned));
        lengths.push_back(0);
    }
    const int64_t width = (c.heads + 2 * c.kv_heads) * c.dim, out_row = c.heads * c.dim, num_positions = 97;
    const int64_t pool = num_blocks * c.kv_heads * c.block_size * c.dim;
    const Buffer qkv(tokens * width * sizeof(T)), q(tokens * out_row * sizeof(T)), table(num_blocks * 4);
    const Buffer query_starts((rows + 1) * 4), context_lens(rows * 4), slot(tokens * 8), position(tokens * 8);
    const Buffer cos(std::max(tokens, num_positions) * c.dim * sizeof(T)), sin(cos.bytes()),
        norms(2 * c.dim * sizeof(T));
    const Buffer workspace(paged_attention_workspace(tokens, c.heads, c.dim, max_context));
    const Buffer keys[2] = {Buffer(pool * sizeof(T)), Buffer(pool * sizeof(T))};
    const Buffer values[2] = {Buffer(pool * sizeof(T)), Buffer(pool * sizeof(T))};
    const Buffer outs[2] = {Buffer(tokens * out_row * sizeof(T)), Buffer(tokens * out_row * sizeof(T))};
    fill(qkv.get<T>(), tokens * width, 11, 1.0f);
    fill(cos.get<T>(), cos.bytes() / static_cast<int64_t>(sizeof(T)), 12, 1.0f);
    fill(sin.get<T>(), sin.bytes() / static_cast<int64_t>(sizeof(T)), 13, 1.0f);
    fill(norms.get<T>(), 2 * c.dim, 14, 1.0f);
    table.put(tables);
    query_starts.put(starts);
    context_lens.put(lengths);
    slot.put(slots);
    position.put(positions);
    workspace.fill_bytes(0);
    for (int joined = 0; joined < 2; ++joined) {
        fill(keys[joined].get<T>(), pool, 15, 2.0f);
        fill(values[joined].get<T>(), pool, 16, 1.0f);
        outs[joined].fill_bytes(kGuard);
        PagedAttentionParams p = {};
        p.q = joined ? qkv.get() : q.get();
        p.k_pool = keys[joined].get();
        p.v_pool = values[joined].get();
        p.block_tables = table.get<int32_t>();
        p.query_starts = query_starts.get<int32_t>();
        p.context_lens = context_lens.get<int32_t>();
        p.out = outs[joined].get();
        p.workspace = workspace.get();
        p.rows = rows;
        p.num_tokens = tokens;
        p.max_queries = max_queries;
        p.max_context = max_context;
        p.num_heads = c.heads;
        p.num_kv_heads = c.kv_heads;
        p.head_dim = c.dim;
        p.block_size = c.block_size;
        p.max_blocks = max_blocks;
        p.num_blocks = num_blocks;
        p.q_token_stride = joined ? width : out_row;
        p.q_head_stride = c.dim;
        p.scaling = 1.0f / std::sqrt(static_cast<float>(c.dim));
        p.window = c.window;
        RotaryWriteParams r = {};
        r.q = {qkv.get(), c.heads, width, c.dim};
        r.k = {qkv.get<T>() + out_row, c.kv_heads, width, c.dim};
        r.v = {qkv.get<T>() + out_row + c.kv_heads * c.dim, c.kv_heads, width, c.dim};
        r.q_norm = c.normed ? norms.get() : nullptr;
        r.k_norm = c.normed ? norms.get<T>() + c.dim : nullptr;
        r.cos = cos.get();
        r.sin = sin.get();
        r.positions = c.by_position ? position.get<int64_t>() : nullptr;
        r.slots = slot.get<int64_t>();
        r.q_out = joined ? nullptr : q.get();
        r.k_pool = keys[joined].get();
        r.v_pool = values[joined].get();
        r.rows = tokens;
        r.q_out_token_stride = out_row;
        r.q_out_head_stride = c.dim;
        r.key_dim = r.value_dim = c.dim;
        r.num_positions = c.by_position ? num_positions : tokens;
        r.num_blocks = num_blocks;
        r.block_size = c.block_size;
        r.eps = 1e-6f;
        if (joined) {
            attend_joined(dtype_of<T>(), p, r, nullptr);
        } else {
            rotary_write(dtype_of<T>(), r, nullptr);
            paged_attention(dtype_of<T>(), p, nullptr);
        }
    }
    const std::string name = std::string("joined ") + name_of<T>() + " heads=" + std::to_string(c.heads) + "/" +
                             std::to_string(c.kv_heads) + " dim=" + std::to_string(c.dim) +
                             " block=" + std::to_string(c.block_size) + " window=" + std::to_string(c.window) +
                             (c.normed ? " normed" : "") + " rows=" + std::to_string(rows);
    Counter counter;
    const auto expect_same = [&](const Buffer(&two)[2], int64_t count, const char* what) {
        compare_bits<T>
            <<<256, 256>>>(two[1].get<T>(), count, count, two[0].get<T>(), count, 1, count, kGuard, counter.reset());
        const unsigned int differing = counter.read().first;
        expect(differing == 0, name + " " + what + ": " + std::to_string(differing) + " differ");
    };
    expect_same(outs, tokens * out_row, "out");
    expect_same(keys, pool, "keys");
    expect_same(values, pool, "values");
}

template <typename T>
void check_type() {
    const std::vector<int> contexts = {1, 7, 16, 17, 30, 128, 130, 257, 511, 512, 514, 780, 1030, 1600, 2048, 2050};
    const std::vector<int> queries = {1, 3, 8, 1, 7, 1, 4, 2, 1, 4, 3, 6, 8, 5, 1, 4};
    const std::vector<int> ones(contexts.size(), 1);
    for (const int64_t dim : {64, 128}) {
        for (const bool normed : {false, true}) {
            check_case<T>({8, 2, dim, 16, 0, normed, true, contexts, ones, 0});
            check_case<T>({8, 2, dim, 16, 0, normed, true, contexts, queries, 3});
            check_case<T>({9, 3, dim, 32, 100, normed, false, contexts, queries, 5});
        }
        check_case<T>({20, 1, dim, 48, 700, false, true, contexts, queries, 0});  // more lanes than a piece has
        check_case<T>({32, 8, dim, 16, 0, false, true, std::vector<int>(64, 520), std::vector<int>(64, 1), 0});
        for (const int each : {3, 8})  // pieces in turn, of fewer and of more lanes
            check_case<T>({32, 8, dim, 16, 0, false, true, std::vector<int>(64, 520), std::vector<int>(64, each), 0});
        check_case<T>({32, 8, dim, 16, 0, true, true, {600, 9000}, {3, 8}, 1});
        check_case<T>({32, 8, dim, 16, 0, true, true, {512}, {5}, 0});  // few pieces: lanes are divided further
        check_case<T>({9, 3, dim, 16, 0, false, true, {200, 33, 190}, {8, 5, 1}, 2});
    }
}

}  // namespace

void check_joined() {
    check_type<__nv_bfloat16>();
    check_type<__half>();
}

}  // namespace tide::cuda::bench
