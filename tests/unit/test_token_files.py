"""Tokens of other programs are taken; whatever else is given as a text is named."""

import gzip
import json

import numpy as np
import pytest

from labcode.config import TextData
from labcode.data import text
from labcode.data.tokenizer import BPETokenizer

TOKENS = np.random.default_rng(0).integers(0, 50257, 5000)


def load(path, **fields):
    config = TextData(path=str(path), **fields)
    return text.load(config, 32, path.parent / "cache")


def complaint(path, **fields):
    with pytest.raises((ValueError, OSError)) as caught:
        load(path, **fields)
    line = str(caught.value)
    assert "\n" not in line and str(path) in line
    return line


def raw(path, dtype):
    TOKENS.astype(dtype).tofile(path)


def array(path, dtype):
    np.save(path, TOKENS.astype(dtype))


def llm_c(path, dtype):
    magic, version = {"<u2": (20240520, 1), "<u4": (20240801, 7)}[dtype]
    header = np.array([magic, version, len(TOKENS)] + [0] * 253, "<i4")
    path.write_bytes(header.tobytes() + TOKENS.astype(dtype).tobytes())


@pytest.mark.parametrize(
    ("write", "name", "dtype"),
    [
        (raw, "train.bin", "<u2"),
        (raw, "train.bin", "<u4"),
        (array, "train.npy", "<u2"),
        (array, "train.npy", "<i8"),
        (array, "train.npy", "<i4"),
        (raw, "part-0-00000.npy", "<u2"),
        (llm_c, "fineweb_val_000000.bin", "<u2"),
        (llm_c, "fineweb_val_000000.bin", "<u4"),
    ],
)
def test_tokens_are_taken_as_they_are(tmp_path, write, name, dtype):
    write(tmp_path / name, dtype)
    splits = load(tmp_path / name)
    found = np.concatenate([splits.train.tokens, splits.val.tokens])
    assert np.array_equal(found, TOKENS)
    assert splits.tokenizer.vocab_size == TOKENS.max() + 1
    assert splits.tokenizer.decode([3, 50256]) == "3 50256"
    assert len(splits.sha256) == 64
    inputs, targets = splits.train[0]
    assert inputs[1:].tolist() == targets[:-1].tolist()
    assert not (tmp_path / "cache").exists()


def test_their_tokenizer_may_be_given(tmp_path):
    words = "to be or not to be, that is the question. " * 30
    tokenizer = BPETokenizer.train(words, 280)
    tokenizer.model.save(str(tmp_path / "tokenizer.json"))
    np.array(tokenizer.encode(words), "<u2").tofile(tmp_path / "train.bin")
    splits = load(tmp_path / "train.bin", tokenizer=str(tmp_path / "tokenizer.json"))
    assert (
        splits.tokenizer.decode(splits.train.tokens[:8].tolist())
        == words[:20][: len(splits.tokenizer.decode(splits.train.tokens[:8].tolist()))]
    )
    raw(tmp_path / "other.bin", "<u2")
    line = complaint(tmp_path / "other.bin", tokenizer=str(tmp_path / "tokenizer.json"))
    assert "give the tokenizer that these tokens are of" in line


def test_a_text_may_have_the_tokenizer_of_a_model(tmp_path):
    words = "to be or not to be, that is the question. " * 30
    BPETokenizer.train(words, 280).model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(words)
    splits = load(tmp_path / "a.txt", tokenizer=str(tmp_path / "tokenizer.json"))
    assert splits.tokenizer.vocab_size <= 280
    again = load(tmp_path / "a.txt", tokenizer=str(tmp_path / "tokenizer.json"))
    assert np.array_equal(again.train.tokens, splits.train.tokens)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json is no tokenizer\.json"):
        load(tmp_path / "a.txt", tokenizer=str(tmp_path / "a.json"))
    with pytest.raises(ValueError, match=r"there is no .*b\.json"):
        load(tmp_path / "a.txt", tokenizer=str(tmp_path / "b.json"))
    with pytest.raises(ValueError, match=r"data.tokenizer=.cahr.: give one of char, bpe, or"):
        TextData(tokenizer="cahr")


