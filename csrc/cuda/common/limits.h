// Limits of the architectures, as NVIDIA documents them. Architectures are `__CUDA_ARCH__` / 10: 9.0 is 90.
#pragma once

#include <cstdint>

namespace tide::cuda {

constexpr int kTensorCoreArch = 80;  // products of bfloat16, asynchronous copies
constexpr int kClusterArch = 90;     // clusters, the copy engine, programmatic dependent launch

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarpgroupThreads = 128;  // four warps that multiply together, sm_90a
constexpr int kWarpgroupRows = 64;      // of their left operand

// Bytes of shared memory.
constexpr int64_t kSharedWithoutOptIn = 48 * 1024;  // that every kernel may have
constexpr int kSharedOfCta90 = 227 * 1024;  // that one CTA can have on 9.0; 163 KiB on 8.0, 99 on 8.6, 8.9, 12.0
constexpr int kSharedOfCta75 = 64 * 1024;

// A multiprocessor of sm_90a has 64 Ki registers, dealt out to warpgroups. With one CTA of three warpgroups, the two
// that multiply take what the producers give up.
constexpr int kLinearConsumerRegisters = 232, kLinearProducerRegisters = 40;
constexpr int kThreeConsumerRegisters = 160, kThreeProducerRegisters = 32;  // the same where three multiply
constexpr int kAttentionConsumerRegisters = 224, kAttentionProducerRegisters = 56;
static_assert(2 * kLinearConsumerRegisters + kLinearProducerRegisters <= 512);  // of each thread of three warpgroups
static_assert(3 * kThreeConsumerRegisters + kThreeProducerRegisters <= 512);
static_assert(2 * kAttentionConsumerRegisters + kAttentionProducerRegisters <= 512);

}  // namespace tide::cuda
