"""The block manager: exact reference counts, prefix cache, eviction and copy-on-write, by example and by random sequences of calls.

The stateful test keeps a model of its own: what every block holds, as text. A block that is found, copied, shared or given away
wrongly shows as a sequence that reads other tokens than its own.
"""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from fastllm.core.errors import UsageError
from fastllm.core.kv_cache import BlockManager, SequenceBlocks

SIZE = 4


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def filled(manager: BlockManager, tokens: np.ndarray, salt: str = "") -> SequenceBlocks:
    """A sequence all of whose tokens are computed."""
    sequence, found = manager.open(tokens, salt)
    assert manager.reserve(sequence, found, len(tokens)) == []
    manager.commit(sequence, tokens, len(tokens))
    return sequence


def counts(manager: BlockManager) -> tuple[int, int, int]:
    return manager.num_free, manager.num_used, manager.num_cached


def test_blocks_that_nobody_had_are_told_in_the_order_in_which_they_are_given_out():
    manager = BlockManager(6, SIZE)
    first = filled(manager, ids(1, 2, 3, 4, 5))
    assert first.ids == [0, 1]
    assert [manager.next_unwritten(2) for _ in range(3)] == [2, 3, None], "two are ready"
    second = filled(manager, ids(*range(20, 29)))
    assert second.ids == [2, 3, 4], "the last of them was not told, but has been written to"
    manager.close(second)
    assert manager.next_unwritten(1) is None, "its last block is free, and was written to"
    assert [manager.next_unwritten(6) for _ in range(2)] == [5, None], "there are no more"


def test_only_full_blocks_are_found_again_and_never_the_last_token():
    manager = BlockManager(8, SIZE)
    manager.close(filled(manager, np.arange(10, dtype=np.int32)))
    assert counts(manager) == (6, 0, 2)  # 8 tokens in two full blocks; the third held two tokens and is free
    assert manager.open(np.arange(10, dtype=np.int32))[1] == 8
    assert manager.open(np.arange(8, dtype=np.int32))[1] == 4, "the block of the last token must be computed for its logits"
    assert manager.open(np.arange(9, dtype=np.int32))[1] == 8


def test_the_same_tokens_after_other_tokens_are_another_block():
    manager = BlockManager(8, SIZE)
    manager.close(filled(manager, ids(1, 1, 1, 1, 5, 6, 7, 8, 0)))
    assert manager.find(ids(2, 2, 2, 2, 5, 6, 7, 8, 0)) == []
    assert manager.find(ids(5, 6, 7, 8, 0)) == []
    assert len(manager.find(ids(1, 1, 1, 1, 5, 6, 7, 9, 0))) == 1


def test_sequences_share_only_under_the_same_salt():
    manager = BlockManager(8, SIZE)
    manager.close(filled(manager, np.arange(9, dtype=np.int32), "tenant a"))
    assert manager.find(np.arange(9, dtype=np.int32), "tenant b") == []
    assert manager.find(np.arange(9, dtype=np.int32)) == []
    assert len(manager.find(np.arange(9, dtype=np.int32), "tenant a")) == 2


def test_without_prefix_cache_nothing_is_kept():
    manager = BlockManager(8, SIZE, prefix_cache=False)
    manager.close(filled(manager, np.arange(9, dtype=np.int32)))
    assert counts(manager) == (8, 0, 0)
    assert manager.open(np.arange(9, dtype=np.int32))[1] == 0


def test_a_sequence_may_refuse_to_read_the_cache():
    manager = BlockManager(8, SIZE)
    manager.close(filled(manager, np.arange(9, dtype=np.int32)))
    sequence, found = manager.open(np.arange(9, dtype=np.int32), read_cache=False)
    assert (sequence.ids, found, manager.looked_up_tokens) == ([], 0, 9)


def test_the_least_recently_used_block_goes_first_and_the_end_of_a_text_before_its_start():
    manager = BlockManager(4, SIZE)
    first, second = np.arange(9, dtype=np.int32), np.arange(100, 105, dtype=np.int32)
    manager.close(filled(manager, first))  # two cached
    manager.close(filled(manager, second))  # one cached
    taken = SequenceBlocks("")
    assert manager.reserve(taken, 0, 2 * SIZE) == []  # one free, one evicted
    assert len(manager.find(first)) == 1, "the second block of the older text is the one that went"
    assert len(manager.find(second)) == 1
    assert manager.open(first)[1] == SIZE  # now the first text is the younger
    assert manager.reserve(taken, 2 * SIZE, 3 * SIZE) == []
    assert manager.find(second) == []


