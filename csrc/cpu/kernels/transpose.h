#pragma once

#include "cpu/kernels/vec.h"

namespace tide::TIDE_ISA {

typedef uint32_t Words16 __attribute__((vector_size(64)));

// Rows and columns of 16 x 16 words change places. A round interleaves row i with row i + 8: it rotates the eight bits
// of a word's place (row, column) by one, so four rounds swap row and column.
TIDE_INLINE void transpose(Words16 (&rows)[16]) {
#pragma GCC unroll 4
    for (int round = 0; round < 4; ++round) {
        Words16 next[16];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const Words16 a = rows[i], b = rows[i + 8];
            next[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            next[2 * i + 1] =
                __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) rows[i] = next[i];
    }
}

}  // namespace tide::TIDE_ISA
