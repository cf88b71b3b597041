"""Text: tokenizers, the memory-mapped token file, windows.

Also what happens to bad input and half-written files.
"""

import gzip
import hashlib
import json
import os
import re
import resource
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labcode.config import TextData
from labcode.data import text, tokenizer

VERSE = "Now is the winter of our discontent\nMade glorious summer by this sun of York;\n\n"


@pytest.fixture(scope="module")
def shakespeare(tmp_path_factory):
    return text.load(TextData(), 128, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def verses(tmp_path):
    """A text file of 800 characters of verse and one separator."""
    path = tmp_path / "verses.txt"
    path.write_text(VERSE * 5 + tokenizer.SEPARATOR + VERSE * 5)
    return path


def load(path, tmp_path, context_length=16, **fields):
    return text.load(TextData(path=str(path), **fields), context_length, tmp_path / "cache")


def complaint(path, tmp_path, error=ValueError, **fields):
    """The one line about a text that cannot be used."""
    with pytest.raises(error) as caught:
        load(path, tmp_path, **fields)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


def all_tokens(splits):
    return np.concatenate([splits.train.tokens, splits.val.tokens])


# ---- the text that ships


def test_shakespeare_is_83_tokens_of_characters_and_comes_back_whole(shakespeare):
    with gzip.open(text.SHAKESPEARE, "rt", encoding="utf-8", newline="") as file:
        original = file.read()
    tokens = all_tokens(shakespeare)
    assert shakespeare.tokenizer.vocab_size == 83  # 82 characters and the separator
    assert len(tokens) == 4_999_843 and (tokens == 0).sum() == 37  # 38 plays
    assert shakespeare.tokenizer.decode(tokens.tolist()) == original


def test_unigram_entropy_of_shakespeare_and_of_equal_counts(shakespeare):
    # nats per character
    assert shakespeare.train.unigram_entropy() == pytest.approx(3.345, abs=0.001)
    assert text.TextDataset(np.arange(40) % 8, 4).unigram_entropy() == pytest.approx(np.log(8))


def test_tokens_stay_in_a_file_of_two_bytes_each(shakespeare):
    tokens = shakespeare.train.tokens
    assert tokens.dtype == np.dtype("<u2")
    while not isinstance(tokens, np.memmap):
        tokens = tokens.base  # an array of its own memory has no base, and fails here
    assert not tokens.flags.writeable


# ---- windows


def test_windows_predict_each_token_once_and_the_next(shakespeare):
    for part in (shakespeare.train, shakespeare.val):
        assert len(part) == (len(part.tokens) - 1) // 128
        inputs, targets = part[[0, 1, len(part) - 1]]
        assert (
            inputs.shape == targets.shape == (3, 128)
            and inputs.dtype == targets.dtype == torch.int64
        )
        assert inputs.is_contiguous() and targets.is_contiguous()
        np.testing.assert_array_equal(inputs[:2].flatten(), part.tokens[:256])
        np.testing.assert_array_equal(targets[:2].flatten(), part.tokens[1:257])
        start = (len(part) - 1) * 128
        np.testing.assert_array_equal(targets[2], part.tokens[start + 1 : start + 129])


def test_a_single_number_gives_a_single_window_and_arrays_and_lists_are_the_same(shakespeare):
    batch = shakespeare.val[np.array([3, 5])]
    for one, many in zip(shakespeare.val[5], batch):
        assert torch.equal(one, many[1])
    for one, other in zip(shakespeare.val[[3, 5]], batch):
        assert torch.equal(one, other)
    assert shakespeare.val[np.array([], dtype=np.int64)][0].shape == (0, 128)


@pytest.mark.parametrize("number", [-1, 3906])
def test_no_window_reaches_out_of_its_part(shakespeare, number):
    assert len(shakespeare.val) == 3906
    with pytest.raises(IndexError, match=f"there is no window {number}: they count from 0 to 3905"):
        shakespeare.val[[0, number]]


@given(st.integers(2, 400), st.integers(1, 40))
def test_windows_never_share_a_prediction(num_tokens, context_length):
    windows = text.TextDataset(np.arange(num_tokens), context_length)
    predicted = windows[range(len(windows))][1].flatten().tolist()
    assert predicted == list(range(1, len(windows) * context_length + 1))
    # what is left over does not fill a window
    assert num_tokens - 1 - len(predicted) < context_length


def test_validation_is_the_last_part_and_nothing_of_it_is_trained_on(verses, tmp_path):
    splits = load(verses, tmp_path, val_fraction=0.25)
    whole = splits.tokenizer.encode(verses.read_text())
    assert len(splits.val.tokens) == -(-len(whole) // 4)
    assert all_tokens(splits).tolist() == whole


# ---- tokenizers


@given(st.text(alphabet="abc \n'\N{SNOWMAN}\N{GRINNING FACE}<|>", max_size=60))
def test_characters_come_back(sample):
    made = tokenizer.CharTokenizer.train(sample + tokenizer.SEPARATOR + "z")
    assert made.decode(made.encode(sample)) == sample
    assert made.encode(f"z{tokenizer.SEPARATOR}z").count(0) == 1
    assert made.vocab_size == 1 + len(made.characters) == 1 + len(set(made.characters))


def test_an_unknown_character_is_named(shakespeare):
    with pytest.raises(
        ValueError, match=r"character '.' is none of the 82 in the text .* tokenizer='bpe'"
    ) as error:
        shakespeare.tokenizer.encode("5 \u20ac")
    assert "\n" not in str(error.value)


def test_byte_pairs_shorten_the_text_and_know_every_character(verses, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 50)
    splits = load(verses, tmp_path, context_length=4, tokenizer="bpe", bpe_vocab_size=300)
    monkeypatch.undo()
    original = verses.read_text()
    assert 257 < splits.tokenizer.vocab_size <= 300
    assert len(all_tokens(splits)) < len(original) / 2
    # written piece by piece, the same
    assert all_tokens(splits).tolist() == splits.tokenizer.encode(original)
    assert splits.tokenizer.decode(all_tokens(splits)) == original
    assert (all_tokens(splits) == 0).sum() == 1  # the separator
    unseen = "5 \u20ac \N{SNOWMAN}"
    assert splits.tokenizer.decode(splits.tokenizer.encode(unseen)) == unseen


@given(
    st.lists(st.sampled_from([*"ab \n\t'<|endoftx>", tokenizer.SEPARATOR]), max_size=300).map(
        "".join
    ),
    st.integers(1, 20),
)
def test_pieces_are_the_text_and_cut_before_a_space_after_a_word(sample, size):
    original, tokenizer.PIECE_CHARACTERS = tokenizer.PIECE_CHARACTERS, size
    try:
        pieces = list(tokenizer.pieces(sample))
    finally:
        tokenizer.PIECE_CHARACTERS = original
    assert "".join(pieces) == sample
    assert all(len(piece) >= size for piece in pieces[:-1])
    assert sum(piece.count(tokenizer.SEPARATOR) for piece in pieces) == sample.count(
        tokenizer.SEPARATOR
    )
    for before, after in pairwise(pieces):
        if after[0].isspace() and not before[-1].isspace():
            continue
        # elsewhere only where no such place was near: no piece may be as long as the whole text
        assert len(before) >= 2 * size
        assert not re.search(r"\S\s", before[size - 1 : 2 * size])
    assert all(len(piece) < 2 * size + len(tokenizer.SEPARATOR) for piece in pieces)


@pytest.mark.parametrize("word", ["ab", " ", "\N{GRINNING FACE}", "<|endoftext|"])
def test_a_text_without_a_break_gives_no_endless_tokens(word):
    """Learning one word as long as the text takes time that grows with its square."""
    sample = word * 3000
    made = tokenizer.BPETokenizer.train(sample, 400)
    assert max(map(len, made.model.get_vocab())) <= tokenizer.WORD_BYTES
    assert made.decode(made.encode(sample)) == sample
    again = tokenizer.tokenizer_from_json(json.loads(json.dumps(made.as_json())))
    assert again.encode(sample) == made.encode(sample)


def test_words_of_a_language_are_not_cut(shakespeare):
    sample = shakespeare.tokenizer.decode(shakespeare.val.tokens[:20_000].tolist())
    assert not tokenizer.LONG_WORD.search(sample)
    made = tokenizer.BPETokenizer.train(sample, 400)
    assert made.as_json()["model"]["pre_tokenizer"]["type"] == "ByteLevel"


def test_more_than_65535_tokens_take_four_bytes_each(tmp_path):
    path = tmp_path / "signs.txt"
    signs = "".join(chr(code) for code in range(0x20, 0x11000) if not 0xD800 <= code < 0xE000)
    path.write_text(signs + signs[::-1], encoding="utf-8")
    splits = load(path, tmp_path)
    assert splits.tokenizer.vocab_size > 65535 and splits.train.tokens.dtype == np.dtype("<u4")
    assert splits.tokenizer.decode(all_tokens(splits).tolist()) == signs + signs[::-1]


def test_targets_that_would_not_count_are_refused():
    with pytest.raises(ValueError, match="token -100 is negative"):
        text.TextDataset(np.array([1, 2, -100, 3]), 1)


# ---- the file


def test_the_same_text_is_prepared_once_packed_or_not(verses, tmp_path, monkeypatch):
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(verses.read_bytes()))
    first = load(verses, tmp_path)
    monkeypatch.setattr(text, "_prepare", None)  # a second preparation would fail
    for path in (verses, packed):
        again = load(path, tmp_path)
        assert all_tokens(again).tolist() == all_tokens(first).tolist()
        assert again.tokenizer.characters == first.tokenizer.characters
        assert again.sha256 == first.sha256 == hashlib.sha256(verses.read_bytes()).hexdigest()
    files = sorted(file.suffix for file in (tmp_path / "cache").iterdir())
    assert files == [".bin", ".json", ".lock"]


def test_another_text_under_the_same_name_is_another_file(verses, tmp_path):
    before = load(verses, tmp_path)
    verses.write_text("something else, " * 20)
    splits = load(verses, tmp_path)
    assert splits.sha256 != before.sha256
    assert splits.tokenizer.decode(all_tokens(splits).tolist()) == "something else, " * 20


def _no_description(tokens, description):
    description.unlink()


def _short_tokens(tokens, description):
    tokens.write_bytes(tokens.read_bytes()[:-1])


def _no_tokens(tokens, description):
    tokens.unlink()


def _half_a_description(tokens, description):
    description.write_text(description.read_text()[:40])


def _another_format(tokens, description):
    description.write_text(json.dumps(json.loads(description.read_text()) | {"format": 1}))


def _changed(description, **fields):
    saved = json.loads(description.read_text())
    saved["meta"] |= fields
    description.write_text(json.dumps(saved))


def _zeroed_tokens(tokens, description):
    tokens.write_bytes(bytes(tokens.stat().st_size))


def _tokens_of_ones(tokens, description):
    tokens.write_bytes(b"\xff" * tokens.stat().st_size)


def _one_bit(tokens, description):
    content = bytearray(tokens.read_bytes())
    content[100] ^= 4
    tokens.write_bytes(content)


def _another_dtype(tokens, description):
    _changed(description, dtype="<i2")


def _fewer_characters(tokens, description):
    _changed(description, tokenizer={"kind": "char", "characters": "abc"})


def _a_model_that_is_none(tokens, description):
    _changed(description, tokenizer={"kind": "bpe", "model": {"version": "1.0"}})


def _a_list(tokens, description):
    description.write_text("[1, 2, 3]")


def _nothing(tokens, description):
    description.write_text("null")


def _nested(tokens, description):
    description.write_text("[" * 100_000)


def _huge_numbers(tokens, description):
    description.write_text('{"format": 2, "sha256": 1e999, "meta": -1e999}')


def _bytes(tokens, description):
    description.write_bytes(bytes(range(256)))


@pytest.mark.parametrize(
    "damage", [_no_description, _no_tokens, _another_format], ids=lambda damage: damage.__name__
)
def test_a_half_written_file_does_not_count(verses, tmp_path, capsys, damage):
    load(verses, tmp_path)
    (tokens,) = (tmp_path / "cache").glob("*.bin")
    damage(tokens, tokens.with_suffix(".json"))
    splits = load(verses, tmp_path)
    assert splits.tokenizer.decode(all_tokens(splits).tolist()) == verses.read_text()
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        _short_tokens,
        _half_a_description,
        _zeroed_tokens,
        _tokens_of_ones,
        _one_bit,
        _another_dtype,
        _fewer_characters,
        _a_model_that_is_none,
        _a_list,
        _nothing,
        _nested,
        _huge_numbers,
        _bytes,
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_file_is_made_again_and_named(verses, tmp_path, capsys, damage):
    load(verses, tmp_path)
    (tokens,) = (tmp_path / "cache").glob("*.bin")
    damage(tokens, tokens.with_suffix(".json"))
    splits = load(verses, tmp_path)
    assert splits.tokenizer.decode(all_tokens(splits).tolist()) == verses.read_text()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(str(tokens.with_suffix(".json"))) and line.endswith("; it is made again")
    load(verses, tmp_path)
    assert not capsys.readouterr().err


def test_a_description_of_byte_pairs_that_is_damaged_is_made_again(verses, tmp_path, capsys):
    first = load(verses, tmp_path, context_length=4, tokenizer="bpe", bpe_vocab_size=300)
    (description,) = (tmp_path / "cache").glob("*.json")
    description.write_text(description.read_text().replace('"merges": [[', '"merges": [[["', 1))
    again = load(verses, tmp_path, context_length=4, tokenizer="bpe", bpe_vocab_size=300)
    assert all_tokens(again).tolist() == all_tokens(first).tolist()
    assert "; it is made again" in capsys.readouterr().err


def test_of_many_at_once_one_prepares(verses, tmp_path, monkeypatch):
    made, prepare = [], text._prepare
    monkeypatch.setattr(text, "_prepare", lambda *args: made.append(1) or prepare(*args))
    with ThreadPoolExecutor(8) as pool:
        loaded = list(
            pool.map(
                lambda _: load(verses, tmp_path, tokenizer="bpe", bpe_vocab_size=400), range(8)
            )
        )
    assert len(made) == 1
    assert len({tuple(all_tokens(splits)) for splits in loaded}) == 1


def test_where_locks_do_not_work_many_at_once_get_the_same(verses, tmp_path, monkeypatch):
    def refuse(file, kind):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(text.fcntl, "flock", refuse)
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(lambda _: load(verses, tmp_path), range(8)))
    assert {splits.tokenizer.decode(all_tokens(splits).tolist()) for splits in loaded} == {
        verses.read_text()
    }
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_process_killed_while_it_prepares_holds_nobody_up(verses, tmp_path):
    """The kernel gives its lock back, and what it had begun to write is removed."""
    cache = tmp_path / "cache"
    cache.mkdir()
    sha256 = hashlib.sha256(verses.read_bytes()).hexdigest()
    file = text._TokenFile(cache / f"{sha256}-char", sha256)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        with text._one_at_a_time(file.lock_path):
            (cache / f"{file.tokens_path.name}.0123.partial").write_bytes(b"half of it")
            os.write(told, b"x")
            signal.pause()
        os._exit(1)
    os.read(ready, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    splits = load(verses, tmp_path)
    assert splits.tokenizer.decode(all_tokens(splits).tolist()) == verses.read_text()
    assert not list(cache.glob("*.partial"))


# ---- bad input


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "cannot be read: No such file or directory; give the path of a text file"),
        (b"", "is an empty file, not UTF-8 text: give a file with some text"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"caf\xe9 au lait", "text in another encoding (byte 0xe9 at position 3), not UTF-8"),
        (gzip.compress(VERSE.encode() * 50, mtime=0)[:-30], "is a broken gzip file"),
        (b"\x1f\x8bnot gzip at all", "is a broken gzip file"),
        (b"To be, or not to be", "is too short: 19 tokens leave 2 for validation"),
    ],
)
def test_bad_text_is_one_clear_line_and_leaves_nothing_behind(tmp_path, content, reason):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    assert reason in complaint(path, tmp_path, error=(ValueError, OSError))
    left = {file.suffix for file in (tmp_path / "cache").glob("*")}
    assert left <= ({".bin", ".json", ".lock"} if "too short" in reason else {".lock"})


