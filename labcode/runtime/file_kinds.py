"""What a file is, from its first bytes, its name and its size: looked at before it is judged.

    kind_of(Path("train.bin")).words     "token numbers of 2 bytes (uint16) without a header"

A reader says what it takes, and `is_not` makes the one line about anything else: what was found,
what was expected, what to do. Nothing is unpacked or run, and no package is needed.

Source: the magic numbers stand in the specifications of the formats: HDF5 (its signature is at 0 or
    at 512, 1024, ...), netCDF classic ("CDF" and a version), GRIB and BUFR (section 0), Parquet,
    Arrow IPC, npy (numpy.lib.format), zip, gzip (RFC 1952), zstd (RFC 8878), tar (offset 257),
    safetensors (8 bytes of length, then JSON), Git LFS pointers, pickle protocols 2 to 5, the token
    files of llm.c and of Megatron.
Held by: tests/unit/test_file_kinds.py
"""

import json
import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

LOOK_BYTES = 2**16
# {first bytes: (name, what it is)}
SIGNATURES = {
    b"\x1f\x8b": ("gzip", "a gzip file"),
    b"BZh": ("packed", "a bzip2 file"),
    b"\xfd7zXZ\x00": ("packed", "an xz file"),
    b"\x28\xb5\x2f\xfd": ("packed", "a Zstandard file"),
    b"7z\xbc\xaf\x27\x1c": ("packed", "a 7-Zip archive"),
    b"\x93NUMPY": ("npy", "a numpy array (.npy)"),
    b"PAR1": ("parquet", "a Parquet table"),
    b"ARROW1": ("arrow", "an Arrow table"),
    b"Obj\x01": ("avro", "an Avro table"),
    b"SQLite format 3\x00": ("sqlite", "an SQLite database"),
    b"\x89HDF\r\n\x1a\n": ("hdf5", "an HDF5 or netCDF-4 file"),
    b"\x0e\x03\x13\x01": ("hdf4", "an HDF4 file, which HDF5 does not read"),
    b"CDF\x01": ("netcdf3", "a netCDF-3 file (classic)"),
    b"CDF\x02": ("netcdf3", "a netCDF-3 file (64-bit offset)"),
    b"CDF\x05": ("netcdf5", "a netCDF file of the kind CDF-5 (64-bit data)"),
    b"GRIB": ("grib", "a GRIB file"),
    b"BUFR": ("bufr", "a BUFR file of observations"),
    b"II*\x00": ("tiff", "a TIFF image"),
    b"MM\x00*": ("tiff", "a TIFF image"),
    b"GGUF": ("gguf", "weights in llama.cpp's format (GGUF)"),
    b"MMIDIDX\x00\x00": ("megatron", "the index of a token file of Megatron (.idx)"),
    b"%PDF-": ("pdf", "a PDF document"),
    b"\xd0\xcf\x11\xe0": ("document", "a document of an old Office"),
    b"{\\rtf": ("document", "a document in RTF"),
    b"\x89PNG": ("image", "an image"),
    b"\xff\xd8\xff": ("image", "an image"),
    b"\x7fELF": ("program", "a program"),
    struct.pack("<ii", 20240520, 1): ("llm.c 2", "token numbers of 2 bytes, as llm.c writes them"),
    struct.pack("<ii", 20240801, 7): ("llm.c 4", "token numbers of 4 bytes, as llm.c writes them"),
    struct.pack("<i", 20240520): ("llm.c", "token numbers of a version of llm.c not known here"),
    struct.pack("<i", 20240801): ("llm.c", "token numbers of a version of llm.c not known here"),
    # the magic number with which torch.save began until version 1.6
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": ("old torch", "a file of an older torch.save"),
    b"version https://git-lfs": ("lfs", "a Git LFS pointer: the file itself was not downloaded"),
}
# {what to do with it}
REMEDIES = {
    "empty": "copy or download it again",
    "lfs": "run `git lfs pull` in that repository, or download it again",
    "html": "download it again and look at the address: a page came in place of the file",
    "missing": "look at the path",
    "packed": "unpack it",
    "tar": "unpack it",
    "zip": "unpack it",
}
MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
OBJECT = re.compile(rb'\{\s*"[^"\\]{1,100}"\s*:')
PICKLE = re.compile(rb"\x80[\x02-\x05]")
CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b\b")) + b"\x7f"
ZIP_NAMES = {
    b".npy": ("npz", "a numpy archive (.npz)"),
    b"data.pkl": ("torch", "a file of torch.save"),
    b"[Content_Types].xml": ("document", "a document of Office (.docx, .xlsx)"),
    b"mimetype": ("document", "a document or book (.odt, .epub)"),
    b".zgroup": ("zip", "a zarr store in a zip file"),
    b"zarr.json": ("zip", "a zarr store in a zip file"),
}


class Kind(NamedTuple):
    """What a file is.

    Args:
        name: Name for programs, such as "npy".
        words: Words for people, such as "a numpy array (.npy)".
    """

    name: str
    words: str

    def is_not(self, path: Path, expected: str, remedies: dict[str, str] | None = None) -> str:
        """One line: the file is this, and not what was expected.

        Args:
            path: Path of the file.
            expected: What it should have been, such as "a text".
            remedies: {name: what to do}, where the reader knows more than this module.
        """
        found = (remedies or {}).get(self.name) or REMEDIES.get(self.name)
        line = f"{path} is {self.words}, not {expected}"
        return f"{line}: {found}" if found else line