def test_a_block_number_that_is_given_away_continues_no_chain():
    """A second block is found under its first; when another text moves into the first one's memory, the second must not follow."""
    manager = BlockManager(4, SIZE)
    manager.close(filled(manager, ids(1, 1, 1, 1, 9, 9, 9, 9, 0)))
    bad, found = manager.open(ids(1, 1, 1, 1, 0))
    assert found == SIZE
    first = bad.ids[0]
    manager.forget(bad)
    manager.close(bad)
    other = filled(manager, ids(2, 2, 2, 2, 0))
    assert other.ids[0] == first
    assert len(manager.find(ids(2, 2, 2, 2, 9, 9, 9, 9, 0))) == 1


def test_a_sequence_that_goes_back_writes_copies_and_makes_them_findable():
    manager = BlockManager(8, SIZE)
    sequence = filled(manager, np.arange(9, dtype=np.int32))
    first, second, third = sequence.ids
    assert manager.reserve(sequence, 6, 9) == [(second, sequence.ids[1])]
    assert (sequence.ids[0], sequence.ids[2]) == (first, third)
    other = np.array([0, 1, 2, 3, 4, 5, 60, 70, 80], np.int32)
    manager.commit(sequence, other, 9)
    assert manager.find(other) == sequence.ids[:2]
    assert manager.find(np.arange(9, dtype=np.int32)) == [first, second]


def test_without_room_nothing_changes():
    manager = BlockManager(2, SIZE)
    sequence = filled(manager, ids(1, 2, 3))
    before = (list(sequence.ids), counts(manager))
    assert manager.reserve(sequence, 3, 9) is None
    assert (sequence.ids, counts(manager)) == before


def test_forks_share_blocks_and_the_last_owner_writes_without_a_copy():
    manager = BlockManager(8, SIZE)
    parent = filled(manager, np.arange(6, dtype=np.int32))
    child = manager.fork(parent, 5)
    assert child.ids == parent.ids
    assert manager.num_used == 2
    (source, target), *rest = manager.reserve(child, 5, 6) or []
    assert (source, rest) == (parent.ids[1], [])
    assert child.ids == [parent.ids[0], target]
    assert manager.reserve(parent, 6, 7) == [], "the only owner left writes in place"
    manager.close(parent)
    manager.close(child)
    assert counts(manager) == (7, 0, 1)


def test_a_findable_block_is_copied_even_for_its_only_owner():
    manager = BlockManager(8, SIZE)
    sequence = filled(manager, np.arange(8, dtype=np.int32))
    child = manager.fork(sequence, 7)
    manager.close(sequence)
    copies = manager.reserve(child, 7, 8)
    assert copies is not None
    assert len(copies) == 1
    assert len(manager.find(np.arange(9, dtype=np.int32))) == 2
    manager.commit(child, np.arange(8, dtype=np.int32), 8)
    assert counts(manager) == (6, 2, 0), "the copy has become a twin of the known block and is given back"


def test_two_that_compute_the_same_text_end_up_with_one_copy():
    manager = BlockManager(8, SIZE)
    tokens = np.arange(9, dtype=np.int32)
    one, _ = manager.open(tokens)
    two, _ = manager.open(tokens)
    for sequence in (one, two):
        manager.reserve(sequence, 0, 9)
    assert manager.num_used == 6
    manager.commit(one, tokens, 9)
    manager.commit(two, tokens, 9)
    assert manager.num_used == 4
    assert one.ids[:2] == two.ids[:2]
    assert one.ids[2] != two.ids[2]


def test_forgotten_blocks_are_found_no_more_and_continue_nothing():
    manager = BlockManager(8, SIZE)
    tokens = np.arange(13, dtype=np.int32)
    bad = filled(manager, tokens)
    sharer = manager.fork(bad, 12)
    manager.forget(bad)
    manager.close(bad)
    assert manager.find(tokens) == []
    manager.reserve(sharer, 12, 17)
    manager.commit(sharer, np.arange(17, dtype=np.int32), 17)
    assert manager.find(np.arange(17, dtype=np.int32)) == []
    manager.close(sharer)
    assert counts(manager) == (8, 0, 0)


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0), (-1, 4)])
def test_an_impossible_cache_is_refused(blocks: int, size: int):
    with pytest.raises(UsageError, match="at least 1"):
        BlockManager(blocks, size)


