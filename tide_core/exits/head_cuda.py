"""An exit head in few launches, on a GPU: what `ExitHead` does in some thirty small ops.

The same steps over the same weights, with linears that read one input joined: the head's input (states and the deep
state before them, both normed, and their distance) in one launch, then linears fused with the ops before and after
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tide_core.batch import Rotation
from tide_core.exits.artefact.heads import ExitHead, HeadMLP
from tide_core.kernels import CudaKernels
from tide_core.kv.kernel_view import KernelView
from tide_core.models.stacked import stacked


class FusedHead:
    """A head that is cast, placed and prepared."""

    def __init__(self, head: ExitHead, kernels: CudaKernels) -> None:
        self._head, self._kernels, self._eps = head, kernels, head.spec.norm_eps
        spec = head.spec
        self._order: dict[int, torch.Tensor] = {}
        """0, 1, 2 ... by how many."""
        if spec.hidden:
            self._gate_up = _joined(head.mlp)
        if spec.attends:
            block = head.block
            self._qkv = stacked(block.q_proj, block.k_proj, block.v_proj)
            self._keys_values = self._qkv[block.q_proj.out_features :]
            self._block_gate_up = _joined(block.mlp)

    def gather_buffer(self, states: torch.Tensor) -> torch.Tensor | None:
        """For what `deep_state` reads of tokens with such states [T, D]: final-norm states and those at the taps next
        to each other, [T, (1 + taps) * D]. None where there are no taps."""
        num, width = states.shape
        num_taps = len(self._head.spec.taps)
        return states.new_empty(num, (1 + num_taps) * width) if num_taps else None

    def gather(self, tapped: Sequence[torch.Tensor], gathered: torch.Tensor) -> None:
        """Put states at the taps, [T, D] each, to their places, normed."""
        width = tapped[0].shape[1]
        for norm, states, to in zip(
            self._head.tap_norms, tapped, torch.split(gathered[:, width:], width, 1), strict=True
        ):
            self._kernels.norm_into(states, norm.weight, self._eps, out=to)

    def deep_state(self, last: torch.Tensor, gathered: torch.Tensor | None) -> torch.Tensor:
        """`ExitHead.deep_state` of final-norm states [T, D] and what was gathered. They may be in their place already;
        if not they are put there by a launch of our own, which begins before the one in front of it has ended."""
        if not self._head.spec.fuses:
            return last
        kernels, fuse, (num, width) = self._kernels, self._head.fuse, last.shape
        if gathered is None:
            return kernels.linear(last, fuse.weight, fuse.bias)
        if last.data_ptr() != gathered.data_ptr():
            if num not in self._order:  # the first run is not captured
                self._order[num] = torch.arange(num, device=last.device)
            kernels.embed(self._order[num], last, out=gathered[:, :width])
        return kernels.linear(gathered, fuse.weight, fuse.bias)

    def embed(
        self,
        states: torch.Tensor,
        deep_states: torch.Tensor,
        deep_slots: torch.Tensor | None,
        distances: torch.Tensor | None,
    ) -> torch.Tensor:
        """`ExitHead.embed` of states [T, D], with the deep states that lie in these slots of their pool."""
        head, kernels = self._head, self._kernels
        if head.spec.kind == "identity":
            return states
        norm = head.state_norm.weight
        if not head.spec.deep:
            inputs = kernels.rms_norm(states, norm, self._eps)
        else:
            assert deep_slots is not None, "this head is fed with the last deep state"
            assert distances is not None, "and with how far back that is"
            deep = deep_states, deep_slots, head.deep_norm.weight
            inputs = kernels.exit_input(states, norm, *deep, distances, head.distance.weight, self._eps)
        mixed = kernels.linear(inputs, head.mix.weight, head.mix.bias)
        if not head.spec.hidden:
            return mixed
        gated = kernels.fused_linear(inputs, self._gate_up, gated=True)
        return kernels.fused_linear(gated, head.mlp.down_proj.weight, residual=mixed)

    def refine(self, view: KernelView, kv_layer: int, embedded: torch.Tensor) -> torch.Tensor:
        """`ExitHead.refine`; K and V of the block go to the pools of `kv_layer`."""
        head, kernels = self._head, self._kernels
        if not head.spec.attends:
            return embedded
        block = head.block
        qkv = kernels.fused_linear(embedded, self._qkv, norm=(block.attention_norm.weight, self._eps))
        scaling = head.spec.head_size**-0.5
        attended = view.attend_joined(kv_layer, qkv, self._rotation(view), (None, None), self._eps, scaling, 0)
        states = kernels.fused_linear(attended.flatten(1), block.o_proj.weight, residual=embedded)
        norm = block.mlp_norm.weight, self._eps
        gated = kernels.fused_linear(states, self._block_gate_up, gated=True, norm=norm)
        return kernels.fused_linear(gated, block.mlp.down_proj.weight, residual=states)

    def widen(self, refined: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """`ExitHead.widen` of what `refine` gave and states [T, D]."""
        head, kernels = self._head, self._kernels
        if not head.spec.narrow:
            return refined
        skipped = kernels.rms_norm(states, head.skip_norm.weight, self._eps)
        return kernels.fused_linear(refined, head.up.weight, residual=skipped)

    def write(self, view: KernelView, kv_layer: int, embedded: torch.Tensor, slots: torch.Tensor) -> None:
        """K and V of the block for what `embed` gave, and nothing else of it."""
        norm = self._head.block.attention_norm.weight, self._eps
        keys_values = self._kernels.fused_linear(embedded, self._keys_values, norm=norm)
        view.write_joined(kv_layer, keys_values, self._rotation(view), slots)

    def _rotation(self, view: KernelView) -> Rotation:
        return Rotation(*self._head.rotary_table, view.positions)


def _joined(mlp: HeadMLP) -> torch.Tensor:
    return stacked(mlp.gate_proj, mlp.up_proj)
