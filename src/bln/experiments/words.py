"""Keras's tokens of IMDB reviews, which the authors' runs used.

Keras made its imdb data set once, by its own tokenizer under Python 2, and does not describe it. The published numbers
show the rules: words are bytes in ASCII lower case, counted over the 25,000 training reviews; equally frequent words
are numbered in the order of a Python 2 dictionary; and words that only test reviews use are dropped. This gives 88,584
words, and reviews whose lengths have the mean 234.759 and the deviation 172.911, as published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

PADDING, START, UNKNOWN, OFFSET = 0, 1, 2, 3

_SEPARATORS = b'!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'
_TO_SPACE = bytes.maketrans(_SEPARATORS, b" " * len(_SEPARATORS))


def split(text: bytes) -> list[bytes]:
    """Split a review into words.

    >>> split(b"It's GOOD.<br />Isn't it?")
    [b"it's", b'good', b'br', b"isn't", b'it']
    """
    return [word for word in text.lower().translate(_TO_SPACE).split(b" ") if word]


def rank(reviews: Iterable[Sequence[bytes]]) -> dict[bytes, int]:
    """Number words from 1, the most frequent first.

    >>> rank([[b"a", b"good", b"film"], [b"a", b"film"], [b"a"]])
    {b'a': 1, b'film': 2, b'good': 3}
    """
    counts: Counter[bytes] = Counter()
    for review in reviews:
        counts.update(review)
    by_frequency = sorted(_python2_order(list(counts)), key=counts.__getitem__, reverse=True)
    return {word: number for number, word in enumerate(by_frequency, 1)}


def encode(review: Sequence[bytes], ranks: dict[bytes, int], *, words: int, length: int) -> list[int]:
    """Return the last ``length`` tokens of a review, padded in front where there are fewer.

    The first token marks the start. Each word with a rank follows as rank + 3, or as 2 where that is not below
    ``words``.

    >>> encode([b"what", b"a", b"good", b"film"], {b"a": 1, b"film": 2, b"good": 3}, words=6, length=6)
    [0, 0, 1, 4, 2, 5]
    """
    numbers = [ranks[word] + OFFSET for word in review if word in ranks]
    tokens = [START, *(number if number < words else UNKNOWN for number in numbers)][-length:]
    return [PADDING] * (length - len(tokens)) + tokens


def _python2_order(words: Iterable[bytes]) -> list[bytes]:
    """Return different words in the order of a 64-bit Python 2 dictionary that they were added to one by one."""
    table: list[tuple[int, bytes] | None] = [None] * 8
    for used, word in enumerate(words, 1):
        _put(table, (_python2_hash(word), word))
        if 3 * used >= 2 * len(table):
            # It grows to the power of two above 4 or 2 times its entries, which are added again in table order.
            capacity = used * (4 if used <= 50_000 else 2)
            smaller, table = table, [None] * (1 << capacity.bit_length())
            for entry in smaller:
                if entry is not None:
                    _put(table, entry)
    return [entry[1] for entry in table if entry is not None]


def _put(table: list[tuple[int, bytes] | None], entry: tuple[int, bytes]) -> None:
    mask = len(table) - 1
    slot = perturb = entry[0]
    while table[slot & mask] is not None:
        slot = 5 * slot + perturb + 1
        perturb >>= 5
    table[slot & mask] = entry


def _python2_hash(word: bytes) -> int:
    value = word[0] << 7
    for byte in word:
        value = (1_000_003 * value ^ byte) & 0xFFFF_FFFF_FFFF_FFFF
    return value ^ len(word)
