import shutil

import numpy as np
import pytest
import torch
from tiny_sets import TEST, TRAIN, write_cifar

from bln.experiments import data, packed, runs, words
from bln.experiments.data import DataError


@pytest.fixture
def cifar(tmp_path, rng, monkeypatch):
    """A folder with three images a file, and what is in it."""
    md5, content = write_cifar(tmp_path, rng)
    monkeypatch.setattr(data, "_CIFAR10", md5)
    return tmp_path, content


REVIEWS = {
    "train/pos": ["A good film. <br />A film", "good GOOD a"],
    "train/neg": ["bad, a bad film", "the the"],
    "test/pos": ["unseen good film", ""],
    "test/neg": ["A the bad-film?!", "nothing known here"],
}
# Counts in training reviews: a 4, then film, good 3, bad, the 2, br 1. Equal ones lie in a Python 2 dictionary in the
# order good, film and bad, the.
RATINGS = {"pos": 7, "neg": 4}


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    """A folder in the publisher's layout, two reviews in each part."""
    for part, texts in REVIEWS.items():
        folder = tmp_path / "aclImdb" / part
        folder.mkdir(parents=True)
        for number, text in enumerate(texts):
            (folder / f"{number}_{RATINGS[part[-3:]]}.txt").write_text(text)
    monkeypatch.setattr(data, "_REVIEWS", 2)
    monkeypatch.setattr(data, "_WORDS", 6)
    return tmp_path


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- CIFAR-10


def test_cifar_is_what_the_files_hold_in_their_order(cifar):
    folder, content = cifar
    found = data.cifar10(folder)
    for images, labels, names in (
        (found.train, found.train_labels, TRAIN),
        (found.test, found.test_labels, TEST),
    ):
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        np.testing.assert_array_equal(images, np.concatenate([content[name][0] for name in names]))
        np.testing.assert_array_equal(labels, np.concatenate([content[name][1] for name in names]))
    assert found.train.shape == (15, 3, 32, 32)


def test_cifar_takes_its_own_folder_and_text_too(cifar):
    folder, _ = cifar
    whole = data.cifar10(folder)
    for given in (folder / "cifar-10-batches-bin", str(folder)):
        assert torch.equal(data.cifar10(given).train, whole.train)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has the md5"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])), "has the md5"),
    ],
)
@pytest.mark.parametrize("name", ["data_batch_3.bin", "test_batch.bin"])
def test_damaged_cifar_file_is_refused_with_the_way_out(cifar, damage, says, name):
    folder, _ = cifar
    damage(folder / "cifar-10-batches-bin" / name)
    with pytest.raises(DataError, match=says) as error:
        data.cifar10(folder)
    message = one_line(error)
    assert str(folder / "cifar-10-batches-bin" / name) in message
    assert f"bln data get cifar10 --data-dir {folder}" in message


@pytest.mark.parametrize("load", [data.cifar10, data.imdb])
def test_missing_folder_names_the_command_that_gets_it(load, tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError, match="there is no folder") as error:
            load(folder)
        assert f"bln data get {load.__name__} --data-dir {folder}" in one_line(error)


# ---- IMDB


def test_imdb_reviews_are_numbered_cut_and_padded_as_keras_does(reviews):
    found = data.imdb(reviews, words=8, length=5)
    a, good, film, bad, rare = 4, 5, 6, 7, 2
    assert found.train.tolist() == [
        [good, film, rare, a, film],
        [0, 1, good, good, a],
        [1, bad, a, bad, film],
        [0, 0, 1, rare, rare],
    ]
    assert found.test.tolist() == [
        [0, 0, 1, good, film],  # a word that no training review has is left out
        [0, 0, 0, 0, 1],
        [1, a, rare, bad, film],
        [0, 0, 0, 0, 1],
    ]
    assert found.train_labels.tolist() == found.test_labels.tolist() == [1, 1, 0, 0]
    assert {tensor.dtype for tensor in found} == {torch.int64}


