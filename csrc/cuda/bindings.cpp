// The Python module of the CUDA ops. Addresses and streams come as integers, so that no Torch header is needed: the
// wrappers in tide_core/kernels/cuda/ops.py check the tensors and pass their data pointers. An address of 0 means none.
#include <pybind11/pybind11.h>

#include <string>

#include "cuda/attention/attention.h"
#include "cuda/common/device.h"
#include "cuda/cycle/cycle.h"
#include "cuda/cycle/draw.h"
#include "cuda/cycle/row_meta.h"
#include "cuda/linear/linear.h"
#include "cuda/small/ops.h"
#include "released_gil.h"

namespace py = pybind11;

namespace {

using Address = uintptr_t;
using tide::DType;
using tide::cuda::Heads;

template <typename T = void>
const T* in(Address address) {
    return reinterpret_cast<const T*>(address);
}

template <typename T = void>
T* out(Address address) {
    return reinterpret_cast<T*>(address);
}

DType dtype_of(int code) {
    if (code < 0 || code > 2) {
        throw std::invalid_argument("dtype: got code " + std::to_string(code) + ", expected 0, 1 or 2");
    }
    return static_cast<DType>(code);
}

cudaStream_t stream_of(Address address) {
    return reinterpret_cast<cudaStream_t>(address);
}

// Heads of a tensor [T, heads, dim]: address, heads, token stride, head stride.
using HeadsTuple = std::tuple<Address, int64_t, int64_t, int64_t>;

Heads heads_of(const HeadsTuple& heads) {
    return {in(std::get<0>(heads)), std::get<1>(heads), std::get<2>(heads), std::get<3>(heads)};
}

// All but the weight.
void read_linear(tide::cuda::LinearParams& params, Address x, Address bias, Address norm, Address residual, Address y,
                 int64_t rows, int64_t in_features, int64_t out_features, int64_t x_stride, int64_t y_stride,
                 int64_t residual_stride, double norm_eps, bool gated) {
    params.x = in(x);
    params.bias = in(bias);
    params.norm = in(norm);
    params.residual = in(residual);
    params.y = out(y);
    params.rows = rows;
    params.in_features = in_features;
    params.out_features = out_features;
    params.x_stride = x_stride;
    params.y_stride = y_stride;
    params.residual_stride = residual_stride;
    params.norm_eps = static_cast<float>(norm_eps);
    params.gated = gated;
}

void linear(int dtype, Address x, Address weight, Address bias, Address norm, Address residual, Address y, int64_t rows,
            int64_t in_features, int64_t out_features, int64_t x_stride, int64_t y_stride, int64_t residual_stride,
            double norm_eps, bool gated, Address stream) {
    tide::cuda::LinearParams params = {};
    params.weight = in(weight);
    read_linear(params, x, bias, norm, residual, y, rows, in_features, out_features, x_stride, y_stride,
                residual_stride, norm_eps, gated);
    tide::cuda::linear(dtype_of(dtype), params, stream_of(stream));
}

// Weight, scales, stride of the scales, rows of a block, columns of a block as a shift.
void read_fp8(tide::cuda::Fp8LinearParams& params, Address weight, Address scales, int64_t scale_stride,
              int64_t block_rows, int scale_shift) {
    params.weight = in(weight);
    params.scales = in<float>(scales);
    params.scale_stride = scale_stride;
    params.block_rows = static_cast<uint32_t>(block_rows);
    params.scale_shift = scale_shift;
}

void fp8_linear(Address x, Address weight, Address scales, int64_t scale_stride, int64_t block_rows, int scale_shift,
                bool dealt, Address bias, Address norm, Address residual, Address y, int64_t rows, int64_t in_features,
                int64_t out_features, int64_t x_stride, int64_t y_stride, int64_t residual_stride, double norm_eps,
                bool gated, Address stream) {
    tide::cuda::Fp8LinearParams params = {};
    read_fp8(params, weight, scales, scale_stride, block_rows, scale_shift);
    read_linear(params, x, bias, norm, residual, y, rows, in_features, out_features, x_stride, y_stride,
                residual_stride, norm_eps, gated);
    tide::cuda::fp8_linear(params, dealt, stream_of(stream));
}

void widen_fp8(Address weight, Address scales, int64_t scale_stride, int64_t block_rows, int scale_shift, bool dealt,
               Address y, int64_t out_features, int64_t in_features, Address stream) {
    tide::cuda::Fp8LinearParams params = {};
    read_fp8(params, weight, scales, scale_stride, block_rows, scale_shift);
    params.y = out(y);
    params.in_features = in_features;
    params.out_features = out_features;
    tide::cuda::widen_fp8(params, dealt, stream_of(stream));
}

void paged_attention(int dtype, Address q, Address k_pool, Address v_pool, Address block_tables, Address query_starts,
                     Address context_lens, Address y, Address workspace, int64_t rows, int64_t num_tokens,
                     int64_t max_queries, int64_t max_context, int64_t num_heads, int64_t num_kv_heads,
                     int64_t head_dim, int64_t block_size, int64_t max_blocks, int64_t num_blocks,
                     int64_t q_token_stride, int64_t q_head_stride, double scaling, int64_t window, double softcap,
                     bool queries_are_new, Address stream) {
    tide::cuda::PagedAttentionParams params = {};
    params.queries_are_new = queries_are_new;
    params.q = in(q);
    params.k_pool = in(k_pool);
    params.v_pool = in(v_pool);
    params.block_tables = in<int32_t>(block_tables);
    params.query_starts = in<int32_t>(query_starts);
    params.context_lens = in<int32_t>(context_lens);
    params.out = out(y);
    params.workspace = out(workspace);
    params.rows = rows;
    params.num_tokens = num_tokens;
    params.max_queries = max_queries;
    params.max_context = max_context;
    params.num_heads = num_heads;
    params.num_kv_heads = num_kv_heads;
    params.head_dim = head_dim;
    params.block_size = block_size;
    params.max_blocks = max_blocks;
    params.num_blocks = num_blocks;
    params.q_token_stride = q_token_stride;
    params.q_head_stride = q_head_stride;
    params.scaling = static_cast<float>(scaling);
    params.window = window;
    params.softcap = static_cast<float>(softcap);
    tide::cuda::paged_attention(dtype_of(dtype), params, stream_of(stream));
}

void attend_joined(int dtype, const HeadsTuple& q, const HeadsTuple& k, const HeadsTuple& v, Address q_norm,
                   Address k_norm, Address cos, Address sin, Address positions, Address slots, Address k_pool,
                   Address v_pool, Address block_tables, Address query_starts, Address context_lens, Address y,
                   Address workspace, int64_t rows, int64_t num_tokens, int64_t max_queries, int64_t max_context,
                   int64_t head_dim, int64_t num_positions, int64_t num_blocks, int64_t block_size, int64_t max_blocks,
                   double eps, double scaling, int64_t window, double softcap, Address stream) {
    tide::cuda::RotaryWriteParams rotary = {};
    rotary.q = heads_of(q);
    rotary.k = heads_of(k);
    rotary.v = heads_of(v);
    rotary.q_norm = in(q_norm);
    rotary.k_norm = in(k_norm);
    rotary.cos = in(cos);
    rotary.sin = in(sin);
    rotary.positions = in<int64_t>(positions);
    rotary.slots = in<int64_t>(slots);
    rotary.k_pool = out(k_pool);
    rotary.v_pool = out(v_pool);
    rotary.rows = num_tokens;
    rotary.key_dim = head_dim;
    rotary.value_dim = head_dim;
    rotary.num_positions = num_positions;
    rotary.num_blocks = num_blocks;
    rotary.block_size = block_size;
    rotary.eps = static_cast<float>(eps);
    tide::cuda::PagedAttentionParams params = {};
    params.q = rotary.q.data;
    params.k_pool = in(k_pool);
    params.v_pool = in(v_pool);
    params.block_tables = in<int32_t>(block_tables);
    params.query_starts = in<int32_t>(query_starts);
    params.context_lens = in<int32_t>(context_lens);
    params.out = out(y);
    params.workspace = out(workspace);
    params.rows = rows;
    params.num_tokens = num_tokens;
    params.max_queries = max_queries;
    params.max_context = max_context;
    params.num_heads = rotary.q.heads;
    params.num_kv_heads = rotary.k.heads;
    params.head_dim = head_dim;
    params.block_size = block_size;
    params.max_blocks = max_blocks;
    params.num_blocks = num_blocks;
    params.q_token_stride = rotary.q.token_stride;
    params.q_head_stride = rotary.q.head_stride;
    params.scaling = static_cast<float>(scaling);
    params.window = window;
    params.softcap = static_cast<float>(softcap);
    tide::cuda::attend_joined(dtype_of(dtype), params, rotary, stream_of(stream));
}

void rms_norm(int dtype, Address x, Address weight, Address y, int64_t rows, int64_t width, int64_t x_stride,
              int64_t y_stride, double eps, Address stream) {
    tide::cuda::rms_norm(dtype_of(dtype),
                         {in(x), in(weight), out(y), rows, width, x_stride, y_stride, static_cast<float>(eps)},
                         stream_of(stream));
}

void silu_mul(int dtype, Address gate, Address up, Address y, int64_t rows, int64_t width, int64_t gate_stride,
              int64_t up_stride, int64_t y_stride, Address stream) {
    tide::cuda::silu_mul(dtype_of(dtype), {in(gate), in(up), out(y), rows, width, gate_stride, up_stride, y_stride},
                         stream_of(stream));
}

void rotary_write(int dtype, const HeadsTuple& q, const HeadsTuple& k, const HeadsTuple& v, Address q_norm,
                  Address k_norm, Address cos, Address sin, Address positions, Address slots, Address q_out,
                  Address k_pool, Address v_pool, int64_t rows, int64_t q_out_token_stride, int64_t q_out_head_stride,
                  int64_t key_dim, int64_t value_dim, int64_t num_positions, int64_t num_blocks, int64_t block_size,
                  double eps, Address stream) {
    tide::cuda::RotaryWriteParams params = {};
    params.q = heads_of(q);
    params.k = heads_of(k);
    params.v = heads_of(v);
    params.q_norm = in(q_norm);
    params.k_norm = in(k_norm);
    params.cos = in(cos);
    params.sin = in(sin);
    params.positions = in<int64_t>(positions);
    params.slots = in<int64_t>(slots);
    params.q_out = out(q_out);
    params.k_pool = out(k_pool);
    params.v_pool = out(v_pool);
    params.rows = rows;
    params.q_out_token_stride = q_out_token_stride;
    params.q_out_head_stride = q_out_head_stride;
    params.key_dim = key_dim;
    params.value_dim = value_dim;
    params.num_positions = num_positions;
    params.num_blocks = num_blocks;
    params.block_size = block_size;
    params.eps = static_cast<float>(eps);
    tide::cuda::rotary_write(dtype_of(dtype), params, stream_of(stream));
}

void top2_logsumexp(int dtype, Address x, Address best, Address index, Address second, Address sum, Address partials,
                    Address counters, int64_t rows, int64_t width, int64_t x_stride, Address stream) {
    tide::cuda::top2_logsumexp(dtype_of(dtype),
                               {in(x), out<float>(best), out<int64_t>(index), out<float>(second), out<float>(sum),
                                out(partials), out<uint32_t>(counters), rows, width, x_stride},
                               stream_of(stream));
}

void router(int dtype, Address features, Address best, Address second, Address sum, Address norm, Address down,
            Address down_bias, Address out_weight, Address out_bias, Address scores, Address partials, Address counters,
            int64_t rows, int64_t width, int64_t features_stride, int64_t bottleneck, double eps, Address stream) {
    tide::cuda::RouterParams params = {};
    params.features = in(features);
    params.best = in<float>(best);
    params.second = in<float>(second);
    params.sum = in<float>(sum);
    params.norm = in<float>(norm);
    params.down = in<float>(down);
    params.down_bias = in<float>(down_bias);
    params.out = in<float>(out_weight);
    params.out_bias = in<float>(out_bias);
    params.scores = out<float>(scores);
    params.partials = out<float>(partials);
    params.counters = out<uint32_t>(counters);
    params.rows = rows;
    params.width = width;
    params.features_stride = features_stride;
    params.bottleneck = bottleneck;
    params.eps = static_cast<float>(eps);
    tide::cuda::router(dtype_of(dtype), params, stream_of(stream));
}

template <void (*op)(DType, const tide::cuda::RowsParams&, cudaStream_t)>
void rows_op(int dtype, Address x, Address y, Address index, int64_t rows, int64_t limit, int64_t width,
             int64_t x_stride, int64_t y_stride, Address stream) {
    op(dtype_of(dtype), {in(x), out(y), in<int64_t>(index), rows, limit, width, x_stride, y_stride}, stream_of(stream));
}

void exit_input(int dtype, Address states, Address state_norm, Address deep, Address deep_norm, Address table,
                Address deep_slots, Address distances, Address y, int64_t rows, int64_t width, int64_t deep_width,
                int64_t num_deep, int64_t max_distance, int64_t states_stride, int64_t deep_stride, int64_t y_stride,
                double eps, Address stream) {
    tide::cuda::exit_input(dtype_of(dtype),
                           {in(states), in(state_norm), in(deep), in(deep_norm), in(table), in<int64_t>(deep_slots),
                            in<int64_t>(distances), out(y), rows, width, deep_width, num_deep, max_distance,
                            states_stride, deep_stride, y_stride, static_cast<float>(eps)},
                           stream_of(stream));
}

void plan_cycle(Address row_meta, Address next_state, Address tables, Address wide, Address narrow, int64_t rows,
                int64_t drafts, int64_t blocks, int64_t block_size, int64_t branches, int64_t first_spare,
                Address stream) {
    tide::cuda::plan_cycle({in<int32_t>(row_meta), in<int32_t>(next_state), out<int32_t>(tables), out<int64_t>(wide),
                            out<int32_t>(narrow), rows, drafts, blocks, block_size, branches, first_spare},
                           stream_of(stream));
}

void pending_tokens(Address newest, Address places, Address shortlist, Address sources, Address drafted,
                    Address token_ids, int64_t rows, int64_t drafts, int64_t tokens, Address stream) {
    tide::cuda::pending_tokens({in<int64_t>(newest), in<int64_t>(places), in<int64_t>(shortlist), in<int64_t>(sources),
                                out<int64_t>(drafted), out<int64_t>(token_ids), rows, drafts, tokens},
                               stream_of(stream));
}

void nth_best(int dtype, Address x, Address ranks, Address index, int64_t rows, int64_t width, int64_t x_stride,
              Address stream) {
    tide::cuda::nth_best(dtype_of(dtype), {in(x), in<int32_t>(ranks), out<int64_t>(index), rows, width, x_stride},
                         stream_of(stream));
}

void copy_slots(Address pools, Address from, Address to, Address claims, Address target_ids, Address draft_ids,
                int64_t num_pools, int64_t count, int64_t block_size, int64_t unit, Address stream) {
    tide::cuda::copy_slots({in<tide::cuda::SlotPool>(pools), in<int32_t>(from), in<int32_t>(to), in<int32_t>(claims),
                            in<int64_t>(target_ids), in<int64_t>(draft_ids), num_pools, count, block_size, unit},
                           stream_of(stream));
}

void draw(int dtype, Address logits, Address settings, Address numbers, Address places, Address heads, int64_t rows,
          int64_t width, int64_t logits_stride, int64_t vocabulary, Address stream) {
    tide::cuda::draw(dtype_of(dtype),
                     {in(logits), in<double>(settings), in<double>(numbers), out<int64_t>(places), out<double>(heads),
                      rows, width, logits_stride, vocabulary},
                     stream_of(stream));
}

void verify_drawn(int dtype, Address logits, Address sources, Address num_tokens, Address counts, Address settings,
                  Address plain, Address accept, Address residual, Address scores, Address draft_ids,
                  Address draft_logits, Address draft_heads, Address places, Address best, Address ids, int64_t tokens,
                  int64_t rows, int64_t drafts, int64_t vocabulary, int64_t shortlist, int64_t logits_stride,
                  Address stream) {
    tide::cuda::VerifyDrawnParams params = {};
    params.logits = in(logits);
    params.sources = in<int64_t>(sources);
    params.num_tokens = in<int32_t>(num_tokens);
    params.counts = in<int32_t>(counts);
    params.settings = in<double>(settings);
    params.plain = in<double>(plain);
    params.accept = in<double>(accept);
    params.residual = in<double>(residual);
    params.scores = in<float>(scores);
    params.draft_ids = in<int64_t>(draft_ids);
    params.draft_logits = in(draft_logits);
    params.draft_heads = in<double>(draft_heads);
    params.places = in<int32_t>(places);
    params.best = out<float>(best);
    params.ids = out<int64_t>(ids);
    params.tokens = tokens;
    params.rows = rows;
    params.drafts = drafts;
    params.vocabulary = vocabulary;
    params.shortlist = shortlist;
    params.logits_stride = logits_stride;
    tide::cuda::verify_drawn(dtype_of(dtype), params, stream_of(stream));
}

void accept_drafts(int dtype, Address row_meta, Address counting, Address starts, Address positions, Address drafted,
                   Address scores, Address following, Address logits, Address gaps, Address device_state,
                   Address next_state, int64_t rows, int64_t drafts, int64_t branches, int64_t logits_stride,
                   Address stream) {
    tide::cuda::accept_drafts(
        dtype_of(dtype),
        {in<int32_t>(row_meta), in<int32_t>(counting), in<int32_t>(starts), in<int64_t>(positions),
         in<int64_t>(drafted), in<float>(scores), out<int64_t>(following), in(logits), out<float>(gaps),
         out<int32_t>(device_state), out<int64_t>(next_state), rows, drafts, branches, logits_stride},
        stream_of(stream));
}

void draw_numbers(Address keys, Address starts, Address positions, Address row_meta, Address numbers, int64_t rows,
                  int64_t distances, Address stream) {
    tide::cuda::draw_numbers({in<int64_t>(keys), in<int32_t>(starts), in<int64_t>(positions), in<int32_t>(row_meta),
                              out<double>(numbers), rows, distances},
                             stream_of(stream));
}

void top_logprobs(int dtype, Address logits, Address sources, Address starts, Address row_meta, Address following,
                  Address ids, Address logprobs, Address chosen, int64_t tokens, int64_t rows, int64_t width,
                  int64_t logits_stride, int64_t most, Address stream) {
    tide::cuda::top_logprobs(
        dtype_of(dtype),
        {in(logits), in<int64_t>(sources), in<int32_t>(starts), in<int32_t>(row_meta), in<int64_t>(following),
         out<int64_t>(ids), out<float>(logprobs), out<float>(chosen), tokens, rows, width, logits_stride, most},
        stream_of(stream));
}

void adjust_logits(int dtype, Address logits, Address columns, Address sources, Address starts, Address positions,
                   Address drafted, Address row_meta, Address counts, Address penalties, Address entry_ids,
                   Address entry_values, Address entry_until, Address y, int64_t count, int64_t width,
                   int64_t logits_stride, int64_t rows, int64_t slots, int64_t vocabulary, int64_t entries,
                   Address stream) {
    tide::cuda::AdjustLogitsParams params = {};
    params.logits = in(logits);
    params.columns = in<int64_t>(columns);
    params.sources = in<int64_t>(sources);
    params.starts = in<int32_t>(starts);
    params.positions = in<int64_t>(positions);
    params.drafted = in<int64_t>(drafted);
    params.row_meta = in<int32_t>(row_meta);
    params.counts = in<uint16_t>(counts);
    params.penalties = in<double>(penalties);
    params.entry_ids = in<int32_t>(entry_ids);
    params.entry_values = in<float>(entry_values);
    params.entry_until = in<int32_t>(entry_until);
    params.out = out<float>(y);
    params.count = count;
    params.width = width;
    params.logits_stride = logits_stride;
    params.rows = rows;
    params.slots = slots;
    params.vocabulary = vocabulary;
    params.entries = entries;
    tide::cuda::adjust_logits(dtype_of(dtype), params, stream_of(stream));
}

void count_outputs(Address row_meta, Address starts, Address positions, Address following, Address next_state,
                   Address counts, Address drafted, int64_t rows, int64_t vocabulary, Address stream) {
    tide::cuda::count_outputs(
        {in<int32_t>(row_meta), in<int32_t>(starts), in<int64_t>(positions), in<int64_t>(following),
         in<int64_t>(next_state), out<uint16_t>(counts), in<int64_t>(drafted), rows, vocabulary},
        stream_of(stream));
}

// 0 where there is no driver.
int device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    return 0;
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
    m.doc() = "CUDA kernels on raw addresses; use tide_core.kernels.cuda.ops, which checks what it passes here.";
    const auto no_gil = py::call_guard<ReleasedGil>();
    m.def("linear", &linear, no_gil,
          "y = x weight^T + bias (+ residual), or silu(gate) * up of two such products; x is normed where there is a "
          "norm.");
    m.def("fp8_linear", &fp8_linear, no_gil, "linear() of bfloat16 states and a packed weight in E4M3.");
    m.def("widen_fp8", &widen_fp8, no_gil, "The matrix in bfloat16 that fp8_linear() multiplies with.");
    m.def("reads_fp8", &tide::cuda::reads_fp8, "Whether the current device has a linear that reads E4M3.");
    m.def("fast_for_many_rows", &tide::cuda::fast_for_many_rows,
          "Whether the current device has a linear for many half-width rows.");
    m.def("paged_attention", &paged_attention, no_gil,
          "Causal attention of ragged queries over paged keys and values.");
    m.def(
        "attend_joined", &attend_joined, no_gil,
        "Norm, rotary positions and page writes of a joined projection, and attention of its queries, in one launch.");
    m.def("supports_joined", &tide::cuda::supports_joined,
          "Whether attend_joined runs on the current device with heads and blocks of these sizes.");
    m.def("paged_attention_workspace", &tide::cuda::paged_attention_workspace,
          "Bytes of workspace for calls with at most so many tokens, heads, elements of a head and positions.");
    m.def("rms_norm", &rms_norm, no_gil, "Hugging Face LlamaRMSNorm over rows.");
    m.def("silu_mul", &silu_mul, no_gil, "y = silu(gate) * up over rows.");
    m.def("rotary_write", &rotary_write, no_gil, "Norm and rotary positions of q and k; k and v go to their pages.");
    m.def("top2_logsumexp", &top2_logsumexp, no_gil,
          "Largest number of each row, its index, the second, and the sum of exp(x - best).");
    m.def("top2_logsumexp_partials", &tide::cuda::top2_logsumexp_partials,
          "Bytes of partials that top2_logsumexp needs.");
    m.def("router", &router, no_gil, "Scores of a router.");
    m.def("embed", &rows_op<&tide::cuda::embed>, no_gil, "y[i] = x[index[i]]");
    m.def("scatter_rows", &rows_op<&tide::cuda::scatter_rows>, no_gil, "y[index[i]] = x[i]");
    m.def("plan_cycle", &plan_cycle, no_gil, "The indices of every pass of a cycle, from the metadata of its rows.");
    m.def("pending_tokens", &pending_tokens, no_gil, "The token ids of the drafts of a cycle and of its deep pass.");
    m.def("nth_best", &nth_best, no_gil, "The index of the number of a given rank in each row.");
    m.def("copy_slots", &copy_slots, no_gil, "Copies slots of all pools to other slots.");
    m.def("exit_input", &exit_input, no_gil,
          "Normed states next to normed deep states, plus the row of their distance.");
    m.def("draw", &draw, no_gil, "A place in each row of logits, drawn by its settings.");
    m.def("verify_drawn", &verify_drawn, no_gil, "Which drafts of a cycle are accepted, and what replaces the others.");
    m.def("accept_drafts", &accept_drafts, no_gil, "The token that follows the accepted drafts of each row.");
    m.def("top_logprobs", &top_logprobs, no_gil, "The likeliest tokens of rows, with log-probabilities.");
    m.def("draw_numbers", &draw_numbers, no_gil, "The random numbers of every row in a cycle.");
    m.def("adjust_logits", &adjust_logits, no_gil, "Logits with the bias, masks and penalties of their rows.");
    m.def("count_outputs", &count_outputs, no_gil, "Counts the output tokens of a cycle, for penalties.");
    m.def("device_count", &device_count, "CUDA devices that the driver shows; 0 without a driver.");
    m.def(
        "loaded_architecture", [] { return tide::cuda::current_device("loaded_architecture").arch; },
        "Ten times the compute capability that the code was compiled for which the current device runs; throws where "
        "there is none.");
    m.def(
        "architectures", [] { return TIDE_CUDA_ARCHS; },
        "Compute capabilities the kernels were built for, separated by commas; the last also as PTX.");
}
