"""The paged key/value cache as book-keeping: which sequence owns which block, and which blocks can be found again.

Memory is `num_blocks` blocks of `block_size` tokens in every layer; this file never touches it, it only hands out numbers.
A block is in exactly one of three places, so that **free + used + cached = num_blocks**:

    free    nobody's, contents are rubbish
    used    one or more sequences hold a reference
    cached  full, no references, kept because its contents can be found again; the least recently used is evicted first

The prefix cache is a hash chain over token ids: a full block is known under (node of the block before it, its token ids), and
the first one under (salt, ids). The keys are compared and not only hashed, so two texts never share a block by accident, and
a node number is never used twice, so a chain cannot be continued from a block that has meanwhile been given away.

A model with recurrent state (a gated delta net) needs more than blocks to go on after a prefix: the state after its last token. So
for such a model a prefix is found only where a **snapshot** of that state was kept with its last block. There are `num_snapshots`
places for them; the one that was used least recently makes room, and one whose block is given away is gone with it. An answer that grows holds
one place: its next snapshot takes the place of the one before, unless a prompt was found there meanwhile. So a long answer drives no prompt out.

A block is written only by a sequence that is its single owner and only while it is not findable; `reserve` copies it
otherwise (copy-on-write). The scheduler, in the engine's thread, is the only caller.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from .errors import UsageError

__all__ = ["BlockManager", "SequenceBlocks"]


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks of one sequence in order of position. num_known: how many of them, from the front, are findable; num_kept: after so many its answer's
    latest snapshot was kept."""

    salt: str
    ids: list[int] = field(default_factory=list)
    num_known: int = 0
    num_kept: int = 0


