#include "cuda/bench/fp8/thin_variants.cuh"

namespace tide::cuda::bench {

template void add_thin<32>(Variants<Fp8LinearParams>&);

}  // namespace tide::cuda::bench
