// Prints tables of the host side, one line each.
//   plan ROWS DRAFTS BRANCH_SIZE   where each part of a cycle's plan begins, and how long its buffers are
//   tiles ARCH SHARED NORMED FP8   the tiles of the linear for few rows that are built, then those that are chosen
//   thin                           the same of linear_thin
//   wide                           the same of the linear for many rows in half width
//   half IN OUT GATED              what a linear in half width runs in on an H200, for 1 to 1024 rows
//   ways IN OUT GATED              what a linear of E4M3 weights runs in on an H200, for 1 to 256 rows
//   fp8 COLUMNS                    of a stage of E4M3 weights: bytes of a tile and copies; row, vector and place of
//                                  what each lane copies first; the places that each lane names, a line for 32 columns
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "cuda/cycle/plan_layout.h"
#include "cuda/linear/choice.h"
#include "cuda/linear/fp8_stage.h"

using namespace tide::cuda;

static std::string name_of(const LinearTile& tile) {
    return std::to_string(tile.row_tiles) + "x" + std::to_string(tile.token_tiles) + "/" +
           std::to_string(tile.cluster) + (tile.staged ? "s" : "") + (tile.deep ? "d" : "");
}

static void print_plan(int rows, int drafts, int branch_size) {
    std::vector<int64_t> wide(1 << 16);
    std::vector<int32_t> narrow(1 << 16);
    const CyclePlan plan(wide.data(), narrow.data(), rows, drafts, branch_size);
    for (const int64_t* part :
         {plan.newest, plan.draft_deep_slots, plan.draft_positions, plan.draft_slots, plan.draft_distances,
          plan.positions, plan.slots, plan.sources, plan.kept_slots, plan.deep_slots, plan.distances, plan.wide_end})
        std::printf("%ld ", static_cast<long>(part - wide.data()));
    for (const int32_t* part : {plan.draft_starts, plan.draft_lens, plan.starts, plan.lens, plan.counting, plan.copies,
                                plan.returns, plan.narrow_end})
        std::printf("%ld ", static_cast<long>(part - narrow.data()));
}

static DeviceInfo device_of(int arch, int shared_bytes) {
    DeviceInfo device = {};
    device.arch = arch;
    device.num_sms = 132;
    device.shared_bytes = shared_bytes;
    return device;
}

static DeviceInfo h200() {
    DeviceInfo device = device_of(90, kSharedOfCta90);
    device.sm90a = true;
    return device;
}

// Linears of every size.
template <typename Use>
static void for_every_linear(const Use& use) {
    for (int64_t k = 64; k <= 32768; k = k * 5 / 4 / 8 * 8) {
        for (int64_t n = 16; n <= 200000; n = n * 5 / 4) {
            for (const int64_t rows : {1, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 1000}) {
                Fp8LinearParams p = {};
                p.rows = rows;
                p.in_features = k;
                p.out_features = n;
                p.scale_shift = kWholeRows;
                for (const bool gated : {false, true}) {
                    p.gated = gated;
                    use(p);
                }
            }
        }
    }
}

static void print_tiles(const DeviceInfo& device, bool normed, bool fp8) {
    for (const LinearTile& tile : kLinearTiles) {
        if (has_kernel(tile, normed, fp8)) std::printf("%s ", name_of(tile).c_str());
    }
    std::puts("");
    std::set<std::string> chosen;
    for_every_linear([&](Fp8LinearParams& p) {
        p.norm = normed ? &p : nullptr;
        chosen.insert(name_of(fp8 ? choose_fp8_tile(p, device) : choose_tile(p, device)));
    });
    for (const std::string& tile : chosen) std::printf("%s ", tile.c_str());
}

static std::string name_of(const ThinTile& tile) {
    return std::to_string(tile.row_groups) + "x" + std::to_string(tile.slice_groups) + "/" +
           std::to_string(tile.cluster) + "x" + std::to_string(tile.tokens);
}

static void print_thin() {
    const DeviceInfo device = h200();
    for (const ThinTile& tile : kThinTiles) std::printf("%s ", name_of(tile).c_str());
    std::puts("");
    std::set<std::string> chosen;
    for_every_linear([&](const Fp8LinearParams& p) {
        if (choose_fp8_kernel(p, device) == Fp8Kernel::kThin) chosen.insert(name_of(choose_thin_tile(p, device)));
    });
    for (const std::string& tile : chosen) std::printf("%s ", tile.c_str());
}

