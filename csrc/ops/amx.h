#pragma once

namespace tide {

// Whether this processor has bfloat16 tiles and the system lets this process use them. Asks the system for it.
bool amx_granted();

}  // namespace tide
