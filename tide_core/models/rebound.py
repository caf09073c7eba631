"""A class of the library whose forward uses other functions under the names it knows them by.

The copy belongs to the modules that are given the new class; the library's class and module stay as they are.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn


def rebound(kind: type[nn.Module], **names: Any) -> type[nn.Module]:
    """A subclass of `kind`, of the same name, with these global names in its forward."""
    forward: Any = kind.forward
    namespace = {**forward.__globals__, **names}
    copy = types.FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": copy})
