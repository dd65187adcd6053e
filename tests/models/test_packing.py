import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsuite.models.packing import PADDING, pack


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(2, 16))
def test_every_document_stands_whole_and_once_in_the_rows(lengths, length):
    documents = [np.arange(n) + 100 * i for i, n in enumerate(lengths)]
    pieces = [d[at : at + length] for d in documents for at in range(0, len(d), length)]
    expected = sorted(tuple(piece.tolist()) for piece in pieces if len(piece) > 1)
    if not expected:
        with pytest.raises(ValueError, match="no document of two tokens or more"):
            pack(documents, length)
        return
    packed = pack(documents, length)
    assert packed.tokens.shape == packed.segment_ids.shape == (len(packed.tokens), length)
    found = []
    for row, ids in zip(packed.tokens, packed.segment_ids, strict=True):
        assert (np.diff(ids[ids != PADDING]) >= 0).all()
        assert (ids[np.argmax(ids == PADDING) :] == PADDING).all() or PADDING not in ids
        found += [tuple(row[ids == i].tolist()) for i in set(ids.tolist()) - {PADDING}]
    assert sorted(found) == expected


@pytest.mark.parametrize(
    "document", [[1.7, 2.9], np.array([2**32 + 1, 5]), [-1, 5], [True, False], "ab", [[1, 2]]], ids=repr
)
def test_a_document_that_is_no_row_of_tokens_is_refused_by_its_number(document):
    with pytest.raises(ValueError, match=r"document 1 is .*; expected tokens, integers from 0 to 2147483647"):
        pack([[1, 2], document], 4)


@pytest.mark.parametrize("length", [1, 8.0])
def test_a_row_of_one_token_is_refused(length):
    with pytest.raises(ValueError, match=f"length={length} leaves nothing to predict"):
        pack([[1, 2]], length)
