// The program as a Python class, on raw addresses like the ops; tide_core/kernels/cpu/program.py checks what it passes
// here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "cpu/ops/program.h"
#include "released_gil.h"

namespace py = pybind11;

namespace {

using Address = uintptr_t;
using Range = std::array<int64_t, 3>;  // buffer, first column, width
using Sizes = std::array<int64_t, 5>;  // num_blocks, num_kv_heads, block_size, key_dim, value_dim

template <typename T = float>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

tide::Columns columns(const Range& range) {
    return {range[0], range[1], range[2]};
}

tide::Pools pools(Address k, Address v, const Sizes& sizes) {
    return {at(k), at(v), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]};
}

std::string shape_text(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

// The numbers of an array that is what it must be: this type, this shape, without gaps.
template <typename T>
const T* numbers(const char* name, const py::array& array, const std::vector<int64_t>& shape) {
    if (array.dtype().kind() != 'i' || array.itemsize() != static_cast<py::ssize_t>(sizeof(T))) {
        throw py::type_error(std::string(name) + ": got " + std::string(py::str(array.dtype())) + ", expected int" +
                             std::to_string(8 * sizeof(T)));
    }
    const std::vector<int64_t> got(array.shape(), array.shape() + array.ndim());
    if (got != shape) {
        throw py::value_error(std::string(name) + ": got shape " + shape_text(got) + ", expected " + shape_text(shape));
    }
    if (!(array.flags() & py::array::c_style)) {
        throw py::value_error(std::string(name) + ": got an array with gaps, expected a contiguous one");
    }
    return static_cast<const T*>(array.data());
}

py::tuple run(tide::Program& program, const std::vector<Address>& external, const py::array& positions,
              const py::array& slots, const py::array& block_tables, const py::array& query_starts,
              const py::array& context_lens, const std::optional<py::array>& origins, bool each) {
    const int64_t num_tokens = positions.size(), num_rows = context_lens.size();
    const int64_t max_blocks = block_tables.ndim() == 2 ? block_tables.shape(1) : 0;
    const int64_t* from = origins ? numbers<int64_t>("origins", *origins, {2, num_tokens}) : nullptr;
    const tide::Call call = {num_tokens,
                             num_rows,
                             max_blocks,
                             numbers<int64_t>("positions", positions, {num_tokens}),
                             numbers<int64_t>("slots", slots, {num_tokens}),
                             numbers<int32_t>("block_tables", block_tables, {num_rows, max_blocks}),
                             numbers<int32_t>("query_starts", query_starts, {num_rows + 1}),
                             numbers<int32_t>("context_lens", context_lens, {num_rows}),
                             from,
                             from ? from + num_tokens : nullptr,
                             each};
    std::vector<float*> addresses;
    for (const Address address : external) addresses.push_back(at(address));
    tide::Outcome outcome;
    {
        const ReleasedGil released;
        outcome = program.run(call, addresses);
    }
    return py::make_tuple(py::cast(outcome.results), py::cast(outcome.best));
}

}  // namespace

void bind_program(py::module_& m) {
    using tide::Program;
    py::class_<Program>(m, "Program",
                        "A fixed list of ops over buffers of its own; csrc/cpu/ops/program.h documents each.")
        .def(py::init<>())
        .def("add_buffer", &Program::add_buffer)
        .def("rms_norm",
             [](Program& p, const Range& x, Address weight, double eps, const Range& y) {
                 p.rms_norm(columns(x), at(weight), static_cast<float>(eps), columns(y));
             })
        .def("linear", [](Program& p, int64_t x, int dtype, Address weight, Address bias,
                          int64_t y) { p.linear(x, static_cast<tide::DType>(dtype), at<void>(weight), at(bias), y); })
        .def("add", [](Program& p, const Range& a, const Range& b,
                       const Range& y) { p.add(columns(a), columns(b), columns(y)); })
        .def("silu_mul", [](Program& p, const Range& gate, const Range& up,
                            const Range& y) { p.silu_mul(columns(gate), columns(up), columns(y)); })
        .def("silu", [](Program& p, const Range& x, const Range& y) { p.silu(columns(x), columns(y)); })
        .def("sigmoid", [](Program& p, const Range& x, const Range& y) { p.sigmoid(columns(x), columns(y)); })
        .def("gather", [](Program& p, Address table, int64_t num_rows,
                          const Range& y) { p.gather(at(table), num_rows, columns(y)); })
        .def("add_distance", [](Program& p, Address table, int64_t num_rows,
                                const Range& y) { p.add_distance(at(table), num_rows, columns(y)); })
        .def("rotary", [](Program& p, Address cos, Address sin, int64_t num_positions, int64_t dim,
                          const Range& x) { p.rotary(at(cos), at(sin), num_positions, dim, columns(x)); })
        .def("write_kv", [](Program& p, const Range& k, const Range& v, Address k_pool, Address v_pool,
                            const Sizes& sizes) { p.write_kv(columns(k), columns(v), pools(k_pool, v_pool, sizes)); })
        .def("paged_attention",
             [](Program& p, const Range& q, Address k_pool, Address v_pool, const Sizes& sizes, double scaling,
                const Range& y) {
                 p.paged_attention(columns(q), pools(k_pool, v_pool, sizes), static_cast<float>(scaling), columns(y));
             })
        .def("select", [](Program& p, const Range& x, const Range& y) { p.select(columns(x), columns(y)); })
        .def("confidence", [](Program& p, int64_t logits, const Range& y) { p.confidence(logits, columns(y)); })
        .def("result", [](Program& p, const Range& x) { p.result(columns(x)); })
        .def("run", &run);
}
