#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/ops/checks.h"
#include "cpu/ops/instruction_set.h"
#include "cpu/ops/ops.h"
#include "cpu/ops/thread_pool.h"

namespace tide {
namespace {

// Rows are cut at fixed places, whatever the number of rows and threads, so that a result depends on neither.
constexpr int64_t kChunk = 2048;

int64_t chunks_of(int64_t width) {
    return (width + kChunk - 1) / kChunk;
}

// body(i, numbers, count) for the i-th chunk of all rows; `per_piece` of them make about 5 us of work.
template <typename Body>
void for_each_chunk(const float* x, int64_t rows, int64_t width, int64_t per_piece, const Body& body) {
    const int64_t chunks = chunks_of(width);
    parallel_for(rows * chunks, per_piece, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t row = i / chunks, chunk = i % chunks;
            body(i, x + row * width + chunk * kChunk, std::min(kChunk, width - chunk * kChunk));
        }
    });
}

// The first chunk that holds a NaN, else the first that holds the largest number.
template <typename Value>
int64_t best_chunk(int64_t chunks, const Value& value) {
    int64_t found = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        if (std::isnan(value(chunk))) return chunk;
        if (value(chunk) > value(found)) found = chunk;
    }
    return found;
}

int64_t index_in(const float* x, int64_t count, float wanted) {
    for (int64_t i = 0; i < count; ++i) {
        if (x[i] == wanted || (std::isnan(wanted) && std::isnan(x[i]))) return i;
    }
    return 0;
}

int64_t index_of(const float* row, int64_t width, int64_t chunk, float wanted) {
    const int64_t start = chunk * kChunk;
    return start + index_in(row + start, std::min(kChunk, width - start), wanted);
}

// The result of a whole row from those of its chunks.
Top2 joined(const Top2* parts, int64_t chunks, int64_t found) {
    Top2 all = {parts[found].best, parts[found].second, 0.0f};
    double sum = 0.0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        if (chunk != found) all.second = std::max(all.second, parts[chunk].best);
        sum += static_cast<double>(parts[chunk].sum) * std::exp(static_cast<double>(parts[chunk].best) - all.best);
    }
    all.sum = static_cast<float>(sum);
    return all;
}

}  // namespace

void best(const float* x, int64_t rows, int64_t width, float* maxima, int64_t* indices) {
    require(rows >= 0 && width > 0, "best: rows must not be negative and must hold a number");
    const int64_t chunks = chunks_of(width);
    thread_local std::vector<float> memory;
    memory.resize(rows * chunks);
    float* found = memory.data();  // the caller's own, not the worker's thread_local
    const KernelTable& table = kernels();
    for_each_chunk(x, rows, width, 4,
                   [&](int64_t i, const float* numbers, int64_t count) { found[i] = table.maximum(numbers, count); });
    for (int64_t row = 0; row < rows; ++row) {
        const float* mine = found + row * chunks;
        const int64_t chunk = best_chunk(chunks, [&](int64_t i) { return mine[i]; });
        maxima[row] = mine[chunk];
        indices[row] = index_of(x + row * width, width, chunk, mine[chunk]);
    }
}

void confidence(const float* logits, int64_t rows, int64_t width, float* out, int64_t out_stride, int64_t* indices) {
    require(rows >= 0 && width > 0, "confidence: rows must not be negative and must hold a number");
    const int64_t chunks = chunks_of(width);
    thread_local std::vector<Top2> memory;
    memory.resize(rows * chunks);
    Top2* parts = memory.data();
    const KernelTable& table = kernels();
    for_each_chunk(logits, rows, width, 1, [&](int64_t i, const float* numbers, int64_t count) {
        parts[i] = table.top2_logsumexp(numbers, count);
    });
    for (int64_t row = 0; row < rows; ++row) {
        const Top2* mine = parts + row * chunks;
        const int64_t chunk = best_chunk(chunks, [&](int64_t i) { return mine[i].best; });
        const Top2 all = joined(mine, chunks, chunk);
        out[row * out_stride] = -std::log(all.sum);
        out[row * out_stride + 1] = all.best - all.second;
        indices[row] = index_of(logits + row * width, width, chunk, all.best);
    }
}

}  // namespace tide
