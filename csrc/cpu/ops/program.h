// A fixed list of ops, run with one call: of a small network's time most goes into the way from op to op.
//
// Ops read and write buffers of a fixed width per token, float32, which the program owns; external ones are handed to
// every run. Each op is the single op of ops.h or does its arithmetic in the same order, so a program gives bit for bit
// what the ops give one by one, and a token's result depends neither on its mates nor on the number of threads.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu/ops/ops.h"

namespace tide {

// Columns [start, start + width) of a buffer.
struct Columns {
    int64_t buffer;
    int64_t start;
    int64_t width;
};

struct Pools {
    float* k;  // [num_blocks, num_kv_heads, block_size, key_dim]
    float* v;  // [num_blocks, num_kv_heads, block_size, value_dim]
    int64_t num_blocks;
    int64_t num_kv_heads;
    int64_t block_size;
    int64_t key_dim;
    int64_t value_dim;
};

// What a run knows of its T tokens in R rows. Null for what no step reads.
struct Call {
    int64_t num_tokens;
    int64_t num_rows;
    int64_t max_blocks;
    const int64_t* positions;     // [T]
    const int64_t* slots;         // [T]
    const int32_t* block_tables;  // [R, max_blocks]
    const int32_t* query_starts;  // [R + 1]
    const int32_t* context_lens;  // [R]
    const int64_t* sources;       // [T], rows of a gathered table
    const int64_t* distances;     // [T], 0 where there is no source
    bool each;                    // every token is chosen, not the last of each row alone
};

// What a run returns next to its external buffers, of the chosen tokens in order; empty where no step makes it.
struct Outcome {
    std::vector<float> results;
    std::vector<int64_t> best;  // indices that `confidence` found
};

// Steps are added once, in the order they run in; a step that cannot be right is refused then. Safe next to other
// programs in other threads; calls of one and the same take turns.
class Program {
  public:
    Program() = default;
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    // A buffer of `width` numbers per token, or per chosen token; its index.
    int64_t add_buffer(int64_t width, bool chosen, bool external);

    void rms_norm(Columns x, const float* weight, float eps, Columns y);
    // Whole buffers. weight [y.width, x.width], bias [y.width] or null.
    void linear(int64_t x, DType weight_dtype, const void* weight, const float* bias, int64_t y);
    void add(Columns a, Columns b, Columns y);
    void silu_mul(Columns gate, Columns up, Columns y);
    void silu(Columns x, Columns y);
    void sigmoid(Columns x, Columns y);
    // y = table[source], or zeros where the distance is 0. table [num_rows, y.width].
    void gather(const float* table, int64_t num_rows, Columns y);
    // y += table[distance], the last row of the table for all that is farther.
    void add_distance(const float* table, int64_t num_rows, Columns y);
    // In place, heads of `dim`, by cos and sin [num_positions, dim] at the tokens' positions.
    void rotary(const float* cos, const float* sin, int64_t num_positions, int64_t dim, Columns x);
    void write_kv(Columns k, Columns v, const Pools& pools);
    // y is a whole buffer of as many heads as q.
    void paged_attention(Columns q, const Pools& pools, float scaling, Columns y);
    // The chosen tokens of x.
    void select(Columns x, Columns y);
    // Log-probability and lead of the best of whole rows of logits, whose index goes to the outcome.
    void confidence(int64_t logits, Columns y);
    // One column of chosen tokens, to the outcome.
    void result(Columns x);

    // `external`: the addresses of the external buffers, in the order they were added. When it throws, outputs and the
    // slots of these tokens are undefined.
    Outcome run(const Call& call, const std::vector<float*>& external);

  private:
    struct Buffer {
        int64_t width;
        bool chosen;
        bool external;
        float* data = nullptr;
    };
    struct View {
        float* data;
        int64_t stride;
        int64_t rows;
        float* row(int64_t i) const { return data + i * stride; }
    };

    void check(Columns columns) const;
    void check_alike(Columns x, Columns y) const;
    const Buffer& whole(int64_t buffer) const;
    int64_t rows_of(const Buffer& buffer) const;
    View view(Columns columns) const;
    template <typename Body>
    void add_row_step(Columns y, int64_t numbers_per_piece, Body body);
    void choose();
    void place(const std::vector<float*>& external);

    std::vector<Buffer> buffers_;
    std::vector<std::function<void()>> steps_;

    std::mutex turn_;  // of the run, whose state all below is
    Call call_ = {};
    Outcome outcome_;
    std::vector<int64_t> chosen_;
    std::unique_ptr<float[]> arena_;
    int64_t arena_floats_ = 0;
};

}  // namespace tide
