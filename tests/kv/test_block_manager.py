from __future__ import annotations

import pytest

from tests.factories import make_blocks, watch_released
from tide_core.errors import EngineError
from tide_core.kv.block_manager import BlockManager, BlockTable

pytestmark = pytest.mark.unit

SPACE = b"model|full|"


def fill(blocks: BlockManager, tokens: list[int], namespace: bytes = SPACE) -> BlockTable:
    """A row that has run all of `tokens`."""
    table = blocks.match_prefix(tokens, namespace)
    blocks.allocate(table, len(tokens))
    table.advance(len(tokens) - table.length)
    blocks.seal(table, lambda start, stop: tokens[start:stop], namespace, most_tokens=len(tokens))
    return table


def test_allocation_takes_only_the_blocks_tokens_need() -> None:
    blocks = make_blocks(8, block_size=4)
    table = BlockTable()
    blocks.allocate(table, 5)
    assert len(table.block_ids) == 2
    blocks.allocate(table, 8)
    assert len(table.block_ids) == 2
    assert blocks.num_owned == 2


def test_a_row_has_capacity_up_to_the_end_of_its_blocks_and_no_further() -> None:
    blocks = make_blocks(8, block_size=4)
    table = BlockTable()
    assert blocks.has_capacity(table, 0)
    assert not blocks.has_capacity(table, 1)
    blocks.allocate(table, 5)
    assert blocks.has_capacity(table, 8)
    assert not blocks.has_capacity(table, 9)


def test_rows_never_share_a_block_without_a_common_prefix() -> None:
    blocks = make_blocks(8)
    tables = [fill(blocks, [i, i, i, i, i]) for i in range(3)]
    owned = [block for table in tables for block in table.block_ids]
    assert len(owned) == len(set(owned))
    blocks.check_integrity(tables)


def test_can_allocate_changes_nothing_and_tells_the_truth() -> None:
    blocks = make_blocks(2, block_size=4)
    table = BlockTable()
    assert blocks.can_allocate(table, 8)
    assert not blocks.can_allocate(table, 9)
    assert not blocks.can_allocate(table, 8, reserve=1)
    assert blocks.num_available == 2


def test_freed_blocks_all_come_back() -> None:
    blocks = make_blocks(8)
    tables = [fill(blocks, list(range(i, i + 9))) for i in (0, 100)]
    for table in tables:
        blocks.free(table)
    assert blocks.num_available == 8
    assert blocks.num_owned == 0
    blocks.check_integrity([])


def test_a_later_request_finds_the_whole_blocks_of_an_equal_prefix() -> None:
    blocks = make_blocks(8, block_size=4)
    first = fill(blocks, list(range(10)))
    second = blocks.match_prefix([*range(8), 77, 78], SPACE)
    assert second.block_ids == first.block_ids[:2]
    assert second.length == 8
    blocks.check_integrity([first, second])


def test_at_least_one_token_is_left_to_run_after_a_full_match() -> None:
    blocks = make_blocks(8, block_size=4)
    fill(blocks, list(range(8)))
    assert blocks.match_prefix(list(range(8)), SPACE).length == 4


@pytest.mark.parametrize("namespace", [b"other model", b"model|full|salt", b""])
def test_no_block_is_shared_across_model_policy_or_salt(namespace: bytes) -> None:
    blocks = make_blocks(8, block_size=4)
    fill(blocks, list(range(9)))
    assert blocks.match_prefix(list(range(9)), namespace).block_ids == []


def test_a_block_is_found_only_behind_the_same_beginning() -> None:
    blocks = make_blocks(8, block_size=4)
    fill(blocks, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert blocks.match_prefix([9, 9, 9, 9, 2, 2, 2, 2, 3], SPACE).block_ids == []


def test_cached_blocks_are_given_up_oldest_first_when_space_is_needed() -> None:
    blocks = make_blocks(4, block_size=4)
    for start in (0, 100):
        blocks.free(fill(blocks, list(range(start, start + 8))))
    assert len(blocks._cached) == 4
    table = BlockTable()
    blocks.allocate(table, 8)
    assert blocks.match_prefix(list(range(9)), SPACE).length == 0
    again = blocks.match_prefix([*range(100, 108), 5], SPACE)
    assert again.length == 8
    blocks.check_integrity([table, again])


def test_a_prefix_outlives_what_follows_it() -> None:
    blocks = make_blocks(3, block_size=4)
    blocks.free(fill(blocks, list(range(12))))
    blocks.allocate(BlockTable(), 4)
    assert blocks.match_prefix(list(range(12)), SPACE).length == 8


def test_released_blocks_are_announced_exactly_when_their_content_dies() -> None:
    released: list[int] = []
    blocks = make_blocks(2, block_size=4)
    watch_released(blocks, released.extend)
    table = fill(blocks, [1, 2, 3, 4, 5])
    whole, partial = table.block_ids
    blocks.free(table)
    assert released == [partial]
    blocks.allocate(BlockTable(), 8)
    assert released == [partial, whole]


def test_with_prefix_caching_off_nothing_is_kept() -> None:
    blocks = make_blocks(4, prefix_caching=False)
    blocks.free(fill(blocks, list(range(9))))
    assert len(blocks._cached) == 0
    assert blocks.match_prefix(list(range(9)), SPACE).length == 0


def test_blocks_with_pending_tokens_are_not_sealed() -> None:
    blocks = make_blocks(4, block_size=4)
    table = BlockTable()
    blocks.allocate(table, 8)
    table.advance(7)
    blocks.seal(table, lambda start, stop: list(range(8))[start:stop], SPACE, most_tokens=8)
    assert blocks.match_prefix(list(range(9)), SPACE).length == 4


@pytest.mark.parametrize("damage", ["lost", "twice", "owner", "key"])
def test_the_recount_sees_a_damaged_pool(damage: str) -> None:
    blocks = make_blocks(4)
    table = fill(blocks, list(range(6)))
    if damage == "lost":
        blocks._free.pop()
    elif damage == "twice":
        blocks._free.append(blocks._free[-1])
    elif damage == "owner":
        blocks._owners[table.block_ids[0]] += 1
    else:
        blocks._block_of.clear()
    with pytest.raises(EngineError, match="KV pool"):
        blocks.check_integrity([table])
