"""Text files: encodings, line ends, gzip, devices, sizes, and paths that lead nowhere."""

import gzip
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..cases import EITHER, REFUSED, TRAINS, Case

FILE = "mine.txt"
WORDS = b"to be or not to be, that is the question\n" * 200
BPE = ("--data.tokenizer=bpe", "--data.bpe_vocab_size=300")


def _put(content: bytes, folder: Path) -> None:
    (folder / FILE).write_bytes(content)


def _random_words(seed: int) -> bytes:
    rng = random.Random(seed)
    words = [bytes(rng.choices(b"abcdefghij", k=rng.randint(1, 8))) for _ in range(2000)]
    return b" ".join(words) + b"\n"


# content: the answer. The line must name the file.
CONTENTS: dict[str, tuple[bytes, str]] = {
    "words": (WORDS, TRAINS),
    "nothing": (b"", REFUSED),
    "one letter": (b"a", REFUSED),
    "one line break": (b"\n", REFUSED),
    "16 letters": (b"abcdefghijklmnop", REFUSED),
    "no line break": (b"abcdefgh " * 500, TRAINS),
    "one letter many times": (b"a" * 5000, TRAINS),
    "line breaks alone": (b"\n" * 5000, TRAINS),
    "spaces alone": (b" " * 5000, TRAINS),
    "CR alone": (WORDS.replace(b"\n", b"\r"), TRAINS),
    "CRLF": (WORDS.replace(b"\n", b"\r\n"), TRAINS),
    "NUL bytes": (b"\0" * 5000, TRAINS),
    "NUL between": (WORDS.replace(b" ", b"\0"), TRAINS),
    "form feeds": (WORDS.replace(b"\n", b"\f"), TRAINS),
    "the mark of Windows": (b"\xef\xbb\xbf" + WORDS, TRAINS),
    "the mark alone": (b"\xef\xbb\xbf", REFUSED),
    "UTF-16": (WORDS.decode().encode("utf-16"), REFUSED),
    "UTF-32": (WORDS.decode().encode("utf-32"), REFUSED),
    "Latin-1": (("süß und schön\n" * 300).encode("latin-1"), REFUSED),
    "a broken byte at the end": (WORDS + b"\xff", REFUSED),
    "half a character at the end": (WORDS + "ü".encode()[:1], REFUSED),
    "surrogates": (WORDS + b"\xed\xa0\x80", REFUSED),
    "emoji": (("🙂🙃 ok\n" * 500).encode(), TRAINS),
    "all of Unicode": ("".join(map(chr, range(0x20, 0xD000))).encode(), TRAINS),
    "right to left": (("שלום עולם\n" * 400).encode(), TRAINS),
    "combining marks": (("e\u0301\u0302" * 2000).encode(), TRAINS),
    "separators alone": (b"<|endoftext|>" * 2000, TRAINS),
    "separators between": (WORDS.replace(b"\n", b"<|endoftext|>"), TRAINS),
    "half a separator": (WORDS + b"<|endof", TRAINS),
    "noise": (random.Random(1).randbytes(5000), REFUSED),
    "a PNG": (b"\x89PNG\r\n\x1a\n" + bytes(5000), REFUSED),
    "a zip": (b"PK\x03\x04" + random.Random(2).randbytes(5000), REFUSED),
    "ANSI colours": (b"\x1b[31mred\x1b[0m\n" * 500, TRAINS),
    "random words": (_random_words(3), TRAINS),
}
ZIPPED = gzip.compress(WORDS, mtime=0)
GZIPS: dict[str, tuple[bytes, str]] = {
    "whole": (ZIPPED, TRAINS),
    "of nothing": (gzip.compress(b""), REFUSED),
    "the head alone": (ZIPPED[:10], REFUSED),
    "two bytes": (ZIPPED[:2], REFUSED),
    "cut in half": (ZIPPED[: len(ZIPPED) // 2], REFUSED),
    "one byte short": (ZIPPED[:-1], REFUSED),
    "noise behind": (ZIPPED + b"noise", EITHER),
    "zeros behind": (ZIPPED + bytes(100), TRAINS),
    "two after another": (ZIPPED + ZIPPED, TRAINS),
    "zipped twice": (gzip.compress(ZIPPED), REFUSED),
    "another method": (ZIPPED[:2] + b"\x07" + ZIPPED[3:], REFUSED),
    "a wrong checksum": (ZIPPED[:-8] + b"\0\0\0\0" + ZIPPED[-4:], REFUSED),
    "a wrong length": (ZIPPED[:-4] + b"\xff\0\0\0", REFUSED),
}


def cases(rng: random.Random) -> list[Case]:
    made = []
    for what, (content, answer) in CONTENTS.items():
        made.append(_case(what, content, answer))
    for what in (
        "no line break",
        "one letter many times",
        "emoji",
        "NUL bytes",
        "nothing",
        "UTF-16",
    ):
        content, answer = CONTENTS[what]
        # a letter many times is few tokens
        answer = EITHER if answer == TRAINS else answer
        made.append(_case(f"{what}, BPE", content, answer, *BPE))
    for what, (content, answer) in GZIPS.items():
        made.append(_case(f"gzip: {what}", content, answer))
    for _ in range(6):
        place = rng.randrange(10, len(ZIPPED))
        content = bytearray(ZIPPED)
        content[place] ^= 1 << rng.randrange(8)
        made.append(_case(f"gzip: a bit flipped in byte {place}", bytes(content), REFUSED))
    for what, (path, prepare, answer, names) in PATHS.items():
        words = [f"--data.path={path}", "--train.out=out"]
        made.append(Case(what, words, names, answer, prepare=prepare, replaced=["out"]))
    made.append(_case("2 MB without a break, BPE", b"abcdefgh" * 250000, EITHER, *BPE))
    made.append(_case("200 kB of random letters without a break, BPE", _letters(), EITHER, *BPE))
    made.append(
        Case(
            "a gzip bomb",
            [f"--data.path={FILE}", "--train.out=out"],
            [FILE],
            EITHER,
            prepare=_bomb,
            replaced=["out"],
        )
    )
    return made


def _case(what: str, content: bytes, answer: str, *args: str) -> Case:
    """A training on this text, with token files of its own."""
    words = [f"--data.path={FILE}", "--data.cache_dir=cache", "--train.out=out", *args]
    return Case(what, words, [FILE], answer, prepare=partial(_put, content), replaced=["cache"])


def _letters() -> bytes:
    return bytes(random.Random(4).choices(b"abcdefghijklmnopqrstuvwxyz", k=200000))


def _bomb(folder: Path) -> None:
    """4 MB that unpack to 4 GB."""
    with gzip.open(folder / FILE, "wb", compresslevel=9) as file:
        for _ in range(4096):
            file.write(b"\0" * 2**20)


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def _link(target: str, folder: Path) -> None:
    (folder / FILE).symlink_to(target)


def _link_to_text(folder: Path) -> None:
    (folder / "text").write_bytes(WORDS)
    _link("text", folder)


def _folder(folder: Path) -> None:
    (folder / FILE).mkdir()


def _named(name: str, folder: Path) -> None:
    (folder / name).write_bytes(WORDS)


Prepare = Callable[[Path], object] | None
# the path, what is prepared, the answer, words of the line
PATHS: dict[str, tuple[str, Prepare, str, list[str]]] = {
    "an empty path": ("", None, REFUSED, ["data.path"]),
    "no such file": ("nowhere.txt", None, REFUSED, ["nowhere.txt"]),
    "no such folder": ("no/where.txt", None, REFUSED, ["no/where.txt"]),
    "a folder": (FILE, _folder, REFUSED, [FILE]),
    "a pipe": ("pipe", _pipe, REFUSED, ["pipe"]),
    "/dev/zero": ("/dev/zero", None, REFUSED, ["/dev/zero"]),
    "/dev/null": ("/dev/null", None, REFUSED, ["/dev/null"]),
    "/dev/random": ("/dev/urandom", None, REFUSED, ["/dev/urandom"]),
    "a socket": ("/dev/stdin", None, REFUSED, ["/dev/stdin"]),
    "memory": ("/proc/self/mem", None, REFUSED, ["/proc/self/mem"]),
    "a link to a text": (FILE, _link_to_text, TRAINS, []),
    "a link to nothing": (FILE, partial(_link, "nowhere"), REFUSED, [FILE]),
    "a link to itself": (FILE, partial(_link, FILE), REFUSED, [FILE]),
    "nobody's home": ("~nobody-here/x.txt", None, REFUSED, ["~nobody-here"]),
    "a name with a line break": ("a\nb.txt", partial(_named, "a\nb.txt"), EITHER, ["b.txt"]),
    "a name with spaces": ("a b.txt", partial(_named, "a b.txt"), TRAINS, []),
    "a name too long": ("x" * 300, None, REFUSED, ["xxx", "name too long"]),
    "a URL": ("https://example.org/x.txt", None, REFUSED, ["example.org"]),
}