class BlockManager:
    """Hands out cache blocks: references, prefix cache, eviction and copy-on-write.

    num_blocks, block_size (tokens): of the executor's cache. prefix_cache: False never finds a block again. num_snapshots: of a model
    with recurrent state, how many snapshots it may keep (0: prefixes are not found); None for other models.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True, num_snapshots: int | None = None):
        if num_blocks < 1 or block_size < 1:
            raise UsageError(f"a cache of {num_blocks} blocks of {block_size} tokens; both must be at least 1")
        self.num_blocks, self.block_size, self.prefix_cache = num_blocks, block_size, prefix_cache and num_snapshots != 0
        self.recurrent = num_snapshots is not None  # blocks alone are not enough to go on after a prefix
        self.keeps_snapshots = self.prefix_cache and self.recurrent
        self.hit_tokens = 0  # tokens of prompts found in the cache, since the start
        self.looked_up_tokens = 0  # tokens of prompts looked up
        self._refs = [0] * num_blocks
        self._written = 0  # blocks from here on nobody has had yet: they are all free, and given out last and in this order
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._blocks: dict[tuple[int | str, bytes], int] = {}  # key of a findable block -> block
        self._keys: list[tuple[int | str, bytes] | None] = [None] * num_blocks  # block -> its key
        self._nodes = [0] * num_blocks  # block -> number of its link in the chain, 0: not findable
        self._last_node = 0
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # findable block -> snapshot of the state after it; least recently used first
        self._free_snapshots = list(range((num_snapshots or 0) - 1, -1, -1))  # a stack
        self._passing: set[int] = set()  # blocks whose snapshots are of answers, and have not been found

    # counts ---------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without an owner whose contents can still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `reserve` can still give: free ones, and cached ones after eviction."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens fill."""
        return -(-num_tokens // self.block_size)

    def next_unwritten(self, ahead: int) -> int | None:
        """A block that nobody has written to since the start, to be given out soon: its memory may be asked of the system before a step waits for it. None where
        `ahead` free blocks have been written to, or were told here."""
        if self._written == self.num_blocks or len(self._free) - (self.num_blocks - self._written) >= ahead:
            return None
        self._written += 1
        return self._written - 1

    # a sequence's life ------------------------------------------------------------------------------------------------

    def find(self, token_ids: np.ndarray, salt: str = "") -> list[int]:
        """The cached blocks that hold the longest known prefix of token_ids (i32 [n]), without taking them.

        At most the blocks before the last token's: that token is always computed again, because cached blocks hold no logits.
        """
        found: list[int] = []
        if not self.prefix_cache:
            return found
        link: int | str = salt
        size = self.block_size
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            block = self._blocks.get((link, token_ids[start : start + size].tobytes()))
            if block is None:
                break
            found.append(block)
            link = self._nodes[block]
        if self.keeps_snapshots:
            while found and found[-1] not in self._snapshots:
                found.pop()
        return found

    def open(self, token_ids: np.ndarray, salt: str = "", *, read_cache: bool = True) -> tuple[SequenceBlocks, int]:
        """A new sequence that holds the cached blocks of its longest known prefix, and how many tokens those are.

        token_ids: i32 [n]; salt: sequences share blocks only with others of the same salt; read_cache: False starts empty.
        """
        if not read_cache or not self.prefix_cache:
            return SequenceBlocks(salt), 0
        found = self.find(token_ids, salt)
        for block in found:
            self._take(block)
        self.looked_up_tokens += len(token_ids)
        self.hit_tokens += len(found) * self.block_size
        return SequenceBlocks(salt, found, len(found)), len(found) * self.block_size

    def num_unowned(self, blocks: list[int]) -> int:
        """How many of these are cached without an owner (taking them makes fewer available)."""
        return sum(1 for block in blocks if self._refs[block] == 0)

    def reserve(self, sequence: SequenceBlocks, start: int, stop: int) -> list[tuple[int, int]] | None:
        """Makes positions start … stop−1 writable for this sequence: appends blocks, and replaces those it must not write.

        Returns the copies (from block, to block) that must be made, in this order, before the write; None, with nothing
        changed, where too few blocks are available.
        """
        ids, refs, nodes = sequence.ids, self._refs, self._nodes
        first, end = start // self.block_size, self.blocks_for(stop)
        if first > len(ids):
            raise UsageError(f"position {start} is reserved, but the sequence holds only {len(ids)} blocks")
        shared = [i for i in range(first, min(end, len(ids))) if refs[ids[i]] > 1 or nodes[ids[i]]]
        missing = max(end - len(ids), 0)
        if len(shared) + missing > self.num_available:
            return None
        copies: list[tuple[int, int]] = []
        for index in shared:
            source, target = ids[index], self._new()
            ids[index] = target
            self._release(source)
            copies.append((source, target))
        for _ in range(missing):
            ids.append(self._new())
        sequence.num_known = min(sequence.num_known, first)
        return copies

    def commit(self, sequence: SequenceBlocks, token_ids: np.ndarray, num_tokens: int) -> None:
        """Makes full blocks findable once their num_tokens first tokens are computed. token_ids: i32 [≥ num_tokens].

        A block whose contents are known already is given back and the known one is used instead: equal tokens have equal
        keys and values, bit for bit, so memory is not spent twice.
        """
        if not self.prefix_cache:
            return
        size, ids = self.block_size, sequence.ids
        for index in range(sequence.num_known, num_tokens // size):
            link: int | str = self._nodes[ids[index - 1]] if index else sequence.salt
            if link == 0:
                return  # the chain was cut by `forget`
            key = (link, token_ids[index * size : (index + 1) * size].tobytes())
            known, block = self._blocks.get(key), ids[index]
            if known is None:
                self._last_node += 1
                self._blocks[key], self._keys[block], self._nodes[block] = block, key, self._last_node
            elif known != block:
                self._take(known)
                ids[index] = known
                self._release(block)
            sequence.num_known = index + 1

    def snapshot(self, sequence: SequenceBlocks) -> int:
        """The snapshot that belongs to the end of a sequence's blocks as `open` found them; it is used most recently now."""
        block = sequence.ids[-1]
        self._snapshots.move_to_end(block)
        self._passing.discard(block)
        return self._snapshots[block]

    def keep_snapshot(self, sequence: SequenceBlocks, num_tokens: int, *, decodes: bool = False) -> int | None:
        """Where the state after num_tokens tokens is to be kept; None where it is kept already, or could not be found again: the tokens
        are no whole blocks, or not known ones. decodes: they end within the sequence's answer."""
        index, rest = divmod(num_tokens, self.block_size)
        if rest or not 0 < index <= sequence.num_known:
            return None
        block = sequence.ids[index - 1]
        if self._nodes[block] == 0:
            return None
        before = sequence.ids[sequence.num_kept - 1] if decodes and sequence.num_kept else -1
        sequence.num_kept = index if decodes else 0
        if block in self._snapshots:
            self._snapshots.move_to_end(block)
            if not decodes:
                self._passing.discard(block)
            return None
        if before in self._passing:
            self._drop_snapshot(before)
        elif not self._free_snapshots:
            self._drop_snapshot(next(iter(self._snapshots)))
        if decodes:
            self._passing.add(block)
        self._snapshots[block] = self._free_snapshots.pop()
        return self._snapshots[block]

    def fork(self, sequence: SequenceBlocks, num_tokens: int) -> SequenceBlocks:
        """Another sequence that shares the blocks of the first num_tokens tokens."""
        ids = sequence.ids[: self.blocks_for(num_tokens)]
        for block in ids:
            self._take(block)
        return SequenceBlocks(sequence.salt, ids, min(sequence.num_known, num_tokens // self.block_size))

    def close(self, sequence: SequenceBlocks) -> None:
        """Drops the sequence's references; its findable blocks stay cached, the end of the text the first to be evicted."""
        for block in reversed(sequence.ids):
            self._release(block)
        sequence.ids, sequence.num_known = [], 0

    def forget(self, sequence: SequenceBlocks) -> None:
        """Makes the sequence's blocks unfindable: their contents are not to be trusted (non-finite logits came of them)."""
        for block in sequence.ids:
            self._hide(block)

    # blocks -----------------------------------------------------------------------------------------------------------

    def _new(self) -> int:
        """A block with one reference; evicts the least recently used cached block if none is free."""
        if self._free:
            block = self._free.pop()
            self._written = max(self._written, block + 1)
        else:
            block, _ = self._cached.popitem(last=False)
            self._hide(block)
        self._refs[block] = 1
        return block

    def _take(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def _release(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if self._nodes[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _hide(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._blocks[key]
            self._keys[block], self._nodes[block] = None, 0
            if block in self._snapshots:
                self._drop_snapshot(block)

    def _drop_snapshot(self, block: int) -> None:
        self._free_snapshots.append(self._snapshots.pop(block))
        self._passing.discard(block)
