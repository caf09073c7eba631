// AMX is the kernels of VNNI with the bfloat16 linear in tiles.
#include "cpu/kernels/linear_tiles.h"
#include "cpu/kernels/table.h"

namespace tide::amx {

const KernelTable& kernel_table() {
    static const TileLinear tiles = {tile_packed_words, tile_pack_units, tile_pack, tile_scratch_floats, tile_linear};
    static const KernelTable table = [] {
        KernelTable with_tiles = vnni::kernel_table();
        with_tiles.name = "amx";
        with_tiles.tile_linear = &tiles;
        return with_tiles;
    }();
    return table;
}

}  // namespace tide::amx
