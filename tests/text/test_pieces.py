"""Spellings in one block: what a list of texts would answer."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fastllm.text.pieces import Pieces

TEXTS = ["a", "ab", "", "▁the", "b", "\ud800", "naïve", "日本語", "ab", "\0", "", "aab"]


def test_pieces_are_those_of_the_list():
    pieces = Pieces(TEXTS)
    assert list(pieces) == TEXTS
    assert len(pieces) == len(TEXTS)
    assert (pieces[-1], pieces[2:5]) == (TEXTS[-1], TEXTS[2:5])
    with pytest.raises(IndexError):
        pieces[len(TEXTS)]


def test_a_block_is_taken_over_as_it_is():
    class Block(list):
        def utf8(self):
            return b"ab\xc3\xa9", np.array([0, 1, 1, 4], np.int64).tobytes()

    pieces = Pieces(Block())
    assert (list(pieces), pieces[2], len(pieces)) == (["a", "", "bé"], "bé", 3)
    assert Pieces(pieces).block is pieces.block


def test_the_number_of_a_text_is_that_of_the_last_piece_that_is_it():
    pieces, numbers = Pieces(TEXTS), {text: i for i, text in enumerate(TEXTS)}
    assert {text: pieces.number(text) for text in TEXTS} == numbers
    assert [pieces.number(text) for text in ("ba", "A", "aba", "日", "▁")] == [None] * 5  # also where two pieces side by side spell it


def test_random_vocabularies_are_found_again():
    draw = random.Random(3)
    texts = ["".join(draw.choices("abé", k=draw.randrange(5))) for _ in range(300)]
    numbers = {text: i for i, text in enumerate(texts)}
    pieces = Pieces(texts)
    for text in [*numbers, "ccc", "abababa"]:
        assert pieces.number(text) == numbers.get(text)


def test_an_empty_vocabulary_has_nothing():
    pieces = Pieces([])
    assert (len(pieces), list(pieces), pieces.number("a"), pieces.number("")) == (0, [], None, None)