def test_a_folder_in_place_of_a_text_is_one_clear_line(tmp_path):
    assert "is an empty folder, not UTF-8 text: name a file" in complaint(tmp_path, tmp_path)


def test_no_space_left_is_one_clear_line_and_keeps_what_was_there(verses, tmp_path):
    before = all_tokens(load(verses, tmp_path)).tolist()
    large = tmp_path / "large.txt"
    large.write_text(VERSE * 1000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # no file grows beyond 64 KiB, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        message = complaint(large, tmp_path, error=OSError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot keep the tokens of" in message and "free some space there" in message
    assert (
        len(list((tmp_path / "cache").glob("*.bin")))
        == len(list((tmp_path / "cache").glob("*.json")))
        == 1
    )
    assert not list((tmp_path / "cache").glob("*.partial"))
    assert all_tokens(load(verses, tmp_path)).tolist() == before
    assert len(all_tokens(load(large, tmp_path))) == 1000 * len(VERSE)


def test_a_cache_that_cannot_be_made_is_one_clear_line(verses, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert "cannot keep the tokens of" in complaint(verses, tmp_path, error=OSError)


@pytest.mark.parametrize("suffix", [".bin", ".json", ".lock"])
@pytest.mark.parametrize("kind", ["a folder", "a loop of links"])
def test_what_stands_where_a_token_file_belongs_is_named(verses, tmp_path, suffix, kind):
    sha256 = hashlib.sha256(verses.read_bytes()).hexdigest()
    place = tmp_path / "cache" / f"{sha256}-char{suffix}"
    place.parent.mkdir()
    if kind == "a folder":
        place.mkdir()
    else:
        place.symlink_to(place)
    try:
        splits = load(verses, tmp_path)
    except OSError as error:
        assert str(error).startswith(f"cannot keep the tokens of {verses} in {place.parent}: ")
        assert f"({place}); free some space there" in str(error) and "\n" not in str(error)
    else:  # a link is replaced by the file
        assert kind == "a loop of links" and suffix == ".bin"
        assert splits.tokenizer.decode(all_tokens(splits).tolist()) == verses.read_text()


def _fifo(path):
    os.mkfifo(path)


def _socket(path):
    # kept open by nobody: its name is what is asked for
    with socket.socket(socket.AF_UNIX) as server, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # its path may have 107 characters
        server.bind(path.name)


def _endless(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "name"),
    [(_fifo, "a named pipe"), (_socket, "a socket"), (_endless, "a device")],
)
def test_what_is_no_file_is_refused_before_it_is_read(tmp_path, make, name):
    path = tmp_path / "text"
    make(path)
    message = complaint(path, tmp_path)
    assert message == (f"text {path} is {name}: it is read more than once, give the path of a file")


def test_a_text_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    bomb = tmp_path / "bomb.txt.gz"
    bomb.write_bytes(gzip.compress(b"a" * 5_000_000, mtime=0))
    monkeypatch.setattr(text, "MOST_TEXT_BYTES", 3 * 10**6)
    message = complaint(bomb, tmp_path)
    assert message == (
        f"{bomb} holds more than 3 MB of text, and a text is read into memory whole: "
        "give a part of it"
    )


def test_a_text_that_is_still_being_written_is_refused(verses, tmp_path, monkeypatch):
    sha256 = text._sha256

    def and_then_it_grows(path):
        found = sha256(path)
        with open(path, "a") as file:
            file.write("more")
        return found

    monkeypatch.setattr(text, "_sha256", and_then_it_grows)
    assert "changed while it was read: start again when it is complete" in complaint(
        verses, tmp_path
    )
    assert not list((tmp_path / "cache").glob("*.bin"))


def test_a_text_that_memory_does_not_hold_is_refused(verses, tmp_path, monkeypatch):
    def give_up(self, sample):
        raise MemoryError

    monkeypatch.setattr(tokenizer.CharTokenizer, "encode", give_up)
    assert "does not fit into memory as a whole" in complaint(verses, tmp_path)


@pytest.mark.parametrize(
    "fields, field", [({}, "data.path"), ({"cache_dir": "~nobody_here/c"}, "data.cache_dir")]
)
def test_the_home_folder_of_nobody_is_one_clear_line(verses, fields, field):
    path = verses if fields else "~nobody_here/x"
    with pytest.raises(ValueError, match=f"^{field}=~nobody_here/") as caught:
        text.load(TextData(path=str(path)), 16, fields.get("cache_dir"))
    assert "there is no home folder for ~nobody_here; write the whole path" in str(caught.value)


def test_the_home_folder_is_that_of_the_user(verses, monkeypatch):
    monkeypatch.setenv("HOME", str(verses.parent))
    splits = text.load(TextData(path="~/verses.txt"), 16, "~/cache")
    assert splits.tokenizer.decode(all_tokens(splits).tolist()) == verses.read_text()
    assert list((verses.parent / "cache").glob("*.bin"))
