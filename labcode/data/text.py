"""Text as a memory-mapped file of tokens.

It is prepared once, then read by any number of ranks without loading it.

    <cache>/<sha256 of the text>-<tokenizer>.bin     tokens, raw little-endian uint16
                                                     (uint32 for more than 65535 of them)
    <cache>/<sha256 of the text>-<tokenizer>.json    how to read it: tokenizer, number of tokens;
                                                     written last, so that a .bin without it does
                                                     not count

Shapes: B windows, S tokens of context.
"""

import contextlib
import fcntl
import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from labcode.config import TextData
from labcode.data.tokenizer import Tokenizer, make_tokenizer, pieces, tokenizer_from_json
from labcode.files import write_atomically

SHAKESPEARE = Path(__file__).parents[1] / "assets" / "shakespeare.txt.gz"
CACHE = Path.home() / ".cache" / "labcode"
FORMAT = 1  # of the token files: those of another format are made again


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
        tokenizer: Of this text.
        sha256: Of the text as it was read, unpacked: a run that resumes must find the same.
    """

    train: TextDataset
    val: TextDataset
    tokenizer: Tokenizer
    sha256: str


def load(config: TextData, context_length: int, cache_dir: str | Path | None = None) -> TextSplits:
    """The text of a config as windows of tokens, its last `val_fraction` kept for validation.

    The text is prepared on first use. The vocabulary is that of the whole text. Several ranks may
    call this at once: one prepares, the others wait for it.

    Args:
        config: What to read.
        context_length: S, tokens in one window.
        cache_dir: Where token files are kept; None is `~/.cache/labcode`.

    Raises:
        ValueError: A text that is empty, not UTF-8, or too short for one window in each part.
        OSError: A text that cannot be read, or no space for its token file; an unfinished file is
            removed.
    """
    path = Path(config.path).expanduser() if config.path else SHAKESPEARE
    cache = Path(cache_dir) if cache_dir else CACHE
    tokens, tokenizer, sha256 = _prepared(path, config, cache)
    num_train = len(tokens) - math.ceil(len(tokens) * config.val_fraction)
    train = TextDataset(tokens[:num_train], context_length)
    val = TextDataset(tokens[num_train:], context_length)
    for part, dataset in (("training", train), ("validation", val)):
        if len(dataset) == 0:
            raise ValueError(
                f"{path} is too short: {len(tokens)} tokens leave {len(dataset.tokens)} for {part} "
                f"(val_fraction={config.val_fraction}), one window of "
                f"context_length={context_length} needs {context_length + 1}: "
                "give a longer text or a shorter context"
            )
    return TextSplits(train, val, tokenizer, sha256)


# ---- token files


@dataclass(frozen=True)
class _TokenFile:
    """The two files of a prepared text."""

    tokens_path: Path
    meta_path: Path
    text_sha256: str

    def read(self) -> tuple[dict[str, Any], Tokenizer] | None:
        """(meta, tokenizer) of a finished file; None for one that is unfinished, damaged or
        foreign.
        """
        try:
            meta = json.loads(self.meta_path.read_text())
            num_bytes = meta["num_tokens"] * np.dtype(meta["dtype"]).itemsize
            if meta["format"] != FORMAT or self.tokens_path.stat().st_size != num_bytes:
                return None
            return meta, tokenizer_from_json(meta["tokenizer"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None


def _prepare(path: Path, config: TextData, file: _TokenFile) -> tuple[dict[str, Any], Tokenizer]:
    """Tokenize a text, write both files, and return what `file.read()` will."""
    text = _read(path)
    tokenizer = make_tokenizer(config.tokenizer, text, config.bpe_vocab_size)
    dtype = "<u2" if tokenizer.vocab_size <= 65535 else "<u4"
    tokens = [np.array(tokenizer.encode(piece), dtype) for piece in pieces(text)]
    meta = {
        "format": FORMAT,
        "dtype": dtype,
        "text_sha256": file.text_sha256,
        "num_tokens": sum(map(len, tokens)),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.as_json(),
    }
    write_atomically(file.tokens_path, *tokens)  # pyright: ignore[reportArgumentType]
    write_atomically(file.meta_path, json.dumps(meta).encode())
    return meta, tokenizer


def _prepared(path: Path, config: TextData, cache: Path) -> tuple[np.ndarray, Tokenizer, str]:
    """(The tokens of a text, [T] memory-mapped, its tokenizer and its sha256)."""
    kind = "char" if config.tokenizer == "char" else f"bpe{config.bpe_vocab_size}"
    sha256 = _sha256(path)
    stem = f"{sha256}-{kind}"
    file = _TokenFile(cache / f"{stem}.bin", cache / f"{stem}.json", sha256)
    try:
        found = file.read()
        if found is None:
            cache.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(cache / f"{stem}.lock"):
                # another process may have prepared it while this one waited
                found = file.read() or _prepare(path, config, file)
    except OSError as error:
        if error.errno is None:
            raise  # about the text, and already one line
        raise OSError(
            f"cannot keep the tokens of {path} in {cache}: {error.strerror}; "
            "free some space there or make it writable"
        ) from error
    meta, tokenizer = found
    tokens = np.memmap(file.tokens_path, dtype=meta["dtype"], mode="r")
    return tokens, tokenizer, sha256


@contextlib.contextmanager
def _one_at_a_time(lock_path: Path) -> Iterator[None]:
    """Only one process at a time gets in.

    It only saves work: without locks, as on some network disks, all processes do the same work.
    """
    with open(lock_path, "w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file lets the next one in, and so does the end of the process


# ---- reading the text


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """A plain or gzipped file, for reading bytes; whatever is wrong with it becomes one line."""
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            yield gzip.GzipFile(fileobj=file) if zipped else file  # pyright: ignore[reportReturnType]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} is a broken gzip file ({error}): copy or pack it again"
        ) from error
    except OSError as error:
        raise OSError(
            f"text {path} cannot be read: {error.strerror}; give the path of a text file"
        ) from error


def _sha256(path: Path) -> str:
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


def _read(path: Path) -> str:
    with _open(path) as file:
        content = file.read()
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
