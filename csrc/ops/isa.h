#pragma once

#include "kernels/table.h"

namespace tide {

// The kernels of the best instruction set this machine has; chosen once.
const KernelTable& kernels();

}  // namespace tide
