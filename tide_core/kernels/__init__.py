"""The ops the engine runs, in three versions: plain Torch (`reference/`), native CPU code (`cpu/`) and CUDA (`cuda/`).

`ops.py` declares them, `select.py` chooses a version for a device.
"""

from __future__ import annotations

from tide_core.kernels import elsewhere

__path__ = elsewhere.folders(__name__, __path__)

from tide_core.kernels.ops import CudaKernels, Kernels
from tide_core.kernels.select import (
    cuda_unsupported_reason,
    native_digest,
    native_unsupported_reason,
    reference_kernels,
    select_kernels,
    set_num_threads,
)

__all__ = [
    "CudaKernels",
    "Kernels",
    "cuda_unsupported_reason",
    "native_digest",
    "native_unsupported_reason",
    "reference_kernels",
    "select_kernels",
    "set_num_threads",
]