def test_imdb_takes_its_own_folder_too(reviews):
    whole = data.imdb(reviews, words=8, length=5)
    for ours, theirs in zip(data.imdb(reviews / "aclImdb", words=8, length=5), whole, strict=True):
        assert torch.equal(ours, theirs)


def test_files_that_are_not_reviews_are_left_out(reviews):
    before = data.imdb(reviews, words=8, length=5)
    (reviews / "aclImdb/train/pos/._0_7.txt").write_bytes(b"\0")
    (reviews / "aclImdb/train/pos/urls.html").write_text("more words")
    (reviews / "aclImdb/train/unsup").mkdir()
    (reviews / "aclImdb/train/unsup/0_0.txt").write_text("more words")
    shutil.rmtree(reviews / "aclImdb/test")
    shutil.copytree(reviews / "aclImdb/train", reviews / "aclImdb/test")
    assert torch.equal(data.imdb(reviews, words=8, length=5).train, before.train)


def test_reviews_of_another_encoding_are_bytes(reviews):
    (reviews / "aclImdb/test/pos/0_7.txt").write_bytes(b"good \xe9\xff film")
    assert data.imdb(reviews, words=8, length=4).test[0].tolist() == [0, 1, 5, 6]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda place: (place / "train/neg/1_4.txt").unlink(), "1 reviews, expected 2"),
        (lambda place: (place / "test/pos/9_9.txt").touch(), "3 reviews, expected 2"),
        (lambda place: shutil.rmtree(place / "test"), "0 reviews, expected 2"),
        (lambda place: (place / "train/neg/1_4.txt").write_text("another word"), "7 different words"),
    ],
)
def test_reviews_that_are_not_the_published_ones_are_refused(reviews, damage, says):
    damage(reviews / "aclImdb")
    with pytest.raises(DataError, match=says) as error:
        data.imdb(reviews, words=8, length=5)
    assert f"bln data get imdb --data-dir {reviews}" in one_line(error)


@pytest.mark.parametrize(("number", "length"), [(3, 80), (-1, 80), (20_000, 0)])
def test_impossible_numbers_are_refused(reviews, number, length):
    with pytest.raises(ValueError, match="expected words > 3 and length > 0"):
        data.imdb(reviews, words=number, length=length)


# ---- the encoded reviews, kept


CACHE = "aclImdb/bln-imdb-8-5.pt"


def assert_loads(folder, tokens):
    for ours, theirs in zip(data.imdb(folder, words=8, length=5), tokens, strict=True):
        assert torch.equal(ours, theirs)


def test_second_time_reads_no_review(reviews, monkeypatch):
    def fail(text):
        raise AssertionError("a review was read")

    tokens = data.imdb(reviews, words=8, length=5)
    monkeypatch.setattr(words, "split", fail)
    assert_loads(reviews, tokens)
    assert_loads(reviews / "aclImdb", tokens)
    for other in ({"words": 7, "length": 5}, {"words": 8, "length": 4}):
        with pytest.raises(AssertionError):
            data.imdb(reviews, **other)


def test_harmed_cache_is_made_anew(reviews, rng):
    tokens = data.imdb(reviews, words=8, length=5)
    good = (reviews / CACHE).read_bytes()
    flipped = bytearray(good)
    flipped[rng.integers(len(good))] ^= 1 << rng.integers(8)
    for harmed in (b"", b"not tensors", good[: rng.integers(len(good))], flipped):
        (reviews / CACHE).write_bytes(harmed)
        assert_loads(reviews, tokens)
        assert (reviews / CACHE).read_bytes() == good


def test_folder_that_cannot_be_written_is_read_without_a_cache(reviews, monkeypatch):
    def refuse(path, content):
        raise runs.RunError("cannot write")

    monkeypatch.setattr(runs, "write", refuse)
    data.imdb(reviews, words=8, length=5)
    assert sorted(path.name for path in (reviews / "aclImdb").iterdir()) == ["test", "train"]


