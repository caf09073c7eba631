// VNNI is the AVX-512 kernels with the products of quantised weights in one instruction each.
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/table.h"

namespace tide::vnni {

const KernelTable& kernel_table() {
    static const KernelTable table = [] {
        KernelTable with_products = avx512::kernel_table();
        with_products.name = "vnni";
        with_products.quantise_rows = quantise_rows;
        with_products.quantised_linear = quantised_linear;
        return with_products;
    }();
    return table;
}

}  // namespace tide::vnni
