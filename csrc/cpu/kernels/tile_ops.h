// The instructions of the tile unit (AMX). Tests put a software model in this file's place.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/vec.h"

namespace tide::TIDE_ISA {

// GCC does not know that a tile load reads memory; what it reads must have been written by then.
TIDE_INLINE void finish_writes(const void* memory) {
    asm volatile("" ::"r"(memory) : "memory");
}

}  // namespace tide::TIDE_ISA
