"""Tokens that another program has made, in place of a text.

    train.bin    numbers of 2 or 4 bytes without a header, as nanoGPT's prepare.py writes them
    *.bin        the same behind a header of 256 numbers, as llm.c writes them
    *.npy        an array of whole numbers in one row; OLMo's have no header, as nanoGPT's

Their text is not there. With `data.tokenizer=FILE.json` a sample can be written as text; without
it, as numbers.

Source: data/openwebtext/prepare.py in nanoGPT; dev/data/data_common.py in llm.c;
    docs/source/guides/data_loading.rst in OLMo-core.
Held by: tests/unit/test_token_files.py
"""

import hashlib
import sys
from pathlib import Path

import numpy as np

from labcode.config import TextData
from labcode.data.paths import user_path
from labcode.data.tokenizer import BPETokenizer, TokenNumbers
from labcode.runtime.file_kinds import Kind
from labcode.runtime.units import si

HEADER_BYTES = 1024
# {what a file is: (dtype of a token, bytes before the first)}
LAYOUTS = {
    "tokens 2": ("<u2", 0),
    "tokens 4": ("<u4", 0),
    "llm.c 2": ("<u2", HEADER_BYTES),
    "llm.c 4": ("<u4", HEADER_BYTES),
}
KINDS = {*LAYOUTS, "npy"}
READ_TOKENS = 2**24  # at once
SLOW_BYTES = 2 * 10**9  # of which more take longer than a few seconds


def read(
    path: Path, kind: Kind, config: TextData
) -> tuple[np.ndarray, BPETokenizer | TokenNumbers, str]:
    """The tokens of a file.

    Args:
        path: Path of the file.
        kind: What it is, one of `KINDS`.
        config: Its tokenizer counts where it is a file.

    Returns:
        ([T] memory-mapped, their tokenizer, their sha256).

    Raises:
        ValueError: It holds no row of whole numbers, none of them, or one that the tokenizer has
            not.
    """
    tokens = _array(path) if kind.name == "npy" else _raw(path, *LAYOUTS[kind.name])
    if len(tokens) == 0:
        raise ValueError(f"{path} holds no tokens: give a file with some")
    if tokens.nbytes > SLOW_BYTES:
        print(f"looking through {si(tokens.nbytes, 'B')} of tokens in {path}", file=sys.stderr)
    digest = hashlib.sha256()
    largest = 0
    least = 0
    for start in range(0, len(tokens), READ_TOKENS):
        part = np.ascontiguousarray(tokens[start : start + READ_TOKENS])
        digest.update(part.data)
        largest = max(largest, int(part.max()))
        least = min(least, int(part.min()))
    if least < 0:
        raise ValueError(f"{path} holds the number {least}, and a token has none below 0")
    if config.tokenizer in ("char", "bpe"):
        return tokens, TokenNumbers(largest + 1), digest.hexdigest()
    tokenizer = BPETokenizer.read(user_path(config.tokenizer, "data.tokenizer"))
    if largest >= tokenizer.vocab_size:
        raise ValueError(
            f"{path} holds the token {largest}, and data.tokenizer={config.tokenizer} has "
            f"{tokenizer.vocab_size}: give the tokenizer that these tokens are of"
        )
    return tokens, tokenizer, digest.hexdigest()


def _raw(path: Path, dtype: str, offset: int) -> np.ndarray:
    num_tokens = (path.stat().st_size - offset) // np.dtype(dtype).itemsize
    if num_tokens <= 0:
        return np.empty(0, dtype)
    if offset:
        said = int(np.fromfile(path, "<i4", 3)[2])  # after a magic number and a version
        if said != num_tokens:
            raise ValueError(
                f"{path} says that it has {said} tokens, and has {num_tokens}: it is damaged or "
                "only a part of the file; copy or download it again"
            )
    return np.memmap(path, dtype, "r", offset, (num_tokens,))


def _array(path: Path) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path} is a numpy array that cannot be read ({reason}): if it is only a part of the "
            "file, copy it again"
        ) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        shape = " x ".join(map(str, tokens.shape)) or "one number"
        raise ValueError(
            f"{path} is a numpy array of {shape} {tokens.dtype}, and tokens are whole numbers in "
            "one row: write them so, or give the text"
        )
    return tokens
