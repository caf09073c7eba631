// The Python module. Addresses come as integers, so that no Torch header is needed: the wrappers in
// tide_core/kernels/cpu/ops.py check the tensors and pass their data pointers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/ops/instruction_set.h"
#include "cpu/ops/ops.h"
#include "cpu/ops/panels.h"
#include "cpu/ops/thread_pool.h"
#include "released_gil.h"

namespace py = pybind11;

void bind_program(py::module_& m);  // program_bindings.cpp

namespace {

using Address = uintptr_t;

template <typename T = void>
const T* in(Address address) {
    return reinterpret_cast<const T*>(address);
}

void* out(Address address) {
    return reinterpret_cast<void*>(address);
}

void linear(int dtype, int weight_dtype, Address x, Address weight, Address bias, Address y, int64_t rows,
            int64_t in_features, int64_t out_features) {
    tide::linear(static_cast<tide::DType>(dtype), static_cast<tide::DType>(weight_dtype), in(x), in(weight), in(bias),
                 out(y), rows, in_features, out_features);
}

int64_t panels_bytes(int kind, int64_t in_features, int64_t out_features) {
    return tide::panels_bytes(static_cast<tide::PanelKind>(kind), in_features, out_features);
}

bool pack_panels(int kind, Address blocks, Address order, int64_t in_features, int64_t out_features, Address panels) {
    return tide::pack_panels(static_cast<tide::PanelKind>(kind), in(blocks), in<int64_t>(order), in_features,
                             out_features, out(panels));
}

void unpack_rows(int kind, Address panels, int64_t in_features, int64_t out_features, Address ids, int64_t count,
                 Address y) {
    tide::unpack_rows(static_cast<tide::PanelKind>(kind), in(panels), in_features, out_features, in<int64_t>(ids),
                      count, static_cast<float*>(out(y)));
}

void quantised_linear(int kind, Address x, Address panels, Address bias, Address y, int64_t rows, int64_t in_features,
                      int64_t out_features) {
    tide::quantised_linear(static_cast<tide::PanelKind>(kind), in<float>(x), in(panels), in<float>(bias),
                           static_cast<float*>(out(y)), rows, in_features, out_features);
}

void rms_norm(int dtype, Address x, Address weight, Address y, int64_t rows, int64_t width, double eps) {
    tide::rms_norm(static_cast<tide::DType>(dtype), in(x), in(weight), out(y), rows, width, static_cast<float>(eps));
}

void silu_mul(int dtype, Address gate, Address up, Address y, int64_t count) {
    tide::silu_mul(static_cast<tide::DType>(dtype), in(gate), in(up), out(y), count);
}

void rotary(int dtype, Address x, Address cos, Address sin, Address y, int64_t num_tokens, int64_t num_heads,
            int64_t dim, int64_t token_stride, int64_t head_stride) {
    tide::rotary(static_cast<tide::DType>(dtype),
                 {in(x), in(cos), in(sin), out(y), num_heads, dim, token_stride, head_stride}, num_tokens);
}

void write_kv(int dtype, Address k, Address v, Address k_pool, Address v_pool, Address slots, int64_t num_tokens,
              int64_t num_kv_heads, int64_t key_dim, int64_t value_dim, int64_t k_token_stride, int64_t k_head_stride,
              int64_t v_token_stride, int64_t v_head_stride, int64_t num_blocks, int64_t block_size) {
    tide::write_kv(static_cast<tide::DType>(dtype),
                   {in(k), in(v), out(k_pool), out(v_pool), in<int64_t>(slots), num_tokens, num_kv_heads, key_dim,
                    value_dim, k_token_stride, k_head_stride, v_token_stride, v_head_stride, num_blocks, block_size});
}

void paged_attention(int dtype, Address q, Address k_pool, Address v_pool, Address block_tables, Address query_starts,
                     Address context_lens, Address y, int64_t num_tokens, int64_t q_token_stride, int64_t q_head_stride,
                     int64_t num_heads, int64_t num_kv_heads, int64_t key_dim, int64_t value_dim, int64_t num_blocks,
                     int64_t block_size, int64_t num_rows, int64_t max_blocks, double scaling, int64_t window,
                     double softcap) {
    const tide::PagedAttentionParams params = {in(q),         in(k_pool),
                                               in(v_pool),    in<int32_t>(block_tables),
                                               out(y),        q_token_stride,
                                               q_head_stride, num_heads,
                                               num_kv_heads,  key_dim,
                                               value_dim,     block_size,
                                               max_blocks,    static_cast<float>(scaling),
                                               window,        static_cast<float>(softcap)};
    tide::paged_attention(static_cast<tide::DType>(dtype), params, in<int32_t>(query_starts), in<int32_t>(context_lens),
                          num_rows, num_tokens, num_blocks);
}

void best(Address x, int64_t rows, int64_t width, Address maxima, Address indices) {
    tide::best(in<float>(x), rows, width, static_cast<float*>(out(maxima)), static_cast<int64_t*>(out(indices)));
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    tide::choose_kernels();
    m.doc() = "CPU kernels on raw addresses; use tide_core.kernels, which checks what it passes here.";
    const auto no_gil = py::call_guard<ReleasedGil>();
    m.def("linear", &linear, no_gil, "y[rows, out] = x[rows, in] weight[out, in]^T + bias[out]; bias 0 means none.");
    m.def(
        "block_bytes", [](int kind) { return tide::block_bytes(static_cast<tide::PanelKind>(kind)); },
        "Bytes of one block of a row in a GGUF.");
    m.def("panels_bytes", &panels_bytes, "Bytes of a block-quantised matrix in panels.");
    m.def("pack_panels", &pack_panels, no_gil,
          "Rows of blocks as a GGUF has them to panels; order 0 means none. Whether all numbers are finite.");
    m.def("unpack_rows", &unpack_rows, no_gil, "Rows of a matrix in panels as float32.");
    m.def("quantised_linear", &quantised_linear, no_gil,
          "y[rows, out] = x[rows, in] weight[out, in]^T + bias[out] in float32, the weight in panels.");
    m.def("rms_norm", &rms_norm, no_gil, "Hugging Face LlamaRMSNorm over rows of `width` elements.");
    m.def("silu_mul", &silu_mul, no_gil, "y = silu(gate) * up over `count` elements.");
    m.def("rotary", &rotary, no_gil, "Rotary positions in halves for T tokens of several heads.");
    m.def("write_kv", &write_kv, no_gil, "Copies keys and values of T tokens into their slots of the page pools.");
    m.def("paged_attention", &paged_attention, no_gil,
          "Causal attention of ragged queries over paged keys and values.");
    m.def("best", &best, no_gil, "Largest number of each float32 row and the lowest index it stands at.");
    bind_program(m);
    m.def("set_num_threads", &tide::set_num_threads, "Threads that share one call, the caller included.");
    m.def("num_threads", &tide::num_threads, "Threads that share one call, the caller included.");
    m.def("instruction_set", [] { return tide::kernels().name; }, "Which build of the kernels is running.");
    m.def("instruction_sets", &tide::instruction_sets, "The builds that this machine can run, the best one last.");
    m.def("set_instruction_set", &tide::set_instruction_set,
          "Run another build: for tests and measurements, while no op runs.");
}
