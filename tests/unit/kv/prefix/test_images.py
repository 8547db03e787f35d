"""Words of images in the token ids that prefixes are hashed from."""

from array import array
from struct import unpack
from typing import NamedTuple

import numpy as np
import pytest

from headrace_common.errors import InternalError
from headrace_kv.prefix.hashing import PrefixHasher
from headrace_kv.prefix.images import (
    content_hash,
    hashed_token_ids,
    placeholder_words,
    whole_images_end,
)


class Span(NamedTuple):
    content_hash: bytes
    start_token: int
    token_count: int


CAT = content_hash(b"a cat")
DOG = content_hash(b"a dog")


def test_words_are_numbers_of_the_content_hash_and_no_token_ids() -> None:
    numbers = unpack("<4I", CAT)
    words = [(numbers[index % 4] ^ index) | 1 << 31 for index in range(9)]
    assert placeholder_words(CAT, 0, 9).tolist() == words
    assert placeholder_words(CAT, 3, 5).tolist() == words[3:8]


def test_only_placeholders_are_replaced() -> None:
    tokens = [1, 2, 9, 9, 9, 3, 9, 9, 4]
    words = hashed_token_ids(tokens, [Span(CAT, 2, 3), Span(DOG, 6, 2)])
    assert words == array(
        "I", [1, 2, *placeholder_words(CAT, 0, 3), 3, *placeholder_words(DOG, 0, 2), 4]
    )
    for buffer in (array("I", tokens), array("I", tokens).tobytes(), np.array(tokens, np.uint32)):
        assert hashed_token_ids(buffer, [Span(CAT, 2, 3), Span(DOG, 6, 2)]) == words
    assert tokens == [1, 2, 9, 9, 9, 3, 9, 9, 4]


def test_hashes_differ_between_images_and_are_equal_before_them() -> None:
    hasher = PrefixHasher(root=7, block_tokens=2)
    tokens = [1, 2, 9, 9, 9, 3]
    cat, dog = (
        hasher.hashes(hashed_token_ids(tokens, [Span(image, 2, 3)])) for image in (CAT, DOG)
    )
    assert cat[0] == dog[0] == hasher.hashes(tokens)[0]
    assert not set(cat[1:]) & set(dog[1:])


@pytest.mark.parametrize("image", [Span(CAT, 2, 3), Span(CAT[:8], 0, 3)])
def test_spans_outside_the_prompt_and_other_hashes_are_rejected(image: Span) -> None:
    with pytest.raises(InternalError):
        hashed_token_ids([1, 2, 3, 4], [image])


@pytest.mark.parametrize(
    ("end", "block_tokens", "expected"),
    [(30, 1, 30), (23, 1, 20), (20, 1, 20), (19, 1, 14), (30, 8, 24), (23, 8, 16), (17, 4, 12)],
)
def test_a_prefix_ends_before_an_image_that_it_has_in_part(
    end: int, block_tokens: int, expected: int
) -> None:
    images = [Span(CAT, 14, 6), Span(DOG, 20, 4)]
    if block_tokens == 8:
        images = images[1:]
    assert whole_images_end(end, images, block_tokens) == expected


def test_an_end_that_is_moved_divides_no_earlier_image() -> None:
    assert whole_images_end(30, [Span(CAT, 5, 14), Span(DOG, 21, 12)], 4) == 20
    assert whole_images_end(30, [Span(CAT, 5, 16), Span(DOG, 21, 12)], 4) == 4
