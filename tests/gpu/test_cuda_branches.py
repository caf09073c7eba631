"""What branches of a draft need, by the kernels against plain Torch: both move or choose, so the very same results."""

from __future__ import annotations

import pytest
import torch

from tide_core.kernels.cuda import branches as cuda_branches
from tide_core.kernels.reference import branches as branching

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (4, 7), (4, 8192), (3, 49152), (300, 100), (0, 5)])
def test_the_nth_best_is_found_and_of_equals_the_first(rows: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows + width)
    logits = torch.randn(rows, width, generator=generator).mul(4).round().to(dtype)  # many equals
    ranks = (torch.arange(rows) % min(4, width)).int()
    if rows > 2 and width > 3:
        logits[0, 3], logits[1, 2], logits[2, 0] = float("nan"), float("-inf"), float("nan")
    found = cuda_branches.nth_best(logits.cuda(), ranks.cuda())
    assert torch.equal(found.cpu(), branching.nth_best(logits, ranks))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 5, 64])
def test_slots_are_copied_in_every_pool_and_nothing_else_is_touched(size: int, dtype: torch.dtype) -> None:
    shapes = [(9, 3, 16, size), (9, 1, 16, size), (144, 2 * size), (144, 0)]
    pools = [torch.randn(shape).to(dtype) for shape in shapes]
    source = torch.tensor([3, -1, 17, 40, 5], dtype=torch.int32)
    target = torch.tensor([100, 101, 143, -1, 99], dtype=torch.int32)
    on_device = [pool.cuda() for pool in pools]
    places = torch.tensor([[0, 0, 1, 1, 2], [0, 0, 0, 0, 1]], dtype=torch.int32)
    claims = branching.Claims(places, torch.tensor([7, 8, 2**40]), torch.tensor([7, 2**40]))
    for claimed in (claims, None):  # the first and the last pair, then the third as well
        there = None if claimed is None else branching.Claims(*(part.cuda() for part in claimed))
        cuda_branches.slot_copier(on_device, 16)(source.cuda(), target.cuda(), there)
        before = [pool.clone() for pool in pools]
        branching.slot_copier(pools, 16)(source, target, claimed)
        assert any(not torch.equal(pool, old) for pool, old in zip(pools, before, strict=True))
        for pool, other in zip(pools, on_device, strict=True):
            assert torch.equal(pool, other.cpu())


def test_slots_of_another_dtype_are_refused_by_name() -> None:
    copy = cuda_branches.slot_copier([torch.zeros(2, 1, 16, 8, device="cuda")], 16)
    slots = torch.zeros(2, dtype=torch.int32, device="cuda")
    with pytest.raises(TypeError, match=r"target: got torch\.int64"):
        copy(slots, slots.long())
