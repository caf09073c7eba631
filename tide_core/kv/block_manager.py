"""Which KV block belongs to whom. Plain Python values only: no tensor is touched here.

A row owns a list of blocks (its *block table*) and has a *valid length*: how many of its tokens have their K and V in
every layer. Inside a step a row also writes slots past it; only `advance` makes them valid, and a slot that is not
valid may hold anything.

A block is in exactly one of three states: *free* (content meaningless), *cached* (no owner, content kept under its
prefix key until the space is needed), or *owned* by one or more rows. Only whole blocks of valid tokens are shared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tide_core.errors import EngineError

BlockKey = bytes


@dataclass(slots=True)
class BlockTable:
    """The blocks of one row, in token order, and its valid length."""

    length: int = 0
    block_ids: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    """Prefix keys of the leading blocks that are sealed: whole, valid, and findable."""

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens


class BlockManager:
    """One pool of blocks, counted."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))  # used as a stack: memory is touched as late as possible
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._owners = [0] * num_blocks
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_capacity(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether the row's own blocks hold `num_tokens` tokens in all: there is nothing to allocate."""
        return num_tokens <= len(table.block_ids) * self.block_size

    def can_allocate(self, table: BlockTable, num_tokens: int, *, reserve: int = 0) -> bool:
        """Whether the row could hold `num_tokens` tokens in all, with `reserve` blocks to spare. Changes nothing."""
        return self.blocks_for(num_tokens) - len(table.block_ids) + reserve <= self.num_available

    def allocate(self, table: BlockTable, num_tokens: int) -> None:
        """Give the row blocks for `num_tokens` tokens in all; `can_allocate` must hold."""
        while len(table.block_ids) < self.blocks_for(num_tokens):
            block = self._take()
            self._owners[block] = 1
            table.block_ids.append(block)

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Free the blocks after those that `num_tokens` tokens need; nothing in them is valid."""
        spare = table.block_ids[self.blocks_for(num_tokens) :]
        assert table.length <= num_tokens, "a valid token would lose its block"
        del table.block_ids[self.blocks_for(num_tokens) :]
        for block in spare:
            self._owners[block] -= 1
            assert self._owners[block] == 0, "a spare block belongs to one row alone"
            self._free.append(block)

    def match_prefix(self, token_ids: Sequence[int], namespace: bytes) -> BlockTable:
        """A table that already owns the cached blocks this token sequence begins with.

        At least one token is left to run, because its logits are wanted."""
        table = BlockTable()
        if not self.prefix_caching:
            return table
        key = namespace
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            key = _block_key(key, token_ids[start : start + self.block_size])
            block = self._block_of.get(key)
            if block is None:
                break
            if self._owners[block] == 0:
                del self._cached[block]
            self._owners[block] += 1
            table.block_ids.append(block)
            table.keys.append(key)
        table.length = len(table.block_ids) * self.block_size
        return table

    def seal(
        self, table: BlockTable, tokens: Callable[[int, int], Sequence[int]], namespace: bytes, *, most_tokens: int
    ) -> None:
        """Make the row's whole, valid blocks findable, of its first `most_tokens` tokens.

        `tokens(start, stop)` gives the row's token ids."""
        if not self.prefix_caching:
            return
        num_whole = min(table.length, most_tokens) // self.block_size
        while len(table.keys) < num_whole:
            index = len(table.keys)
            start = index * self.block_size
            parent = table.keys[-1] if table.keys else namespace
            key = _block_key(parent, tokens(start, start + self.block_size))
            table.keys.append(key)
            block = table.block_ids[index]
            if key not in self._block_of:  # a twin computed at the same time stays private
                self._block_of[key] = block
                self._key_of[block] = key

    def free(self, table: BlockTable) -> None:
        """Take all blocks from the row and empty its table. Last blocks first: a prefix outlives what follows it."""
        for block in reversed(table.block_ids):
            self._owners[block] -= 1
            assert self._owners[block] >= 0, f"block {block} freed twice"
            if self._owners[block]:
                continue
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)
        table.block_ids, table.keys, table.length = [], [], 0

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Recount the pool against the tables that own it; a mismatch is a bug of ours and ends the engine."""
        counted = [0] * self.num_blocks
        for table in tables:
            for block in table.block_ids:
                counted[block] += 1
            _require(table.length <= len(table.block_ids) * self.block_size, "a valid length past its blocks")
        owned = {block for block, count in enumerate(counted) if count}
        free, cached = set(self._free), set(self._cached)
        _require(counted == self._owners, "owners of blocks do not match the tables")
        _require(len(free) == len(self._free), "a block is free twice")
        _require(free.isdisjoint(cached | owned) and cached.isdisjoint(owned), "a block is in two states")
        _require(len(free) + len(cached) + len(owned) == self.num_blocks, "a block is lost")
        _require(cached <= set(self._key_of), "a cached block has no key")
        _require({key: block for block, key in self._key_of.items()} == self._block_of, "prefix keys do not match")

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise EngineError(f"KV pool: {otherwise}")


def _block_key(parent: bytes, token_ids: Sequence[int]) -> BlockKey:
    """Digest of a block's tokens and of everything before them (and of model, policy and salt: the first parent)."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()