// Groups of four warps x rows of x / CTAs that split the slices, p: persistent.
static std::string name_of(const WideTile& tile) {
    return std::to_string(tile.warpgroups) + "x" + std::to_string(tile.tokens) + "/" + std::to_string(tile.split) +
           (tile.persistent ? "p" : "");
}

static void print_wide() {
    const DeviceInfo device = h200();
    for (const bool fp8 : {false, true}) {
        for (const WideTile& tile : kWideLinearTiles) {
            if (has_wide_kernel(tile, fp8)) std::printf("%s ", name_of(tile).c_str());
        }
        std::puts("");
        std::set<std::string> chosen;
        for_every_linear([&](const Fp8LinearParams& p) {
            if (fp8 && choose_fp8_kernel(p, device) == Fp8Kernel::kWide)
                chosen.insert(name_of(choose_wide_tile(p, device)));
            if (!fp8 && is_wide(p, device)) chosen.insert(name_of(choose_half_wide_tile(p, device)));
        });
        for (const std::string& tile : chosen) std::printf("%s ", tile.c_str());
        std::puts("");
    }
}

static void print_half(int64_t in_features, int64_t out_features, bool gated) {
    LinearParams p = {};
    p.in_features = in_features;
    p.out_features = out_features;
    p.gated = gated;
    const DeviceInfo device = h200();
    for (p.rows = 1; p.rows <= 1024; ++p.rows) {
        if (is_wide(p, device)) {
            std::printf("wide %s\n", name_of(choose_half_wide_tile(p, device)).c_str());
        } else {
            std::printf("tiles %s\n", name_of(choose_tile(p, device)).c_str());
        }
    }
}

static void print_ways(int64_t in_features, int64_t out_features, bool gated) {
    Fp8LinearParams p = {};
    p.in_features = in_features;
    p.out_features = out_features;
    p.gated = gated;
    p.scale_shift = kWholeRows;
    const DeviceInfo device = h200();
    for (p.rows = 1; p.rows <= 256; ++p.rows) {
        switch (choose_fp8_kernel(p, device)) {
            case Fp8Kernel::kThin:
                std::printf("thin %s\n", name_of(choose_thin_tile(p, device)).c_str());
                break;
            case Fp8Kernel::kWide:
                std::printf("wide x%d\n", choose_wide_tile(p, device).tokens);
                break;
            default:
                std::printf("tiles %s\n", name_of(choose_fp8_tile(p, device)).c_str());
        }
    }
}

template <int kColumns>
static void print_fp8() {
    using Stage = Fp8Stage<kColumns>;
    std::printf("%d %d\n", Stage::kTileBytes, Stage::kCopies);
    for (int lane = 0; lane < 32; ++lane) {
        const int row = Stage::copied_row(lane), vector = Stage::copied_vector(lane);
        std::printf("%d %d %d ", row, vector, Stage::offset(row, vector));
    }
    for (int pair = 0; pair < Stage::kPairs; ++pair) {
        std::puts("");
        for (int lane = 0; lane < 32; ++lane) std::printf("%d ", Stage::named(lane, pair));
    }
}

int main(int, char** words) {
    const auto number = [&](int at) { return std::atoi(words[at]); };
    if (std::strcmp(words[1], "plan") == 0) print_plan(number(2), number(3), number(4));
    if (std::strcmp(words[1], "tiles") == 0)
        print_tiles(device_of(number(2), number(3)), number(4) != 0, number(5) != 0);
    if (std::strcmp(words[1], "ways") == 0) print_ways(number(2), number(3), number(4) != 0);
    if (std::strcmp(words[1], "half") == 0) print_half(number(2), number(3), number(4) != 0);
    if (std::strcmp(words[1], "wide") == 0) print_wide();
    if (std::strcmp(words[1], "thin") == 0) print_thin();
    if (std::strcmp(words[1], "fp8") == 0) number(2) == 64 ? print_fp8<64>() : print_fp8<32>();
}
namespace tide::cuda {
const void* portable_probe() {
    return nullptr;
}
const void* sm90a_probe() {
    return nullptr;
}
}  // namespace tide::cuda
