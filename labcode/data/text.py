"""Text as a memory-mapped file of tokens: prepared once, then read by any number of ranks without loading it.

    <cache>/<sha256 of the text>-<tokenizer>.bin     tokens, raw little-endian uint16 (uint32 for more than 65535 of them)
    <cache>/<sha256 of the text>-<tokenizer>.json    how to read it: tokenizer, number of tokens; written last, so that
                                                     a .bin without it does not count

Shapes: B windows, S tokens of context.
"""

import contextlib
import fcntl
import gzip
import hashlib
import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from labcode.config import TextData
from labcode.data.tokenizer import (
    BPETokenizer,
    CharTokenizer,
    make_tokenizer,
    pieces,
    tokenizer_from_json,
)
from labcode.files import write_atomically

SHAKESPEARE = Path(__file__).parents[1] / "assets" / "shakespeare.txt.gz"
FORMAT = 1  # of the token files: those of another format are made anew


class TextDataset:
    """Windows of S+1 tokens, the next one beginning with the last token of the one before: each token is predicted once.

    Args:
        tokens: [T] integers, usually a part of a memory-mapped file.
        context_length: S
    """

    def __init__(self, tokens: np.ndarray, context_length: int):
        self.tokens, self.context_length = np.asarray(tokens), context_length

    def __len__(self):
        """Number of windows, `(T - 1) // S`."""
        return max(0, len(self.tokens) - 1) // self.context_length

    def __getitem__(self, indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each [B, S] int64, for an array or list of B window numbers; [S] for a single number.

        Raises:
            IndexError: A number beyond the last window.
        """
        indices = np.asarray(indices, dtype=np.int64)
        outside = indices[(indices < 0) | (indices >= len(self))]
        if outside.size:
            raise IndexError(
                f"there is no window {outside[0]}: they count from 0 to {len(self) - 1}"
            )
        places = indices[..., None] * self.context_length + np.arange(
            self.context_length + 1
        )  # [B, S+1]
        windows = torch.from_numpy(self.tokens[places].astype(np.int64))
        return windows[..., :-1].contiguous(), windows[..., 1:].contiguous()

    def unigram_entropy(self) -> float:
        """The loss in nats per token of a model that knows how often each token comes, and nothing else.

            H = -sum_v p(v) ln p(v)

        Source: Shannon 1948, section 6.
        """
        p = np.bincount(self.tokens) / len(self.tokens)
        return float(-(p[p > 0] * np.log(p[p > 0])).sum())


@dataclass(frozen=True)
class TextSplits:
    """Training and validation windows of one text, and what turns tokens back into characters."""

    train: TextDataset
    val: TextDataset
    tokenizer: CharTokenizer | BPETokenizer


def load(config: TextData, context_length: int, cache_dir: str | Path | None = None) -> TextSplits:
    """The text of a config as windows of tokens, its last `val_fraction` kept for validation; prepared on first use.

    The vocabulary is that of the whole text. Several ranks may call this at once: one prepares, the others wait for it.

    Args:
        config: What to read.
        context_length: S, tokens in one window.
        cache_dir: Where token files are kept; None: `~/.cache/labcode`.

    Raises:
        ValueError: A text that is empty, not UTF-8, or too short for one window in each part.
        OSError: A text that cannot be read, or no space for its token file; an unfinished file is removed.
    """
    path = Path(config.path).expanduser() if config.path else SHAKESPEARE
    tokens, tokenizer = _prepared(
        path, config, Path(cache_dir) if cache_dir else Path.home() / ".cache" / "labcode"
    )
    num_val = math.ceil(len(tokens) * config.val_fraction)
    train, val = (
        TextDataset(part, context_length)
        for part in (tokens[: len(tokens) - num_val], tokens[len(tokens) - num_val :])
    )
    for part, dataset in (("training", train), ("validation", val)):
        if not len(dataset):
            raise ValueError(
                f"{path} is too short: {len(tokens)} tokens leave {len(dataset.tokens)} for {part} "
                f"(val_fraction={config.val_fraction}), one window of context_length={context_length} needs "
                f"{context_length + 1}: give a longer text or a shorter context"
            )
    return TextSplits(train, val, tokenizer)


def _prepared(path, config, cache):
    """The tokens [T] of a text, memory-mapped, and its tokenizer; made here unless a complete file is there."""
    kind = "char" if config.tokenizer == "char" else f"bpe{config.bpe_vocab_size}"
    stem = f"{_sha256(path)}-{kind}"
    tokens_path, meta_path = cache / f"{stem}.bin", cache / f"{stem}.json"
    try:
        if not (found := _complete(tokens_path, meta_path)):
            cache.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(cache / f"{stem}.lock"):
                found = _complete(tokens_path, meta_path) or _prepare(
                    path, config, tokens_path, meta_path
                )
    except OSError as error:
        if error.errno is None:
            raise  # about the text, and already one line
        raise OSError(
            f"cannot keep the tokens of {path} in {cache}: {error.strerror}; free some space there or make it writable"
        ) from error
    meta, tokenizer = found
    return np.memmap(tokens_path, dtype=meta["dtype"], mode="r"), tokenizer


def _prepare(path, config, tokens_path, meta_path):
    """Makes and writes both files; returns what `_complete` will say of them."""
    text = _read(path)
    tokenizer = make_tokenizer(config.tokenizer, text, config.bpe_vocab_size)
    dtype = "<u2" if tokenizer.vocab_size <= 65535 else "<u4"
    tokens = [np.array(tokenizer.encode(piece), dtype) for piece in pieces(text)]
    meta = {
        "format": FORMAT,
        "dtype": dtype,
        "text_sha256": tokens_path.name.split("-")[0],
        "num_tokens": sum(map(len, tokens)),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.as_json(),
    }
    write_atomically(tokens_path, *tokens)
    write_atomically(meta_path, json.dumps(meta).encode())
    return meta, tokenizer


def _complete(tokens_path, meta_path):
    """(meta, tokenizer) of a finished token file, or None: unfinished, damaged and foreign files are made anew."""
    try:
        meta = json.loads(meta_path.read_text())
        if (
            meta["format"] != FORMAT
            or tokens_path.stat().st_size != meta["num_tokens"] * np.dtype(meta["dtype"]).itemsize
        ):
            return None
        return meta, tokenizer_from_json(meta["tokenizer"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _open(path):
    """A plain or gzipped file, for reading bytes; whatever is wrong with it becomes one line."""
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            yield gzip.GzipFile(fileobj=file) if zipped else file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} is a broken gzip file ({error}): copy or pack it again"
        ) from error
    except OSError as error:
        raise OSError(
            f"text {path} cannot be read: {error.strerror}; give the path of a text file"
        ) from error


def _sha256(path):
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path):
    with _open(path) as file:
        content = file.read()
    try:
        text = content.decode("utf-8-sig")  # without the mark that some Windows programs put first
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {content[error.start]:#04x} at position {error.start}): convert it, for "
            "example with iconv"
        ) from None
    if not text:
        raise ValueError(f"{path} is empty: give a file with some text")
    return text


@contextlib.contextmanager
def _one_at_a_time(lock_path):
    """Only one process at a time gets in. It saves work; without locks, as on some network disks, all do the same work."""
    with open(lock_path, "w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file lets the next one in, and so does the end of the process
