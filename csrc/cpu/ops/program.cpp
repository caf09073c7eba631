#include "cpu/ops/program.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "cpu/ops/checks.h"

namespace tide {
namespace {

// Memory for so many tokens is kept from run to run; that of a long prompt is not.
constexpr int64_t kKeptTokens = 64;
constexpr int64_t kAlignFloats = 16;

int64_t aligned(int64_t floats) {
    return (floats + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
}

}  // namespace

int64_t Program::add_buffer(int64_t width, bool chosen, bool external) {
    require(width > 0, "program: a buffer must have a width");
    buffers_.push_back({width, chosen, external});
    return static_cast<int64_t>(buffers_.size()) - 1;
}

Outcome Program::run(const Call& call, const std::vector<float*>& external) {
    const std::lock_guard<std::mutex> turn(turn_);
    require(call.num_tokens >= 0 && call.num_rows >= 0 && call.max_blocks >= 0, "program: sizes must not be negative");
    call_ = call;
    outcome_ = {};
    choose();
    if (call.num_tokens == 0) return {};
    place(external);
    for (const auto& step : steps_) step();
    if (call.num_tokens > kKeptTokens) {
        arena_.reset();
        arena_floats_ = 0;
    }
    return std::move(outcome_);
}

// The last token of each row; nothing is listed when it is every token.
void Program::choose() {
    chosen_.clear();
    if (call_.each) return;
    require(call_.num_rows == 0 || call_.query_starts, "program: query_starts must be given to choose by");
    for (int64_t row = 0; row < call_.num_rows; ++row) {
        const int64_t first = call_.query_starts[row], end = call_.query_starts[row + 1];
        if (first < 0 || end <= first || end > call_.num_tokens) {
            throw std::out_of_range("query_starts[" + std::to_string(row + 1) + "]: got " + std::to_string(end) +
                                    ", expected rising numbers up to " + std::to_string(call_.num_tokens));
        }
        chosen_.push_back(end - 1);
    }
}

void Program::place(const std::vector<float*>& external) {
    int64_t floats = 0;
    for (const Buffer& buffer : buffers_) {
        if (!buffer.external) floats += aligned(rows_of(buffer) * buffer.width);
    }
    if (floats > arena_floats_) {
        arena_floats_ = 0;
        arena_.reset(new float[floats]);
        arena_floats_ = floats;
    }
    size_t given = 0;
    float* next = arena_.get();
    for (Buffer& buffer : buffers_) {
        if (buffer.external) {
            require(given < external.size() && external[given], "program: an external buffer is missing");
            buffer.data = external[given++];
        } else {
            buffer.data = next;
            next += aligned(rows_of(buffer) * buffer.width);
        }
    }
    require(given == external.size(), "program: more external buffers than it has");
}

int64_t Program::rows_of(const Buffer& buffer) const {
    return buffer.chosen && !call_.each ? static_cast<int64_t>(chosen_.size()) : call_.num_tokens;
}

Program::View Program::view(Columns columns) const {
    const Buffer& buffer = buffers_[columns.buffer];
    return {buffer.data + columns.start, buffer.width, rows_of(buffer)};
}

void Program::check(Columns columns) const {
    require(columns.buffer >= 0 && columns.buffer < static_cast<int64_t>(buffers_.size()), "program: no such buffer");
    require(columns.start >= 0 && columns.width > 0 && columns.start + columns.width <= buffers_[columns.buffer].width,
            "program: columns outside their buffer");
}

void Program::check_alike(Columns x, Columns y) const {
    check(x);
    check(y);
    require(x.width == y.width, "program: columns of one width expected");
    require(buffers_[x.buffer].chosen == buffers_[y.buffer].chosen, "program: buffers of the same tokens expected");
}

const Program::Buffer& Program::whole(int64_t buffer) const {
    require(buffer >= 0 && buffer < static_cast<int64_t>(buffers_.size()), "program: no such buffer");
    return buffers_[buffer];
}

}  // namespace tide
