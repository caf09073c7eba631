// The linear against double precision, and against itself: every row count, tile and num_rows must give the same bits.
#include <memory>

#include "cuda/bench/support.cuh"
#include "cuda/linear/kernels.h"

namespace tide::cuda::bench {
namespace {

constexpr double kSumError = 1e-5;  // of float32 sums, relative to the sum of sizes

template <typename T>
__global__ void reference(LinearParams p, double* ref, double* tol, double eps) {
    const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
    if (i >= p.rows * p.out_features) return;
    const int64_t m = i / p.out_features, n = i % p.out_features;
    double factor = 1.0;
    if (p.norm) {
        double squares = 0.0;
        for (int64_t k = 0; k < p.in_features; ++k) {
            const double v = to_float(static_cast<const T*>(p.x)[m * p.x_stride + k]);
            squares += v * v;
        }
        factor = 1.0 / sqrt(squares / static_cast<double>(p.in_features) + p.norm_eps);
    }
    double sums[2] = {}, sizes[2] = {}, errors[2] = {};
    for (int half = 0; half < (p.gated ? 2 : 1); ++half) {
        const int64_t row = n + half * p.out_features;
        for (int64_t k = 0; k < p.in_features; ++k) {
            double product = double(to_float(static_cast<const T*>(p.x)[m * p.x_stride + k])) *
                             to_float(static_cast<const T*>(p.weight)[row * p.in_features + k]);
            if (p.norm) product *= to_float(static_cast<const T*>(p.norm)[k]) * factor;
            sums[half] += product;
            sizes[half] += fabs(product);
            errors[half] += product * product;
        }
        // The roundings of x times the norm go up and down: many of them are far less than as many times one.
        errors[half] = kSumError * sizes[half] + (p.norm ? 3.0 * eps * sqrt(errors[half]) : 0.0);
        if (p.bias) sums[half] += to_float(static_cast<const T*>(p.bias)[row]);
    }
    double value = sums[0], error = errors[0] + eps * fabs(sums[0]);
    if (p.gated) {
        const double gate = sums[0], silu = gate / (1.0 + exp(-gate));
        const double up_error = errors[1] + eps * fabs(sums[1]);
        value = silu * sums[1];
        error = 1.1 * error * fabs(sums[1]) + fabs(silu) * up_error + 1.1 * error * up_error + 2.0 * eps * fabs(value);
    }
    if (p.residual) {
        value += to_float(static_cast<const T*>(p.residual)[m * p.residual_stride + n]);
        error += eps * fabs(value);
    }
    ref[i] = value;
    tol[i] = error + 1e-7;
}

struct Case {
    int64_t n, k;
    bool bias, residual, gated, strided;
    bool norm = false;
};

constexpr int64_t kRows = 1030, kReferenceRows = 131;
const int64_t kRowCounts[] = {1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 256, 257, 1024};

template <typename T>
void check_case(const Case& c) {
    const int64_t x_stride = c.k + (c.strided ? 16 : 0), y_stride = c.n + (c.strided ? 3 : 0);
    const int64_t weight_rows = c.gated ? 2 * c.n : c.n;
    const Buffer x(kRows * x_stride * sizeof(T)), weight(weight_rows * c.k * sizeof(T)), bias(weight_rows * sizeof(T));
    const Buffer norm(c.k * sizeof(T)), residual(kRows * c.n * sizeof(T)), base((kRows + 1) * y_stride * sizeof(T));
    const Buffer y((kRows + 1) * y_stride * sizeof(T)), ref(kReferenceRows * c.n * 8), tol(kReferenceRows * c.n * 8);
    const Buffer count(4);
    fill(x.get<T>(), kRows * x_stride, 1, 1.0f);
    fill(weight.get<T>(), weight_rows * c.k, 2, 0.1f);
    fill(bias.get<T>(), weight_rows, 3, 1.0f);
    fill(norm.get<T>(), c.k, 10, 2.0f);
    fill(residual.get<T>(), kRows * c.n, 4, 3.0f);
    base.fill_bytes(kGuard);
    LinearParams p = {};
    p.x = x.get();
    p.weight = weight.get();
    p.bias = c.bias ? bias.get() : nullptr;
    p.norm = c.norm ? norm.get() : nullptr;
    p.norm_eps = 1e-5f;
    p.residual = c.residual ? residual.get() : nullptr;
    p.y = base.get();
    p.rows = kRows;
    p.in_features = c.k;
    p.out_features = c.n;
    p.x_stride = x_stride;
    p.y_stride = y_stride;
    p.residual_stride = c.n;
    p.gated = c.gated;
    const std::string name = std::string("linear ") + name_of<T>() + " n=" + std::to_string(c.n) +
                             " k=" + std::to_string(c.k) + (c.bias ? " bias" : "") + (c.residual ? " residual" : "") +
                             (c.gated ? " gated" : "") + (c.strided ? " strided" : "") + (c.norm ? " norm" : "");
    Counter counter;

    linear(dtype_of<T>(), p, nullptr);
    p.rows = kReferenceRows;
    reference<T><<<static_cast<unsigned int>((kReferenceRows * c.n + 127) / 128), 128>>>(
        p, ref.get<double>(), tol.get<double>(), epsilon<T>());
    compare<T><<<256, 256>>>(base.get<T>(), ref.get<double>(), tol.get<double>(), kReferenceRows, c.n, y_stride,
                             counter.reset());
    const Counts wrong = counter.read();
    expect(wrong.first == 0, name + ": " + std::to_string(wrong.first) + " wrong, worst error/tolerance " +
                                 std::to_string(wrong.second / 1000.0));

    // Rows [first, first + live) of the batch with `rows` rows declared, on `run`'s choice of kernel.
    const auto same = [&](const std::string& what, int64_t first, int64_t rows, int64_t live, bool in_place,
                          const std::function<void(const LinearParams&)>& run) {
        LinearParams q = p;
        q.x = x.get<T>() + first * x_stride;
        q.residual = c.residual ? residual.get<T>() + first * c.n : nullptr;
        q.y = y.get();
        q.rows = rows;
        if (live < rows) {
            count.put(std::vector<int32_t>{static_cast<int32_t>(live)});
            q.num_rows = count.get<int32_t>();
        }
        y.fill_bytes(kGuard);
        if (in_place && c.residual && live > 0) {
            require(cudaMemcpy2D(y.get(), y_stride * sizeof(T), q.residual, c.n * sizeof(T), c.n * sizeof(T), live,
                                 cudaMemcpyDeviceToDevice));
            q.residual = y.get();
            q.residual_stride = y_stride;
        }
        run(q);
        compare_bits<T><<<256, 256>>>(y.get<T>(), y_stride, (kRows + 1) * y_stride, base.get<T>() + first * y_stride,
                                      y_stride, live, c.n, kGuard, counter.reset());
        const Counts counts = counter.read();
        expect(counts.first == 0 && counts.second == 0,
               name + " " + what + " rows=" + std::to_string(rows) + " live=" + std::to_string(live) + ": " +
                   std::to_string(counts.first) + " differ, " + std::to_string(counts.second) + " written outside");
    };
    const auto op = [](const LinearParams& q) { linear(dtype_of<T>(), q, nullptr); };
    for (const int64_t rows : kRowCounts) same("batch", 0, rows, rows, false, op);
    for (const int64_t row : {0, 7, 64, 130, 257, 1029}) same("alone", row, 1, 1, false, op);
    same("in place", 3, 33, 33, true, op);
    for (const int64_t live : {0, 1, 7, 8, 13, 40}) same("num_rows", 0, 64, live, false, op);
    same("in place", 3, 333, 333, true, op);
    for (const int64_t live : {0, 1, 66, 130}) same("num_rows", 0, 131, live, false, op);
    same("num_rows", 0, 1030, 300, false, op);
    same("nothing", 0, 0, 0, false, op);
    if constexpr (sizeof(T) == 2) {
        if (c.k % 8 != 0) return;
        for (const LinearTile& tile : kLinearTiles) {
            if (p.norm && !has_normed_kernel(tile)) continue;
            same("tile " + name_of(tile), 5, 64, 43, false,
                 [&](const LinearParams& q) { launch_tiles<T>(q, tile, nullptr); });
        }
        if (!supports_wide(p, current_device("bench"))) return;
        for (const WideTile& tile : wide_tiles(p)) {
            const auto wide = [&](const LinearParams& q) { launch_linear_wide<T>(q, tile, nullptr); };
            for (const int64_t rows : {1, 24, 200, 1030}) same(name_of(tile), 0, rows, rows, false, wide);
            same(name_of(tile), 5, 160, 43, false, wide);
            same(name_of(tile), 5, 160, 0, false, wide);
        }
    }
}

template <typename T>
void check_type() {
    const Case cases[] = {
        {64, 64, false, false, false, false},    {100, 72, true, true, false, true},
        {17, 8, true, false, false, false},      {960, 576, false, false, false, false},
        {1536, 576, false, false, true, false},  {333, 1000, true, true, true, true},
        {50, 33, true, true, false, false},      {7, 5, false, false, true, false},
        {48, 130, true, true, true, true},       {1, 4096, false, true, false, false},
        {4096, 4096, false, true, false, false}, {203, 14336, true, false, false, true},
        {1000, 14344, false, true, true, false}, {576, 1536, false, true, false, false},
    };
    for (const Case& c : cases) check_case<T>(c);
    if constexpr (std::is_same_v<T, __half>) return;
    const Case normed[] = {
        {100, 72, true, true, false, true, true},      {17, 8, true, false, false, false, true},
        {960, 576, false, false, false, false, true},  {1536, 576, false, false, true, false, true},
        {50, 33, true, true, false, false, true},      {48, 130, true, true, true, true, true},
        {4096, 4096, false, true, false, false, true}, {333, 1000, true, true, true, true, true},
        {1000, 14344, false, true, true, false, true},
    };
    for (const Case& c : normed) check_case<T>(c);
}

}  // namespace

void check_linear() {
    check_type<__nv_bfloat16>();
    check_type<__half>();
    check_type<float>();
}

}  // namespace tide::cuda::bench
