#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/ops/checks.h"
#include "cpu/ops/instruction_set.h"
#include "cpu/ops/ops.h"
#include "cpu/ops/thread_pool.h"

namespace tide {
namespace {

// Long queries are cut so that a task's scratch stays in cache and threads find enough tasks. The cut
// changes no result: every query is computed on its own.
constexpr int64_t kMaxQueriesPerTask = 16;
constexpr int64_t kMinParallelWork = 32 * 1024;  // multiplications, about 5 us

[[noreturn]] void refuse(const char* name, int64_t index, int64_t value, const std::string& expected) {
    throw std::out_of_range(std::string(name) + "[" + std::to_string(index) + "]: got " + std::to_string(value) +
                            ", expected " + expected);
}

// Every page a row will read must lie in the pool, or reading it would leave our memory.
void check_row(const PagedAttentionParams& p, int64_t row, int64_t first_position, int64_t end, int64_t num_blocks) {
    const int64_t capacity = p.max_blocks * p.block_size;
    if (end > capacity) refuse("context_lens", row, end, "at most " + std::to_string(capacity) + " (block_tables)");
    const int64_t begin = p.window > 0 ? std::max<int64_t>(0, first_position - p.window + 1) : 0;
    for (int64_t block = begin / p.block_size; block * p.block_size < end; ++block) {
        const int64_t page = p.block_tables[row * p.max_blocks + block];
        if (page < 0 || page >= num_blocks) {
            refuse("block_tables", row, page, "a block of the pool, 0 to " + std::to_string(num_blocks - 1));
        }
    }
}

// Scores plus weighted values, over the context the task sees.
int64_t work_of(const PagedAttentionParams& p, const AttentionTask& task) {
    const int64_t seen = p.window > 0 ? std::min(task.first_position, p.window) : task.first_position;
    return (seen + task.num_queries) * task.num_queries * (p.num_heads / p.num_kv_heads) * (p.key_dim + p.value_dim);
}

void add_row_tasks(const PagedAttentionParams& p, int64_t row, int64_t first_query, int64_t num_queries,
                   int64_t first_position, std::vector<AttentionTask>* tasks) {
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
        for (int64_t done = 0; done < num_queries; done += kMaxQueriesPerTask) {
            tasks->push_back({row, head, first_query + done, std::min(kMaxQueriesPerTask, num_queries - done),
                              first_position + done});
        }
    }
}

void check_sizes(const PagedAttentionParams& p, int64_t num_rows, int64_t num_tokens) {
    require(num_rows >= 0 && num_tokens >= 0 && p.max_blocks >= 0 && p.key_dim >= 0 && p.value_dim >= 0,
            "paged_attention: sizes must not be negative");
    require(p.block_size > 0, "paged_attention: block_size must be positive");
    require(p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0,
            "paged_attention: q heads must be a multiple of the pools' heads");
}

}  // namespace

void paged_attention(DType dtype, const PagedAttentionParams& p, const int32_t* query_starts,
                     const int32_t* context_lens, int64_t num_rows, int64_t num_tokens, int64_t num_blocks) {
    const int index = dtype_index(dtype);
    check_sizes(p, num_rows, num_tokens);
    thread_local std::vector<AttentionTask> tasks;
    tasks.clear();
    int64_t work = 0;
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t first_query = query_starts[row];
        const int64_t num_queries = query_starts[row + 1] - first_query;
        if (first_query < 0 || num_queries < 0 || first_query + num_queries > num_tokens) {
            refuse("query_starts", row + 1, query_starts[row + 1],
                   "rising numbers up to " + std::to_string(num_tokens));
        }
        if (num_queries == 0) continue;
        const int64_t first_position = context_lens[row] - num_queries;
        if (first_position < 0) {
            refuse("context_lens", row, context_lens[row],
                   "at least the row's " + std::to_string(num_queries) + " queries");
        }
        check_row(p, row, first_position, context_lens[row], num_blocks);
        add_row_tasks(p, row, first_query, num_queries, first_position, &tasks);
    }
    if (tasks.empty()) return;
    for (const AttentionTask& task : tasks) work += work_of(p, task);
    const KernelTable& table = kernels();
    const AttentionTask* all = tasks.data();  // the caller's own vector, not the worker's thread_local
    const int64_t num_tasks = static_cast<int64_t>(tasks.size());
    const int64_t scratch_floats = table.attention_scratch_floats(p, kMaxQueriesPerTask);
    parallel_for(num_tasks, work < kMinParallelWork ? num_tasks : 1, [&](int64_t first, int64_t last) {
        float* scratch = thread_scratch(scratch_floats);
        for (int64_t i = first; i < last; ++i) table.paged_attention[index](p, all[i], scratch);
    });
}

}  // namespace tide
