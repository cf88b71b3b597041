"""Text as a memory-mapped file of tokens.

It is prepared once, then read by any number of ranks without loading it.

    <cache>/<sha256 of the text>-<tokenizer>.bin     tokens, raw little-endian uint16
                                                     (uint32 for more than 65535 of them)
    <cache>/<sha256 of the text>-<tokenizer>.json    how to read it: tokenizer, number of tokens,
                                                     checksums of both files; written last, so that
                                                     a .bin without it does not count

Every process that opens a prepared text compares the checksums: 1 s for a GB. A file that is
damaged is made again.

Shapes: B windows, S tokens of context.
"""

import contextlib
import fcntl
import gzip
import hashlib
import json
import math
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from labcode.config import TextData
from labcode.data import token_files
from labcode.data.paths import check_is_file, user_path
from labcode.data.tokenizer import (
    AnyTokenizer,
    BPETokenizer,
    Tokenizer,
    make_tokenizer,
    pieces,
    tokenizer_from_json,
)
from labcode.runtime.file_kinds import LOOK_BYTES, Kind, kind_of, kind_of_bytes
from labcode.runtime.files import write_atomically
from labcode.runtime.units import si

SHAKESPEARE = Path(__file__).parents[1] / "assets" / "shakespeare.txt.gz"
CACHE = "~/.cache/labcode"
FORMAT = 2  # of the token files: those of another format are made again
# Largest size of an unpacked text. Its characters and its tokens are in memory together once, and a
# packed file of 4 MB may hold as much.
MOST_TEXT_BYTES = 4 * 10**9
READ_BYTES = 2**20  # at once
PROGRESS_S = 5.0