def kind_of(path: Path) -> Kind:
    """What a path leads to.

    Raises:
        OSError: It is there and cannot be read.
    """
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        return Kind("missing", "not there")
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(LOOK_BYTES)
        file.seek(max(0, size - 4))
        tail = file.read(4)
    return kind_of_bytes(head, path, size, tail)


def kind_of_bytes(head: bytes, path: Path, size: int, tail: bytes = b"") -> Kind:
    """What some bytes are, such as those that a gzip file holds.

    Args:
        head: The first `LOOK_BYTES` of them, or all.
        path: Path of the file, for its suffix.
        size: How many there are.
        tail: The last ones.
    """
    if size == 0:
        return Kind("empty", "an empty file")
    for signature, found in SIGNATURES.items():
        if head.startswith(signature):
            return Kind(*found)
    if any(head[place : place + 8] == b"\x89HDF\r\n\x1a\n" for place in (512, 1024, 2048)):
        return Kind("hdf5", "an HDF5 or netCDF-4 file")
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _zip(head, path)
    if head[257:262] == b"ustar":
        return Kind("tar", "a tar archive")
    if _is_safetensors(head, size):
        return Kind("safetensors", "a safetensors file")
    if PICKLE.match(head) and tail.endswith(b"."):
        return Kind("pickle", "a pickle")
    return _text(head, path) or _numbers(head, size, path)


def _folder(path: Path) -> Kind:
    names = set(os.listdir(path))
    if path.suffix == ".zarr" or names & {".zgroup", ".zarray", ".zmetadata", "zarr.json"}:
        return Kind("zarr", "a zarr store")
    if not names:
        return Kind("empty folder", "an empty folder")
    for suffix, words in ((".arrow", "Arrow"), (".parquet", "Parquet")):
        if any(name.endswith(suffix) for name in names):
            return Kind(suffix[1:] + " folder", f"a folder of {words} tables")
    return Kind("folder", "a folder")


def _zip(head: bytes, path: Path) -> Kind:
    length = int.from_bytes(head[26:28], "little")
    first = head[30 : 30 + length]
    for ending, found in ZIP_NAMES.items():
        if first.endswith(ending):
            return Kind(*found)
    if path.suffix == ".npz":
        return Kind("npz", "a numpy archive (.npz)")
    return Kind("zip", "a zip archive")


def _is_safetensors(head: bytes, size: int) -> bool:
    if len(head) < 9:
        return False
    length = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and 2 <= length <= size - 8


def _text(head: bytes, path: Path) -> Kind | None:
    """A text and its encoding; None for what is no text."""
    for mark, name in MARKS.items():
        # numbers begin with these bytes too
        if head.startswith(mark) and path.suffix != ".bin":
            return Kind(name, f"text in {name}")
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:200].lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return Kind("html", "a page of HTML")
    if head.count(b"\x00") or len(head.translate(None, CONTROL)) < 0.99 * len(head):
        return None
    whole = len(head) < LOOK_BYTES
    try:
        head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        cut = not whole and error.start >= len(head) - 4  # in the middle of a character
        if not cut:
            return _eight_bit(head, error)
    if _is_json_lines(head):
        return Kind("json", "JSON, a document to a line")
    return Kind("text", "a text")


def _eight_bit(head: bytes, error: UnicodeDecodeError) -> Kind | None:
    """Text in an encoding of one byte or two a character, which is mostly letters all the same."""
    plain = sum(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head[:4096])
    where = f"(byte {head[error.start]:#04x} at position {error.start})"
    lines = b"\n" in head or plain == len(head[:4096]) - 1
    # of random bytes 38 % are printable ASCII and 56 % above it
    if plain > 0.6 * len(head[:4096]) or (lines and b" " in head and len(head) < 64):
        return Kind("other text", f"text in another encoding {where}")
    return None


def _is_json_lines(head: bytes) -> bool:
    first, *more = head.lstrip(b"\xef\xbb\xbf").split(b"\n")
    first = first.strip()
    if not first.startswith(b"{"):
        return False
    if not more and len(head) >= LOOK_BYTES:  # of a long document only the beginning is here
        return OBJECT.match(first) is not None
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _numbers(head: bytes, size: int, path: Path) -> Kind:
    """Raw numbers, such as tokens; else nothing that is known."""
    # OLMo writes them as .npy, without numpy's header
    if path.suffix in (".bin", ".u16", ".u32", ".tokens", ".tok", ".raw", ".npy", ".memmap"):
        pairs = len(head) // 4
        halves = struct.unpack(f"<{2 * pairs}H", head[: 4 * pairs])
        lower = max(halves[::2], default=0)
        upper = max(halves[1::2], default=0)
        # The upper half of a token of 4 bytes is zero, or small beside the lower one; of tokens of
        # 2 bytes the two are as large, however few letters an alphabet has.
        if pairs and size % 4 == 0 and upper < 16 and upper <= lower // 64:
            return Kind("tokens 4", "token numbers of 4 bytes (uint32) without a header")
        if size % 2 == 0:
            return Kind("tokens 2", "token numbers of 2 bytes (uint16) without a header")
    return Kind("unknown", "no kind of file that is known here")
