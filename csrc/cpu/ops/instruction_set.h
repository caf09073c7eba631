#pragma once

#include <string>
#include <vector>

#include "cpu/kernels/table.h"

namespace tide {

// The kernels of the best instruction set this machine has, or of the one that was set.
const KernelTable& kernels();

// Chooses them, which the first op would do otherwise: a child that is forked during that would wait for ever.
void choose_kernels();

// Those this machine can run, the best one last.
std::vector<std::string> instruction_sets();

// One of them by name, for tests and measurements; while no op runs.
void set_instruction_set(const std::string& name);

// Whether this processor has bfloat16 tiles and the system lets this process use them. Asks the system for it.
bool amx_granted();

}  // namespace tide
