"""How an op is registered with Torch: once for a GPU, once for the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch.library import custom_op

Run = Callable[..., Any]


def returning(name: str, arguments: str, on_cuda: Run, on_cpu: Run, fake: Run, results: str = "Tensor") -> None:
    """An op that returns what it finds; `fake` makes tensors of the same shapes."""
    _register(name, f"({arguments}) -> {results}", on_cuda, on_cpu).register_fake(fake)


def writing(name: str, arguments: str, on_cuda: Run, on_cpu: Run) -> None:
    """An op that returns nothing, whatever its kernels do."""

    def quietly(run: Run) -> Run:
        def quiet(*given: Any) -> None:
            run(*given)

        return quiet

    _register(name, f"({arguments}) -> ()", quietly(on_cuda), quietly(on_cpu))


def _register(name: str, schema: str, on_cuda: Run, on_cpu: Run) -> Any:
    written = re.findall(r"!\)(?:\[\])? (\w+)", schema)
    op = custom_op(f"tide::{name}", on_cuda, mutates_args=written, device_types="cuda", schema=schema)
    op.register_kernel("cpu")(on_cpu)
    return op