# ---- words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"Don't, 'quote' it's", ["don't", "'quote'", "it's"]),
        (b"one<br /><br />two", ["one", "br", "br", "two"]),
        (b"A-B_C/D\\E 10/10... tab\tnewline\nend", ["a", "b", "c", "d", "e", "10", "10", "tab", "newline", "end"]),
        ("CAF\u00c9".encode(), ["caf\u00c9"]),  # only ASCII letters are lowered
        (b"a\rb  \x0b c", ["a\rb", "\x0b", "c"]),  # only a space separates
        (b'!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~', []),
        (b"", []),
    ],
)
def test_review_is_split_as_keras_splits(text, expected):
    assert [word.decode() for word in words.split(text)] == expected


def test_python2_hashes_and_orders_are_the_known_ones():
    # hash("a"), hash("abc") and dict(one=1, two=2, three=3) of Python 2.7 on 64 bits
    assert words._python2_hash(b"a") == 12416037344
    assert words._python2_hash(b"abc") == 1453079729188098211
    assert words._python2_order([b"one", b"two", b"three"]) == [b"three", b"two", b"one"]


def test_ranks_order_words_by_count_and_name_each_once(rng):
    vocabulary = [f"w{number}".encode() for number in range(3000)]  # the dictionary grows five times
    texts = [[vocabulary[at] for at in rng.zipf(1.3, 400) % 3000] for _ in range(20)]
    ranks = words.rank(texts)
    counts = {word: sum(text.count(word) for text in texts) for word in ranks}
    assert set(ranks) == {word for text in texts for word in text}
    assert list(ranks.values()) == list(range(1, len(ranks) + 1))
    ordered = [counts[word] for word in ranks]
    assert ordered == sorted(ordered, reverse=True)


# ---- digits


def test_digits_are_split_once_and_for_all_by_class():
    parts = data.digits()
    images, labels = parts[::2], parts[1::2]
    assert [tuple(part.shape) for part in images] == [(1079, 1, 8, 8), (359, 1, 8, 8), (359, 1, 8, 8)]
    assert all(part.dtype == torch.float32 and part.min() == 0 and part.max() == 1 for part in images)
    for label in range(10):
        train, validation, test = (int((part == label).sum()) for part in labels)
        assert validation == test == round((train + validation + test) / 5)
    again = data.digits()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts, again, strict=True))
    assert not torch.equal(data.digits(seed=1).train_labels, parts.train_labels)


def test_digits_of_the_parts_are_the_whole():
    from sklearn.datasets import load_digits

    whole = load_digits()
    ours = torch.cat(data.digits()[::2]).flatten(1)
    theirs = torch.from_numpy(whole.images / 16).float().flatten(1)
    assert sorted(map(tuple, ours.tolist())) == sorted(map(tuple, theirs.tolist()))


def test_packed_images_are_the_same_images(tmp_path):
    random = np.random.default_rng(0)
    smooth = random.integers(0, 256, (7, 3, 32, 1)) + np.arange(32)  # wraps around
    images = torch.from_numpy(np.concatenate([smooth, random.integers(0, 256, (5, 3, 32, 32))]).astype(np.uint8))
    labels = torch.arange(12) % 10
    whole = data.DataSet(images[:8], labels[:8], images[8:], labels[8:])
    path = tmp_path / "packed"
    packed.write(whole, path, 6)
    found = packed.read(path)
    assert torch.equal(found.train, images[:6])
    assert torch.equal(found.test, images[8:])
    assert found.train_labels.tolist() == labels[:6].tolist()
    assert found.test_labels.tolist() == labels[8:].tolist()
    with pytest.raises(ValueError, match="expected 1 to 8 training images, got 9"):
        packed.write(whole, path, 9)
    content = bytearray(path.read_bytes())
    for spoiled in (content[:-9], content[: len(content) // 2], b"else" + content):
        path.write_bytes(spoiled)
        with pytest.raises(data.DataError, match="is not a file of packed images"):
            packed.read(path)
