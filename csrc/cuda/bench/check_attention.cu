// Paged attention against double precision, and against itself: a query in a batch and alone must give the same bits.
// Positions past a row's context hold no numbers, and table entries past it no pages.
#include <algorithm>
#include <cmath>

#include "cuda/attention/work.cuh"
#include "cuda/bench/support.cuh"

namespace tide::cuda::bench {
namespace {

constexpr int kReferenceThreads = 128;

template <typename T>
__global__ void reference(PagedAttentionParams p, double* all_scores, double* ref, double* tol, double eps) {
    const int64_t lane = blockIdx.x, head = lane % p.num_heads;
    const int token = static_cast<int>(lane / p.num_heads), thread = threadIdx.x;
    const int64_t rows = p.num_rows ? *p.num_rows : p.rows;
    int64_t row = 0;
    while (row < rows && p.query_starts[row + 1] <= token) ++row;
    if (row == rows) return;
    const int position = p.context_lens[row] - (p.query_starts[row + 1] - token);
    const int64_t kv_head = head / (p.num_heads / p.num_kv_heads);
    const int64_t low = p.window > 0 && position - p.window + 1 > 0 ? position - p.window + 1 : 0;
    double* scores = all_scores + lane * p.max_context;
    __shared__ double parts[kReferenceThreads];
    const T* q = static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride;
    const auto place = [&](int64_t s) {
        const int64_t block = p.block_tables[row * p.max_blocks + s / p.block_size];
        return ((block * p.num_kv_heads + kv_head) * p.block_size + s % p.block_size) * p.head_dim;
    };
    for (int64_t s = low + thread; s <= position; s += blockDim.x) {
        const T* key = static_cast<const T*>(p.k_pool) + place(s);
        double dot = 0.0;
        for (int64_t d = 0; d < p.head_dim; ++d) dot += double(to_float(q[d])) * to_float(key[d]);
        dot *= p.scaling;
        scores[s - low] = p.softcap > 0 ? p.softcap * tanh(dot / p.softcap) : dot;
    }
    __syncthreads();
    double mine = -1e300, peak = -1e300, total = 0.0;
    for (int64_t i = thread; i <= position - low; i += blockDim.x) mine = fmax(mine, scores[i]);
    parts[thread] = mine;
    __syncthreads();
    for (const double part : parts) peak = fmax(peak, part);
    __syncthreads();
    mine = 0.0;
    for (int64_t i = thread; i <= position - low; i += blockDim.x) mine += scores[i] = exp(scores[i] - peak);
    parts[thread] = mine;
    __syncthreads();
    for (const double part : parts) total += part;
    for (int64_t d = thread; d < p.head_dim; d += blockDim.x) {
        double sum = 0.0, size = 0.0;
        for (int64_t s = low; s <= position; ++s) {
            const double part = scores[s - low] / total * to_float(static_cast<const T*>(p.v_pool)[place(s) + d]);
            sum += part;
            size += fabs(part);
        }
        ref[lane * p.head_dim + d] = sum;
        tol[lane * p.head_dim + d] = eps * fabs(sum) + (eps + 2e-5) * size + 1e-6;
    }
}

// Numbers for the positions that exist; the rest of the pool keeps what it had.
template <typename T>
__global__ void fill_pages(PagedAttentionParams p, uint64_t seed) {
    const int64_t row = blockIdx.x;
    const int64_t count = p.context_lens[row] * p.num_kv_heads * p.head_dim;
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
        const int64_t d = i % p.head_dim, h = i / p.head_dim % p.num_kv_heads, s = i / p.head_dim / p.num_kv_heads;
        const int64_t block = p.block_tables[row * p.max_blocks + s / p.block_size];
        const int64_t at = ((block * p.num_kv_heads + h) * p.block_size + s % p.block_size) * p.head_dim + d;
        const_cast<T*>(static_cast<const T*>(p.k_pool))[at] = from_float<T>(noise(at, seed) * 2.0f);
        const_cast<T*>(static_cast<const T*>(p.v_pool))[at] = from_float<T>(noise(at, seed + 1));
    }
}

struct Case {
    int64_t heads, kv_heads, dim, block_size, window;
    float softcap;
    std::vector<int> contexts, queries;
    float loudness = 1.0f;  // of the queries; above it weights differ so much that bases rise within a chunk
};

template <typename T>
void check_case(const Case& c) {
    const int64_t rows = static_cast<int64_t>(c.contexts.size());
    std::vector<int32_t> starts = {0}, lengths(c.contexts.begin(), c.contexts.end());
    int64_t max_context = 1, max_queries = 1, num_blocks = 0;
    for (int64_t r = 0; r < rows; ++r) {
        starts.push_back(starts.back() + c.queries[r]);
        max_context = std::max<int64_t>(max_context, c.contexts[r]);
        max_queries = std::max<int64_t>(max_queries, c.queries[r]);
        num_blocks += (c.contexts[r] + c.block_size - 1) / c.block_size;
    }
    const int64_t max_blocks = (max_context + c.block_size - 1) / c.block_size + 1, tokens = starts.back();
    std::vector<int32_t> tables(rows * max_blocks, 1 << 30);
    int64_t next = 0;
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t b = 0; b * c.block_size < c.contexts[r]; ++b)
            tables[r * max_blocks + b] = static_cast<int32_t>(num_blocks - 1 - next++);
    }
    const int64_t pool = num_blocks * c.kv_heads * c.block_size * c.dim * sizeof(T);
    const int64_t q_stride = (c.heads + 2) * c.dim, out_row = c.heads * c.dim;
    const Buffer q(tokens * q_stride * sizeof(T)), keys(pool), values(pool), table(tables.size() * 4);
    const Buffer query_starts((rows + 1) * 4), context_lens(rows * 4), count(4), lone_starts(8), lone_length(4);
    const Buffer out((tokens + 1) * out_row * sizeof(T)), lone_out(2 * out_row * sizeof(T));
    const Buffer workspace(paged_attention_workspace(tokens, c.heads, c.dim, max_context));
    const Buffer ref(tokens * out_row * 8), tol(tokens * out_row * 8), scores(tokens * c.heads * max_context * 8);
    fill(q.get<T>(), tokens * q_stride, 11, c.loudness);
    keys.fill_bytes(0xFF);
    values.fill_bytes(0xFF);
    table.put(tables);
    query_starts.put(starts);
    context_lens.put(lengths);
    PagedAttentionParams p = {};
    p.q = q.get();
    p.k_pool = keys.get();
    p.v_pool = values.get();
    p.block_tables = table.get<int32_t>();
    p.query_starts = query_starts.get<int32_t>();
    p.context_lens = context_lens.get<int32_t>();
    p.out = out.get();
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
    p.q_token_stride = q_stride;
    p.q_head_stride = c.dim;
    p.scaling = 1.0f / std::sqrt(static_cast<float>(c.dim));
    p.window = c.window;
    p.softcap = c.softcap;
    fill_pages<T><<<static_cast<unsigned int>(rows), 256>>>(p, 21);
    const std::string name = std::string("attention ") + name_of<T>() + " heads=" + std::to_string(c.heads) + "/" +
                             std::to_string(c.kv_heads) + " dim=" + std::to_string(c.dim) +
                             " block=" + std::to_string(c.block_size) + " window=" + std::to_string(c.window) +
                             " softcap=" + std::to_string(c.softcap);
    Counter counter;

    out.fill_bytes(kGuard);
    workspace.fill_bytes(0xFF);
    require(cudaMemset(workspace.get(), 0, std::min<int64_t>(workspace.bytes(), kCounters * 4)));
    paged_attention(dtype_of<T>(), p, nullptr);
    reference<T><<<static_cast<unsigned int>(tokens * c.heads), kReferenceThreads>>>(
        p, scores.get<double>(), ref.get<double>(), tol.get<double>(), epsilon<T>());
    compare<T>
        <<<256, 256>>>(out.get<T>(), ref.get<double>(), tol.get<double>(), tokens, out_row, out_row, counter.reset());
    const Counts wrong = counter.read();
    expect(wrong.first == 0, name + ": " + std::to_string(wrong.first) + " wrong, worst error/tolerance " +
                                 std::to_string(wrong.second / 1000.0));

    // Each query alone, as the last of a shorter context.
    unsigned int differing = 0, outside = 0;
    for (int64_t r = 0; r < rows; ++r) {
        for (int j = 0; j < c.queries[r]; ++j) {
            const int64_t token = starts[r] + j;
            PagedAttentionParams lone = p;
            lone.q = q.get<T>() + token * q_stride;
            lone.block_tables = table.get<int32_t>() + r * max_blocks;
            lone_starts.put(std::vector<int32_t>{0, 1});
            lone_length.put(std::vector<int32_t>{c.contexts[r] - c.queries[r] + j + 1});
            lone.query_starts = lone_starts.get<int32_t>();
            lone.context_lens = lone_length.get<int32_t>();
            lone.out = lone_out.get();
            lone.rows = lone.num_tokens = lone.max_queries = 1;
            lone.max_context = c.contexts[r] - c.queries[r] + j + 1;
            lone_out.fill_bytes(kGuard);
            paged_attention(dtype_of<T>(), lone, nullptr);
            compare_bits<T><<<16, 256>>>(lone_out.get<T>(), out_row, 2 * out_row, out.get<T>() + token * out_row,
                                         out_row, 1, out_row, kGuard, counter.reset());
            const Counts counts = counter.read();
            differing += counts.first;
            outside += counts.second;
        }
    }
    expect(differing == 0 && outside == 0,
           name + " alone: " + std::to_string(differing) + " differ, " + std::to_string(outside) + " written outside");

    {
        const Buffer zeros(kCounters * 4);
        zeros.fill_bytes(0);
        compare_bits<int32_t><<<256, 256>>>(workspace.get<int32_t>(), kCounters, kCounters, zeros.get<int32_t>(),
                                            kCounters, 1, kCounters, 0, counter.reset());
        expect(counter.read().first == 0, name + ": counters are left");
    }

    // Fewer rows than declared: the queries of the last row stay unwritten, and its table and length are nonsense.
    if (rows < 2) return;
    const Buffer cut((tokens + 1) * out_row * sizeof(T));
    cut.fill_bytes(kGuard);
    count.put(std::vector<int32_t>{static_cast<int32_t>(rows - 1)});
    std::vector<int32_t> broken = lengths;
    broken[rows - 1] = -5;
    context_lens.put(broken);
    PagedAttentionParams fewer = p;
    fewer.num_rows = count.get<int32_t>();
    fewer.out = cut.get();
    paged_attention(dtype_of<T>(), fewer, nullptr);
    compare_bits<T><<<256, 256>>>(cut.get<T>(), out_row, (tokens + 1) * out_row, out.get<T>(), out_row,
                                  starts[rows - 1], out_row, kGuard, counter.reset());
    const Counts counts = counter.read();
    expect(counts.first == 0 && counts.second == 0, name + " num_rows: " + std::to_string(counts.first) + " differ, " +
                                                        std::to_string(counts.second) + " written outside");
}