def test_a_gap_before_a_reservation_is_refused():
    manager = BlockManager(4, SIZE)
    with pytest.raises(UsageError, match="position 8"):
        manager.reserve(SequenceBlocks(""), 8, 9)


class Text:
    """A sequence of the model: its tokens, how many are computed, its blocks."""

    def __init__(self, tokens: list[int], salt: str, blocks: SequenceBlocks, computed: int):
        self.tokens, self.salt, self.blocks, self.computed = tokens, salt, blocks, computed


class Blocks(RuleBasedStateMachine):
    """Random opens, writes, forks, closes and forgets against a memory that stores (salt, whole prefix) in every slot."""

    texts = Bundle("texts")

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(7, SIZE)
        self.memory: list[tuple | None] = [None] * (7 * SIZE)
        self.open: list[Text] = []

    def check(self, text: Text) -> None:
        """Every computed position of the sequence must hold exactly this sequence's prefix."""
        for p in range(text.computed):
            slot = text.blocks.ids[p // SIZE] * SIZE + p % SIZE
            assert self.memory[slot] == (text.salt, *text.tokens[: p + 1])

    @rule(target=texts, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from(["", "x"]), read=st.booleans())
    def start(self, tokens, salt, read):
        blocks, found = self.manager.open(np.array(tokens, np.int32), salt, read_cache=read)
        assert found % SIZE == 0
        assert found < len(tokens)
        text = Text(tokens, salt, blocks, found)
        self.open.append(text)
        self.check(text)
        return text

    @rule(text=texts, count=st.integers(1, 6), token=st.integers(0, 1), lost=st.booleans())
    def compute(self, text, count, token, lost):
        if text not in self.open:
            return
        while len(text.tokens) < text.computed + count:
            text.tokens.append(token)
        stop = text.computed + count
        before = counts(self.manager)
        copies = self.manager.reserve(text.blocks, text.computed, stop)
        if copies is None:
            assert counts(self.manager) == before
            return
        for source, target in copies:
            self.memory[target * SIZE : (target + 1) * SIZE] = self.memory[source * SIZE : (source + 1) * SIZE]
        for p in range(text.computed, stop):
            block = text.blocks.ids[p // SIZE]
            assert sum(block in other.blocks.ids for other in self.open) == 1, "a block in two owners' write range"
            self.memory[block * SIZE + p % SIZE] = (text.salt, *text.tokens[: p + 1])
        if lost:  # the step failed: nothing is committed, and the same positions are computed again later
            return
        text.computed = stop
        self.manager.commit(text.blocks, np.array(text.tokens, np.int32), stop)

    @rule(target=texts, text=texts, back=st.integers(0, 3))
    def fork(self, text, back):
        if text not in self.open or text.computed == 0:
            return multiple()
        computed = max(text.computed - back, 0)
        child = Text(list(text.tokens), text.salt, self.manager.fork(text.blocks, computed), computed)
        self.open.append(child)
        return child

    @rule(text=consumes(texts), forget=st.booleans())
    def close(self, text, forget):
        if text not in self.open:
            return
        if forget:
            self.manager.forget(text.blocks)
        self.manager.close(text.blocks)
        self.open.remove(text)

    @invariant()
    def every_block_is_in_one_place_and_counted_exactly(self):
        manager = self.manager
        owners = [sum(text.blocks.ids.count(b) for text in self.open) for b in range(manager.num_blocks)]
        assert manager._refs == owners
        free, cached = set(manager._free), set(manager._cached)
        used = {b for b, n in enumerate(owners) if n}
        assert len(free) == len(manager._free)
        assert not free & cached
        assert not free & used
        assert not cached & used
        assert len(free) + len(cached) + len(used) == manager.num_blocks
        assert counts(manager) == (len(free), len(used), len(cached))
        assert {manager._blocks[k] for k in manager._blocks} == {b for b in range(manager.num_blocks) if manager._keys[b] is not None}
        assert cached <= {b for b in range(manager.num_blocks) if manager._nodes[b]}

    @invariant()
    def every_sequence_reads_its_own_text(self):
        for text in self.open:
            self.check(text)


Blocks.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase
