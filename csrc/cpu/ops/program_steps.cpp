// The steps of a program. Each reads the state of the run through the program when its turn comes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/ops/checks.h"
#include "cpu/ops/instruction_set.h"
#include "cpu/ops/program.h"
#include "cpu/ops/thread_pool.h"

namespace tide {
namespace {

constexpr int64_t kPlainPerPiece = 32 * 1024;  // numbers that are copied or added, about 10 us of work
constexpr int64_t kExpPerPiece = 4 * 1024;     // numbers with an exponential in them
constexpr int kFloat32 = static_cast<int>(DType::kFloat32);

// Every index in [0, end), before anything is read with it.
void check_indices(const char* name, const int64_t* indices, int64_t count, int64_t end) {
    for (int64_t i = 0; i < count; ++i) {
        if (indices[i] < 0 || indices[i] >= end) {
            throw std::out_of_range(std::string(name) + "[" + std::to_string(i) + "]: got " +
                                    std::to_string(indices[i]) + ", expected 0 to " + std::to_string(end - 1));
        }
    }
}

void check_pools(const Pools& pools) {
    require(pools.k && pools.v && pools.num_blocks >= 0 && pools.num_kv_heads > 0 && pools.block_size > 0 &&
                pools.key_dim > 0 && pools.value_dim > 0,
            "program: pools must have sizes");
}

}  // namespace

// body(i) for every row of y.
template <typename Body>
void Program::add_row_step(Columns y, int64_t numbers_per_piece, Body body) {
    const int64_t grain = std::max<int64_t>(1, numbers_per_piece / y.width);
    steps_.push_back([this, y, grain, body] {
        parallel_for(rows_of(buffers_[y.buffer]), grain, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) body(i);
        });
    });
}

void Program::rms_norm(Columns x, const float* weight, float eps, Columns y) {
    check_alike(x, y);
    require(weight, "program: rms_norm needs its weight");
    add_row_step(y, kPlainPerPiece, [=](int64_t i) {
        const RmsNormParams params = {view(x).row(i), weight, view(y).row(i), x.width, eps};
        kernels().rms_norm[kFloat32](params, 0, 1);
    });
}

void Program::linear(int64_t x, DType weight_dtype, const void* weight, const float* bias, int64_t y) {
    require(whole(x).chosen == whole(y).chosen, "program: buffers of the same tokens expected");
    require(weight_dtype == DType::kFloat32 || weight_dtype == DType::kBFloat16,
            "program: a weight is float32 or bfloat16");
    require(weight, "program: linear needs its weight");
    steps_.push_back([=] {
        const Buffer &from = buffers_[x], &to = buffers_[y];
        tide::linear(DType::kFloat32, weight_dtype, from.data, weight, bias, to.data, rows_of(to), from.width,
                     to.width);
    });
}

void Program::add(Columns a, Columns b, Columns y) {
    check_alike(a, y);
    check_alike(b, y);
    add_row_step(y, kPlainPerPiece, [=](int64_t i) {
        const float *one = view(a).row(i), *other = view(b).row(i);
        float* sum = view(y).row(i);
        for (int64_t k = 0; k < y.width; ++k) sum[k] = one[k] + other[k];
    });
}

void Program::silu_mul(Columns gate, Columns up, Columns y) {
    check_alike(gate, y);
    check_alike(up, y);
    add_row_step(y, kExpPerPiece, [=](int64_t i) {
        const SiluMulParams params = {view(gate).row(i), view(up).row(i), view(y).row(i)};
        kernels().silu_mul[kFloat32](params, 0, y.width);
    });
}

void Program::silu(Columns x, Columns y) {
    check_alike(x, y);
    add_row_step(y, kExpPerPiece, [=](int64_t i) {
        const float* from = view(x).row(i);
        float* to = view(y).row(i);
        for (int64_t k = 0; k < y.width; ++k) to[k] = from[k] / (1.0f + std::exp(-from[k]));
    });
}

void Program::sigmoid(Columns x, Columns y) {
    check_alike(x, y);
    add_row_step(y, kExpPerPiece, [=](int64_t i) {
        const float* from = view(x).row(i);
        float* to = view(y).row(i);
        for (int64_t k = 0; k < y.width; ++k) to[k] = 1.0f / (1.0f + std::exp(-from[k]));
    });
}

void Program::gather(const float* table, int64_t num_rows, Columns y) {
    check(y);
    require(table && !buffers_[y.buffer].chosen, "program: gather needs a table, and all tokens");
    steps_.push_back([=] {
        require(call_.sources && call_.distances, "program: sources and distances must be given");
        check_indices("sources", call_.sources, call_.num_tokens, num_rows);
    });
    add_row_step(y, kPlainPerPiece, [=](int64_t i) {
        const size_t bytes = y.width * sizeof(float);
        if (call_.distances[i] > 0)
            std::memcpy(view(y).row(i), table + call_.sources[i] * y.width, bytes);
        else
            std::memset(view(y).row(i), 0, bytes);
    });
}

void Program::add_distance(const float* table, int64_t num_rows, Columns y) {
    check(y);
    require(table && num_rows > 0 && !buffers_[y.buffer].chosen, "program: distances need a table, and all tokens");
    steps_.push_back([=] {
        require(call_.distances, "program: distances must be given");
        check_indices("distances", call_.distances, call_.num_tokens, INT64_MAX);
    });
    add_row_step(y, kPlainPerPiece, [=](int64_t i) {
        const float* added = table + std::min(call_.distances[i], num_rows - 1) * y.width;
        float* sum = view(y).row(i);
        for (int64_t k = 0; k < y.width; ++k) sum[k] += added[k];
    });
}

void Program::rotary(const float* cos, const float* sin, int64_t num_positions, int64_t dim, Columns x) {
    check(x);
    require(cos && sin && dim > 0 && dim % 2 == 0 && x.width % dim == 0, "program: rotary needs heads of even size");
    require(!buffers_[x.buffer].chosen, "program: rotary needs all tokens");
    steps_.push_back([=] {
        require(call_.positions, "program: positions must be given");
        check_indices("positions", call_.positions, call_.num_tokens, num_positions);
    });
    add_row_step(x, kPlainPerPiece, [=](int64_t i) {
        float* heads = view(x).row(i);
        const int64_t at = call_.positions[i] * dim;
        kernels().rotary[kFloat32]({heads, cos + at, sin + at, heads, x.width / dim, dim, x.width, dim}, 0, 1);
    });
}

void Program::write_kv(Columns k, Columns v, const Pools& pools) {
    check(k);
    check(v);
    check_pools(pools);
    require(!buffers_[k.buffer].chosen && !buffers_[v.buffer].chosen, "program: write_kv needs all tokens");
    require(k.width == pools.num_kv_heads * pools.key_dim && v.width == pools.num_kv_heads * pools.value_dim,
            "program: k and v must fit the pools");
    steps_.push_back([=] {
        require(call_.slots, "program: slots must be given");
        const View keys = view(k), values = view(v);
        tide::write_kv(DType::kFloat32, {keys.data, values.data, pools.k, pools.v, call_.slots, call_.num_tokens,
                                         pools.num_kv_heads, pools.key_dim, pools.value_dim, keys.stride, pools.key_dim,
                                         values.stride, pools.value_dim, pools.num_blocks, pools.block_size});
    });
}

void Program::paged_attention(Columns q, const Pools& pools, float scaling, Columns y) {
    check(q);
    check(y);
    check_pools(pools);
    require(!buffers_[q.buffer].chosen && !buffers_[y.buffer].chosen, "program: attention needs all tokens");
    const int64_t num_heads = q.width / pools.key_dim;
    require(q.width % pools.key_dim == 0 && num_heads % pools.num_kv_heads == 0,
            "program: q must hold whole groups of heads");
    require(y.width == num_heads * pools.value_dim && y.width == buffers_[y.buffer].width,
            "program: attention fills a buffer of as many heads");
    steps_.push_back([=] {
        require(call_.block_tables && call_.query_starts && call_.context_lens,
                "program: block_tables, query_starts and context_lens must be given");
        const View queries = view(q);
        const PagedAttentionParams params = {queries.data,
                                             pools.k,
                                             pools.v,
                                             call_.block_tables,
                                             view(y).data,
                                             queries.stride,
                                             pools.key_dim,
                                             num_heads,
                                             pools.num_kv_heads,
                                             pools.key_dim,
                                             pools.value_dim,
                                             pools.block_size,
                                             call_.max_blocks,
                                             scaling,
                                             0,
                                             0.0f};
        tide::paged_attention(DType::kFloat32, params, call_.query_starts, call_.context_lens, call_.num_rows,
                              call_.num_tokens, pools.num_blocks);
    });
}

void Program::select(Columns x, Columns y) {
    check(x);
    check(y);
    require(x.width == y.width, "program: columns of one width expected");
    require(!buffers_[x.buffer].chosen && buffers_[y.buffer].chosen, "program: select takes tokens to chosen ones");
    add_row_step(y, kPlainPerPiece, [=](int64_t i) {
        std::memcpy(view(y).row(i), view(x).row(call_.each ? i : chosen_[i]), y.width * sizeof(float));
    });
}

void Program::confidence(int64_t logits, Columns y) {
    check(y);
    require(whole(logits).chosen && buffers_[y.buffer].chosen, "program: confidence is of chosen tokens");
    require(y.width == 2, "program: confidence is two numbers");
    steps_.push_back([=] {
        const Buffer& from = buffers_[logits];
        const View to = view(y);
        outcome_.best.resize(to.rows);
        tide::confidence(from.data, to.rows, from.width, to.data, to.stride, outcome_.best.data());
    });
}

void Program::result(Columns x) {
    check(x);
    require(x.width == 1 && buffers_[x.buffer].chosen, "program: a result is one number of chosen tokens");
    steps_.push_back([=] {
        const View from = view(x);
        for (int64_t i = 0; i < from.rows; ++i) outcome_.results.push_back(*from.row(i));
    });
}

}  // namespace tide