template <typename T>
void check_type() {
    const std::vector<int> contexts = {1, 7, 16, 17, 30, 128, 130, 257, 511, 512, 514, 780, 1030, 1600, 2048, 2050};
    const std::vector<int> queries = {1, 3, 16, 1, 30, 1, 4, 2, 1, 4, 3, 16, 8, 5, 1, 4};
    for (const int64_t dim : {64, 80, 96, 128, 256}) {
        check_case<T>({8, 2, dim, 16, 0, 0.0f, contexts, queries});
        check_case<T>({4, 4, dim, 8, 100, 0.0f, contexts, queries});
        check_case<T>({10, 2, dim, 24, 700, 20.0f, contexts, queries});
    }
    check_case<T>({16, 1, 128, 32, 0, 0.0f, contexts, queries});
    check_case<T>({32, 8, 128, 16, 0, 0.0f, {600, 9000}, {3, 9}});
    check_case<T>({8, 2, 128, 16, 0, 0.0f, std::vector<int>(150, 700), std::vector<int>(150, 2)});  // pieces in turn
    check_case<T>({8, 2, 64, 16, 0, 0.0f, std::vector<int>(300, 21), std::vector<int>(300, 1)});   // rows share threads
    check_case<T>({32, 8, 128, 16, 0, 0.0f, std::vector<int>(40, 520), std::vector<int>(40, 8)});  // many lanes
    check_case<T>({32, 8, 128, 16, 0, 0.0f, std::vector<int>(64, 600), std::vector<int>(64, 3)});  // fewer lanes
    check_case<T>({32, 8, 128, 16, 0, 0.0f, {512}, {5}});  // few pieces: lanes are divided further
    check_case<T>({9, 3, 64, 16, 0, 0.0f, {200, 31, 190}, {8, 5, 1}});
    check_case<T>({34, 2, 64, 16, 1, 0.0f, {1025, 3}, {9, 3}});
    check_case<T>({64, 1, 64, 16, 0, 0.0f, {1100, 140}, {1030, 2}});  // more lanes than counters
    check_case<T>({4, 1, 64, 16, 0, 0.0f, {32770, 65538, 70001}, {4, 4, 1}});
    check_case<T>({6, 2, 64, 16, 2100, 0.0f, {33000, 67700}, {1, 2}});
    // Many lanes, up to 32 of a piece or more: windows that begin within a chunk, a cap, and bases that rise.
    std::vector<int> fewer = queries;
    for (int& count : fewer) count = std::min(count, 8);
    for (const int64_t dim : {64, 128}) {
        for (const int64_t window : {0, 40, 700}) {
            check_case<T>({32, 4, dim, 16, window, 0.0f, contexts, queries, 40.0f});
            check_case<T>({32, 8, dim, 16, window, 0.0f, contexts, fewer, 40.0f});
        }
        check_case<T>({32, 8, dim, 32, 300, 20.0f, contexts, queries, 4.0f});
        check_case<T>({32, 8, dim, 32, 300, 20.0f, contexts, fewer, 4.0f});
    }
    check_case<T>({16, 4, 128, 16, 0, 0.0f, {17000, 32768, 9000}, {8, 5, 3}, 20.0f});
}

}  // namespace

void check_attention() {
    check_type<__nv_bfloat16>();
    check_type<__half>();
    check_type<float>();
}

}  // namespace tide::cuda::bench