DOCUMENTS = b"".join(
    json.dumps({"text": word, "meta": {}}).encode() + b"\n" for word in ("to be", "or not")
)
REFUSED = [
    ("c4.jsonl", DOCUMENTS, "is JSON, a document to a line, not UTF-8 text: write out its texts"),
    ("c4.json.gz", gzip.compress(DOCUMENTS), "is JSON, a document to a line"),
    ("a.parquet", b"PAR1" + bytes(40), "is a Parquet table, not UTF-8 text"),
    ("a.arrow", b"ARROW1\x00\x00" + bytes(40), "is an Arrow table"),
    ("a.pdf", b"%PDF-1.5\n%\xe2\xe3\xcf\xd3\n", "is a PDF document"),
    ("a.txt", "naïve".encode("utf-16"), "is text in UTF-16, not UTF-8 text: convert it, iconv"),
    ("a.txt", b"<!doctype html><html>404</html>", "is a page of HTML, not UTF-8 text: download"),
    ("a.txt", b"version https://git-lfs.github.com/spec/v1\n", "run `git lfs pull`"),
    ("a.txt.zst", b"\x28\xb5\x2f\xfd\x04\x00", "is a Zstandard file, not UTF-8 text: unpack it"),
    ("a.zip", b"PK\x03\x04" + bytes(60), "is a zip archive, not UTF-8 text: unpack it"),
    ("meta.pkl", b"\x80\x04\x95\x05.", "is a pickle, not UTF-8 text: it is not opened"),
    ("x.idx", b"MMIDIDX\x00\x00\x01", "name the .bin beside it"),
    ("a.txt", b"", "is an empty file"),
    (
        "train.bin.gz",
        gzip.compress(TOKENS.astype("<u2").tobytes()),
        "is token numbers of 2 bytes (uint16) without a header, packed with gzip: unpack it",
    ),
    (
        "val.bin",
        np.array([20240520, 1, 5000] + [0] * 253, "<i4").tobytes() + bytes(2000),
        "says that it has 5000 tokens, and has 1000: it is damaged or only a part",
    ),
    (
        "val.bin",
        np.array([20240520, 9, 500] + [0] * 253, "<i4").tobytes() + bytes(1000),
        "of a version of llm.c not known here",
    ),
    ("cut.npy", b"\x93NUMPY\x01\x00v\x00{'descr'", "is a numpy array that cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "words"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_is_no_text_is_named(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    assert words in complaint(path)


def test_a_folder_is_told_to_be_one(tmp_path):
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(TOKENS.astype("<u2").tobytes())
    assert "is a folder, not UTF-8 text: name one of its files" in complaint(tmp_path)


def test_a_small_alphabet_is_not_read_in_pairs(tmp_path):
    letters = TOKENS % 5
    letters.astype("<u2").tofile(tmp_path / "dna.bin")
    splits = load(tmp_path / "dna.bin")
    assert np.array_equal(np.concatenate([splits.train.tokens, splits.val.tokens]), letters)


def test_arrays_that_are_no_tokens_are_named(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.ones((4, 5), np.float32))
    assert "is a numpy array of 4 x 5 float32, and tokens are whole numbers" in complaint(path)
    np.save(path, np.array([1, -100, 3]))
    assert "holds the number -100" in complaint(path)
    np.save(path, np.array([{}], dtype=object))
    assert "is a numpy array that cannot be read" in complaint(path)


def test_texts_of_every_kind_stay_texts(tmp_path):
    texts = [
        ("a.txt", "Habe nun, ach! Philosophie, Juristerei und Medizin. " * 20),
        ("a.md", "# Title\n\n| a | b |\n|---|---|\n" * 20),
        ("a.csv", "time,t2m\n2020-01-01,281.3\n" * 20),
        ("a.py", "def f(x):\n\treturn x\n" * 20),
        ("a.json", '{\n  "a": [1, 2]\n}\n' * 20),
        ("a.fasta", ">seq\nACGTACGTTTGACA\n" * 20),
        ("no_suffix", "春はあけぼの。やうやう白くなりゆく山ぎは、" * 20),
        ("a.xml", "<?xml version='1.0'?><doc>text</doc>\n" * 20),
        ("a.bin", "plain text under another name\n" * 20),
        ("a.log", "\x1b[32mok\x1b[0m step 1\n" * 20),
    ]
    for name, words in texts:
        path = tmp_path / name
        path.write_text(words, encoding="utf-8")
        assert load(path).tokenizer.decode(load(path).train.tokens[:9].tolist()) == words[:9]
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("to be or not to be " * 40)
    load(tmp_path / "b.txt.gz")


def test_a_long_preparation_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text, "PROGRESS_S", -1.0)
    path = tmp_path / "a.txt"
    path.write_text("to be or not to be " * 40)
    load(path)
    assert "making tokens of" in capsys.readouterr().err
