#include "cpu/ops/instruction_set.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(TIDE_HAS_ARM_KERNELS)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tide {
namespace {

std::vector<const KernelTable*> usable_tables() {
    std::vector<const KernelTable*> tables = {&baseline::kernel_table()};
#if defined(TIDE_HAS_X86_KERNELS)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    // Every processor with AVX2 or AVX-512 has the float16 conversions (F16C) too.
    if (has_avx2) tables.push_back(&avx2::kernel_table());
    const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
    if (has_avx512) tables.push_back(&avx512::kernel_table());
    if (has_vnni) tables.push_back(&vnni::kernel_table());
#if defined(TIDE_HAS_AMX_KERNELS)
    if (has_vnni && amx_granted()) tables.push_back(&amx::kernel_table());
#endif
#elif defined(TIDE_HAS_ARM_KERNELS)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) tables.push_back(&dotprod::kernel_table());
#endif
    return tables;
}

const std::vector<const KernelTable*>& tables() {
    static const std::vector<const KernelTable*> found = usable_tables();
    return found;
}

const KernelTable* named(const std::string& name, const char* setting) {
    std::string names;
    for (const KernelTable* table : tables()) {
        if (name == table->name) return table;
        names += (names.empty() ? "" : ", ") + std::string(table->name);
    }
    throw std::invalid_argument(std::string(setting) + ": got " + name + ", expected one of " + names);
}

const KernelTable* taken_at_start() {
    constexpr const char* kSetting = "TIDE_INSTRUCTION_SET";
    const char* wanted = std::getenv(kSetting);
    return wanted ? named(wanted, kSetting) : tables().back();
}

std::atomic<const KernelTable*>& chosen() {
    static std::atomic<const KernelTable*> table{taken_at_start()};  // asked in every op: looked up once
    return table;
}

}  // namespace

void choose_kernels() {
    try {
        chosen();
    } catch (const std::invalid_argument&) {
        // A setting that nobody can follow is an error of the first op.
    }
}

const KernelTable& kernels() {
    return *chosen().load(std::memory_order_relaxed);
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const KernelTable* table : tables()) names.emplace_back(table->name);
    return names;
}

void set_instruction_set(const std::string& name) {
    chosen().store(named(name, "instruction set"));
}

}  // namespace tide
