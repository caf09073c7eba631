#pragma once

#include "cuda/common/launch.h"
