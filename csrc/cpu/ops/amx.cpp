#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/ops/instruction_set.h"

namespace tide {
namespace {

constexpr unsigned kTilesInEdx = 1u << 22 | 1u << 24;  // of leaf 7: amx-bf16, amx-tile
constexpr unsigned kSystemSavesState = 1u << 27;       // of leaf 1, ecx: osxsave
constexpr unsigned kTileState = 1u << 17 | 1u << 18;   // of the states that the system saves: configuration, data
constexpr int kArchRequestStatePermission = 0x1023;    // ARCH_REQ_XCOMP_PERM of <asm/prctl.h>, from Linux 5.16 on
constexpr int kTileData = 18;

bool processor_has_tiles() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kTilesInEdx) == kTilesInEdx;
}

bool system_saves_tiles() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & kSystemSavesState)) return false;
    asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    return (eax & kTileState) == kTileState;
}

}  // namespace

// The permission is the whole process's, threads that run already and forked children included. Linux refuses it where
// a thread's alternative signal stack is too small for tiles.
bool amx_granted() {
    return processor_has_tiles() && system_saves_tiles() &&
           syscall(SYS_arch_prctl, kArchRequestStatePermission, kTileData) == 0;
}

}  // namespace tide
