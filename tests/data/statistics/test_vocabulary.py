"""Vocabularies number tokens by how often they occur, in an order that nothing else decides."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.core.errors import DataError, SpecError
from instep.data import Vocabulary

TEXTS = ["the cat sat", "the dog sat", "a cat ran"]


def test_frequent_tokens_first_ties_by_their_characters() -> None:
    vocabulary = Vocabulary(specials=("<pad>", "<unk>")).fit(TEXTS)
    assert vocabulary.tokens_ == ["<pad>", "<unk>", "cat", "sat", "the", "a", "dog", "ran"]
    assert vocabulary.counts_["cat"] == 2
    assert vocabulary.encode("the bird sat") == [4, 1, 3]
    assert vocabulary.decode([4, 2]) == ["the", "cat"]
    assert len(vocabulary) == 8
    assert "dog" in vocabulary


def test_limits() -> None:
    assert Vocabulary(min_count=2).fit(TEXTS).tokens_ == ["<unk>", "cat", "sat", "the"]
    assert Vocabulary(max_size=3).fit(TEXTS).tokens_ == ["<unk>", "cat", "sat"]
    assert Vocabulary().fit([{"text": text} for text in TEXTS], column="text").tokens_[1] == "cat"
    assert Vocabulary(specials=()).fit([[5, 3], [5]]).tokens_ == [5, 3]


@given(st.lists(st.text("abc ", max_size=9), min_size=1, max_size=12), st.randoms())
def test_grouping_and_order_do_not_matter(texts: list[str], random: Any) -> None:
    whole = Vocabulary(min_count=2).fit(texts)
    shuffled = random.sample(texts, len(texts))
    parts = Vocabulary(min_count=2)
    while shuffled:
        parts.partial_fit([shuffled.pop() for _ in range(min(len(shuffled), random.randint(1, 4)))])
    assert parts.state_dict() == whole.state_dict()
    again = Vocabulary()
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert again.tokens_ == whole.tokens_
    assert again.get_params() == whole.get_params()


def test_what_is_refused() -> None:
    with pytest.raises(DataError, match="not fitted"):
        Vocabulary().encode("a")
    with pytest.raises(DataError, match="neither 'bird' nor \"<unk>\""):
        Vocabulary(specials=()).fit(TEXTS).encode("the bird")
    with pytest.raises(DataError, match="99 is no number of this vocabulary, which has 7 tokens"):
        Vocabulary().fit(TEXTS).decode([99])
    with pytest.raises(DataError, match="is one text"):
        Vocabulary().fit("the cat")
    with pytest.raises(DataError, match="A token is a float"):
        Vocabulary().fit([[1.5]])
    with pytest.raises(DataError, match="A sample is a int"):
        Vocabulary().fit([7])
    with pytest.raises(DataError, match="no samples"):
        Vocabulary().fit([])
    with pytest.raises(SpecError, match="min_count=0"):
        Vocabulary(min_count=0)
    with pytest.raises(SpecError, match="max_size=1 leaves no room"):
        Vocabulary(max_size=1)