class TextDataset:
    """Windows of S+1 tokens; each begins with the last token of the one before.

    So each token but the first is predicted once.

    Args:
        tokens: [T] integers, usually a part of a memory-mapped file.
        context_length: S

    Raises:
        ValueError: A negative token. As a target, -100 would not count in the loss, and with
            unequal numbers of such targets the mean over dp and micro-batches would be a mean of
            means. Unsigned tokens, as in a token file, are not searched.
    """

    def __init__(self, tokens: np.ndarray, context_length: int) -> None:
        self.tokens = np.asarray(tokens)
        self.context_length = context_length
        signed = np.issubdtype(self.tokens.dtype, np.signedinteger)
        if signed and self.tokens.size and self.tokens.min() < 0:
            raise ValueError(
                f"token {self.tokens.min()} is negative: targets that do not count would give "
                "ranks different weights; leave such tokens out"
            )

    def __getstate__(self) -> dict[str, Any]:
        """For another process: of a token file only the place, which it maps for itself."""
        state = dict(self.__dict__)
        place = _place_in_file(self.tokens)
        if place is not None:
            state["tokens"] = place
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        tokens = state["tokens"]
        if isinstance(tokens, _PlaceInFile):
            tokens = tokens.mapped()
        self.__dict__.update(state, tokens=tokens)

    def __len__(self) -> int:
        """Number of windows, `(T - 1) // S`."""
        return max(0, len(self.tokens) - 1) // self.context_length

    def __getitem__(
        self, indices: int | Sequence[int] | np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of some windows.

        Args:
            indices: B window numbers, or a single one.

        Returns:
            Each [B, S] int64; [S] for a single number.

        Raises:
            IndexError: A number beyond the last window.
        """
        indices = np.asarray(indices, dtype=np.int64)
        outside = indices[(indices < 0) | (indices >= len(self))]
        if outside.size:
            raise IndexError(
                f"there is no window {outside[0]}: they count from 0 to {len(self) - 1}"
            )
        starts = indices[..., None] * self.context_length
        places = starts + np.arange(self.context_length + 1)  # [B, S+1]
        windows = torch.from_numpy(self.tokens[places].astype(np.int64))
        return windows[..., :-1].contiguous(), windows[..., 1:].contiguous()

    def unigram_entropy(self) -> float:
        """The loss in nats per token of a model that knows how often each token occurs, no more.

            H = -sum_v p(v) ln p(v)

        Source: Shannon 1948, section 6.
        """
        p = np.bincount(self.tokens) / len(self.tokens)
        p = p[p > 0]
        return float(-(p * np.log(p)).sum())


@dataclass(frozen=True)
class TextSplits:
    """Training and validation windows of one text, and what turns tokens back into characters.

    Args:
        train, val: The windows.
        tokenizer: Tokenizer of this text.
        sha256: SHA-256 of the text as it was read, unpacked: a run that resumes must find the same.
    """

    train: TextDataset
    val: TextDataset
    tokenizer: AnyTokenizer
    sha256: str


def load(config: TextData, context_length: int, cache_dir: str | Path | None = None) -> TextSplits:
    """The text of a config as windows of tokens, its last `val_fraction` kept for validation.

    The text is prepared on first use. The vocabulary is that of the whole text. Several ranks may
    call this at once: one prepares, the others wait for it.

    Args:
        config: What to read.
        context_length: S, tokens in one window.
        cache_dir: Folder of the token files; None is `~/.cache/labcode`.

    Raises:
        ValueError: A text that is empty, too large, no file, not UTF-8, changed while it was read,
            or too short for one window in each part.
        OSError: A text that cannot be read, or no space for its token file; an unfinished file is
            removed.
    """
    path = SHAKESPEARE if config.path is None else user_path(config.path, "data.path")
    cache = user_path(CACHE if cache_dir is None else cache_dir, "data.cache_dir")
    kind = _kind(path)
    if kind.name in token_files.KINDS:
        tokens, tokenizer, sha256 = token_files.read(path, kind, config)
    else:
        tokens, tokenizer, sha256 = _prepared(path, config, cache)
    num_train = len(tokens) - math.ceil(len(tokens) * config.val_fraction)
    train = TextDataset(tokens[:num_train], context_length)
    val = TextDataset(tokens[num_train:], context_length)
    for part, dataset in (("training", train), ("validation", val)):
        if len(dataset) == 0:
            raise ValueError(
                f"{path} is too short: {len(tokens)} tokens leave {len(dataset.tokens)} for {part} "
                f"(data.val_fraction={config.val_fraction}), one window of "
                f"model.context_length={context_length} needs {context_length + 1}: "
                "give a longer text or a shorter context"
            )
    return TextSplits(train, val, tokenizer, sha256)


# ---- token files


class _PlaceInFile(NamedTuple):
    """Where tokens lie in a token file.

    Args:
        path: Path of the file.
        dtype: Dtype of a token.
        offset: Bytes before the first one.
        num_tokens: How many there are.
    """

    path: Path
    dtype: np.dtype
    offset: int
    num_tokens: int

    def mapped(self) -> np.ndarray:
        """The tokens, memory-mapped."""
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.num_tokens,))


def _place_in_file(tokens: np.ndarray) -> _PlaceInFile | None:
    """Where memory-mapped tokens lie; None for tokens that are in memory."""
    whole: Any = tokens
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    if not isinstance(whole, np.memmap) or whole.filename is None:
        return None
    if not len(tokens) or not tokens.flags.c_contiguous:
        return None
    first = tokens.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return _PlaceInFile(Path(whole.filename), tokens.dtype, whole.offset + first, len(tokens))


class _Prepared(NamedTuple):
    """A text that can be trained on.

    Args:
        tokens: [T], memory-mapped.
        tokenizer: Tokenizer of the text.
    """

    tokens: np.ndarray
    tokenizer: Tokenizer


@dataclass(frozen=True)
class _TokenFile:
    """The two files of a prepared text.

    Args:
        stem: Path of both, without the suffix.
        text_sha256: SHA-256 of the text.
    """

    stem: Path
    text_sha256: str

    @property
    def tokens_path(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}.bin")

    @property
    def meta_path(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}.json")

    @property
    def lock_path(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}.lock")

    def read(self, report: bool = False) -> _Prepared | None:
        """What a finished file holds; None for one that is unfinished, damaged or foreign.

        Args:
            report: Say so on stderr if it is damaged.

        Raises:
            OSError: A file that is there and cannot be read.
        """
        try:
            saved = json.loads(self.meta_path.read_bytes())
            if saved["format"] != FORMAT:
                return None
            return self._checked(saved["sha256"], saved["meta"])
        except FileNotFoundError:
            return None
        except OSError:
            raise
        except Exception as error:  # whatever JSON, numpy and tokenizers make of damage
            if report:
                reason = str(error) if isinstance(error, _DamagedError) else "it is damaged"
                print(f"{self.meta_path}: {reason}; it is made again", file=sys.stderr, flush=True)
            return None

    def _checked(self, meta_sha256: str, meta: dict[str, Any]) -> _Prepared:
        if _sha256_of_json(meta) != meta_sha256:
            raise _DamagedError("its checksum does not match")
        num_bytes = meta["num_tokens"] * np.dtype(meta["dtype"]).itemsize
        if self.tokens_path.stat().st_size != num_bytes:
            raise _DamagedError(f"{self.tokens_path.name} has another size than it says")
        with open(self.tokens_path, "rb") as file:
            tokens_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if tokens_sha256 != meta["tokens_sha256"]:
            raise _DamagedError(f"the checksum of {self.tokens_path.name} does not match")
        tokens = np.memmap(self.tokens_path, dtype=meta["dtype"], mode="r")
        return _Prepared(tokens, tokenizer_from_json(meta["tokenizer"]))

    def write(self, tokens: list[np.ndarray], tokenizer: Tokenizer) -> _Prepared:
        """Write both files.

        Args:
            tokens: Parts of the text, each [t], all of one dtype.
            tokenizer: Tokenizer of the text.
        """
        digest = hashlib.sha256()
        for part in tokens:
            digest.update(part)  # pyright: ignore[reportArgumentType]
        meta = {
            "dtype": tokens[0].dtype.str,
            "text_sha256": self.text_sha256,
            "tokens_sha256": digest.hexdigest(),
            "num_tokens": sum(map(len, tokens)),
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": tokenizer.as_json(),
        }
        saved = {"format": FORMAT, "sha256": _sha256_of_json(meta), "meta": meta}
        write_atomically(self.tokens_path, *tokens)  # pyright: ignore[reportArgumentType]
        write_atomically(self.meta_path, json.dumps(saved).encode())
        return _Prepared(np.memmap(self.tokens_path, meta["dtype"], mode="r"), tokenizer)

    def remove_unfinished(self) -> None:
        """Remove what a process that was killed has left; only while nobody else writes."""
        for unfinished in self.stem.parent.glob(f"{self.stem.name}.*.partial"):
            unfinished.unlink(missing_ok=True)


class _DamagedError(ValueError):
    """A token file that is not as it was written."""


def _sha256_of_json(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _prepare(path: Path, config: TextData, file: _TokenFile) -> _Prepared:
    """Tokenize a text, write both files, and return what `file.read()` will."""
    try:
        text = _read(path, file.text_sha256)
        tokenizer = make_tokenizer(config.tokenizer, text, config.bpe_vocab_size)
        dtype = "<u2" if tokenizer.vocab_size <= 65535 else "<u4"
        tokens = []
        for piece in _with_progress(pieces(text), len(text), path):
            tokens.append(np.array(tokenizer.encode(piece), dtype))
    except MemoryError:
        raise ValueError(
            f"{path} does not fit into memory as a whole: give a part of it, or a machine with more"
        ) from None
    return file.write(tokens, tokenizer)


def _prepared(path: Path, config: TextData, cache: Path) -> tuple[np.ndarray, Tokenizer, str]:
    """(The tokens of a text, [T] memory-mapped, its tokenizer and its sha256)."""
    kind = _tokenizer_key(config)
    sha256 = _sha256(path)
    file = _TokenFile(cache / f"{sha256}-{kind}", sha256)
    try:
        found = file.read()
        if found is None:
            cache.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(file.lock_path) as alone:
                if alone:
                    file.remove_unfinished()
                # another process may have prepared it while this one waited
                found = file.read(report=True) or _prepare(path, config, file)
    except OSError as error:
        if error.errno is None:
            raise  # about the text, and already one line
        where = error.filename2 or error.filename or cache
        raise OSError(
            f"cannot keep the tokens of {path} in {cache}: {error.strerror} ({where}); "
            "free some space there, make it writable, or choose another data.cache_dir"
        ) from error
    return found.tokens, found.tokenizer, sha256


def _with_progress(parts: Iterator[str], num_characters: int, path: Path) -> Iterator[str]:
    """The pieces of a text; where they take long, a line on stderr says how far it is."""
    done = 0
    told = time.monotonic()
    for part in parts:
        yield part
        done += len(part)
        if time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            share = f"{done / num_characters:.0%} of {num_characters:,} characters"
            print(f"making tokens of {path}, once: {share}", file=sys.stderr, flush=True)


def _tokenizer_key(config: TextData) -> str:
    """Which tokenizer, for the name of a token file: as it is written, or by its content."""
    if config.tokenizer == "char":
        return "char"
    if config.tokenizer == "bpe":
        return f"bpe{config.bpe_vocab_size}"
    path = user_path(config.tokenizer, "data.tokenizer")
    BPETokenizer.read(path)  # says what is wrong with it, before the text is read
    return f"own{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


@contextlib.contextmanager
def _one_at_a_time(lock_path: Path) -> Iterator[bool]:
    """Only one process at a time gets in; yields whether that is sure.

    It only saves work: without locks, as on some network disks, all processes do the same work. The
    lock of a process that is killed is free again, even if it was stopped by SIGKILL.
    """
    with open(lock_path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone  # closing the file lets the next one in, and so does the end of the process


# ---- reading the text

TEXTS = ("text", "gzip")
EXPECTED = "UTF-8 text"
UNPACKED = "write its text into a file of its own"
REMEDIES = {
    "UTF-16": "convert it, iconv -f UTF-16 -t UTF-8 IN > OUT",
    "UTF-32": "convert it, iconv -f UTF-32 -t UTF-8 IN > OUT",
    "other text": "convert it, for example with iconv -f LATIN1 -t UTF-8 IN > OUT",
    "json": "write out its texts, with <|endoftext|> between them",
    "parquet": UNPACKED,
    "arrow": UNPACKED,
    "folder": "name one of its files",
    "empty folder": "name a file",
    "hdf5": "write its tokens as one array with numpy.save (.npy), or its text into a file",
    "parquet folder": UNPACKED,
    "arrow folder": UNPACKED,
    "pdf": UNPACKED,
    "document": UNPACKED,
    "sqlite": UNPACKED,
    "megatron": "name the .bin beside it, which holds the tokens",
    "npz": "give one array, as numpy.save writes it (.npy)",
    "torch": "give tokens as numpy.save writes them (.npy), or the text",
    "old torch": "give tokens as numpy.save writes them (.npy), or the text",
    "pickle": "it is not opened, since that would run what it holds; give tokens as numpy.save "
    "writes them (.npy), or the text",
    "empty": "give a file with some text",
    "unknown": "give a text, or tokens as nanoGPT (.bin) or numpy (.npy) writes them",
}


def _kind(path: Path) -> Kind:
    """What a path leads to: a text, or tokens.

    What cannot be opened is reported by the code that opens it.

    Raises:
        ValueError: Something else.
    """
    check_is_file(path, "text")
    try:
        kind = kind_of(path)
        if kind.name == "gzip":
            with gzip.open(path) as file:
                head = file.read(LOOK_BYTES)
            inside = kind_of_bytes(head, Path(path.stem), len(head))
            if inside.name in token_files.KINDS:
                raise ValueError(f"{path} is {inside.words}, packed with gzip: unpack it")
            kind = kind if inside.name in TEXTS else inside
    except (OSError, EOFError, zlib.error):
        return Kind("text", "a text")
    if kind.name in {*TEXTS, *token_files.KINDS, "missing"}:
        return kind
    raise ValueError(kind.is_not(path, EXPECTED, REMEDIES))


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """A plain or gzipped file, for reading bytes; whatever is wrong with it becomes one line."""
    check_is_file(path, "text")
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if zipped:
                yield gzip.GzipFile(fileobj=file)  # pyright: ignore[reportReturnType]
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} is a broken gzip file ({error}): copy or pack it again"
        ) from error
    except OSError as error:
        raise OSError(
            f"text {path} cannot be read: {error.strerror}; give the path of a text file"
        ) from error


def _chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a text, unpacked, one part after another."""
    num_bytes = 0
    with _open(path) as file:
        while chunk := file.read(READ_BYTES):
            num_bytes += len(chunk)
            if num_bytes > MOST_TEXT_BYTES:
                raise ValueError(
                    f"{path} holds more than {si(MOST_TEXT_BYTES, 'B')} of text, and a text is "
                    "read into memory whole: give a part of it"
                )
            yield chunk


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def _read(path: Path, sha256: str) -> str:
    """The text whose checksum was found before."""
    content = bytearray()
    for chunk in _chunks(path):
        content += chunk
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(
            f"{path} changed while it was read: start again when it is complete, or copy it first"
        )
    try:
        text = content.decode("utf-8-sig")  # without the mark that some Windows programs put first
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {content[error.start]:#04x} at position "
            f"{error.start}): convert it, for example with iconv"
        ) from None
    if not text:
        raise ValueError(f"{path} is empty: give a file with some text")
    return text
