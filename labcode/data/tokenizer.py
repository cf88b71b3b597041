"""Between text and token numbers: one token for each character, or byte-pair encoding."""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from labcode.data.paths import user_path

# between documents, here plays: one token, number 0, in both tokenizers
SEPARATOR = "<|endoftext|>"
PIECE_CHARACTERS = 2**20
# Longest string of bytes that becomes one token. Training looks through a whole word for each pair
# that it merges: in a text without breaks, which is one word, that is quadratic.
WORD_BYTES = 256
# a word of more than WORD_BYTES has at least so many characters, of 4 bytes in UTF-8
LONG_WORD = re.compile(rf"\S{{{WORD_BYTES // 4}}}|\s{{{WORD_BYTES // 4}}}")


class CharTokenizer:
    """One token for each distinct character of a text, in sorted order after the separator.

    The separator is one token and not 13 characters: it says one thing, and `<`, `>` and `|` need
    not be learned for it.

    Args:
        characters: Distinct, sorted.
    """

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.vocab_size = 1 + len(characters)
        self._texts = [SEPARATOR, *characters]
        self._numbers = {text: number for number, text in enumerate(self._texts)}

    @classmethod
    def train(cls, text: str) -> "CharTokenizer":
        """A tokenizer for all characters of a text."""
        characters = set()
        for part in text.split(SEPARATOR):
            characters.update(part)
        return cls("".join(sorted(characters)))

    def encode(self, text: str) -> list[int]:
        """Token numbers.

        Raises:
            ValueError: A character that the training text does not have.
        """
        tokens = []
        try:
            for part in re.split(f"({re.escape(SEPARATOR)})", text):
                if part == SEPARATOR:
                    tokens.append(self._numbers[SEPARATOR])
                else:
                    tokens += [self._numbers[character] for character in part]
        except KeyError as error:
            raise ValueError(
                f"character {error.args[0]!r} is none of the {len(self.characters)} in the text "
                "that this tokenizer is for: leave it out, or use tokenizer='bpe', which knows "
                "every byte"
            ) from None
        return tokens

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token numbers; `decode(encode(text)) == text`."""
        return "".join(self._texts[i] for i in ids)

    def as_json(self) -> dict[str, Any]:
        """What `tokenizer_from_json` makes it from."""
        return {"kind": "char", "characters": self.characters}


class BPETokenizer:
    """Byte-level byte-pair encoding: common strings of bytes become one token.

    No text is unknown to it, since every single byte is a token.

    Source: Sennrich et al. 2016 (arXiv:1508.07909), algorithm 1;
        on bytes as in Radford et al. 2019 (GPT-2), section 2.2.

    Args:
        model: A `tokenizers.Tokenizer`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        # the largest number and one more: some of the hub leave numbers out
        self.vocab_size: int = max(model.get_vocab().values(), default=-1) + 1

    @classmethod
    def train(cls, text: str, vocab_size: int) -> "BPETokenizer":
        """A tokenizer of at most `vocab_size` tokens; fewer where the text does not give so many.

        The same text and size give the same tokenizer in every run. For a text with very long words
        (base64, DNA, nothing but spaces) it cuts each of them after every `WORD_BYTES` bytes, so
        that training is linear in the text: 200 kB without a break take 1 s and not 15 s. No token
        is longer than that then; the text itself comes back whole.
        """
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        model = Tokenizer(models.BPE())
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if LONG_WORD.search(text):  # not always: it would make every text half as slow again
            every_so_often = pre_tokenizers.Split(Regex(f".{{1,{WORD_BYTES}}}"), "isolated")
            words = pre_tokenizers.Sequence([words, every_so_often])
        model.pre_tokenizer = words  # pyright: ignore[reportAttributeAccessIssue]
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[SEPARATOR],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=sys.stderr.isatty(),
        )
        model.train_from_iterator(pieces(text), trainer)
        return cls(model)

    @classmethod
    def read(cls, path: Path) -> "BPETokenizer":
        """The tokenizer of a model of the hub, of any kind that `tokenizer.json` describes.

        Raises:
            ValueError: The file is missing, or none of a tokenizer.
        """
        from tokenizers import Tokenizer

        if not path.is_file():
            raise ValueError(f"data.tokenizer: there is no {path}: give a tokenizer.json")
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises no narrower one
            raise ValueError(
                f"data.tokenizer: {path} is no tokenizer.json ({error}): give the file of that "
                "name beside the weights"
            ) from None

    def encode(self, text: str) -> list[int]:
        """Token numbers, without those that some models want at the beginning and end."""
        return self.model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token numbers; `decode(encode(text)) == text`."""
        return self.model.decode(list(ids), skip_special_tokens=False)

    def as_json(self) -> dict[str, Any]:
        """What `tokenizer_from_json` makes it from."""
        return {"kind": "bpe", "model": json.loads(self.model.to_str())}


class TokenNumbers:
    """In place of a tokenizer that nobody has given: tokens are written as their numbers.

    Args:
        vocab_size: One more than the largest.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Raises ValueError: nobody knows which token a text is."""
        raise ValueError(
            "the tokenizer of these tokens is not known: give data.tokenizer=FILE.json"
        )

    def decode(self, ids: Iterable[int]) -> str:
        """The numbers, in one line."""
        return " ".join(map(str, ids))


Tokenizer: TypeAlias = CharTokenizer | BPETokenizer
# also of tokens that another program has made
AnyTokenizer: TypeAlias = Tokenizer | TokenNumbers


def make_tokenizer(kind: str, text: str, vocab_size: int) -> Tokenizer:
    """A tokenizer for a text.

    Args:
        kind: "char", "bpe", or the path of a tokenizer.json.
        text: What it is for.
        vocab_size: For "bpe" alone; "char" has as many tokens as there are characters.
    """
    if kind == "char":
        return CharTokenizer.train(text)
    if kind != "bpe":
        return BPETokenizer.read(user_path(kind, "data.tokenizer"))
    return BPETokenizer.train(text, vocab_size)


def tokenizer_from_json(saved: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `as_json` described."""
    if saved["kind"] == "char":
        return CharTokenizer(saved["characters"])
    from tokenizers import Tokenizer as BPEModel

    return BPETokenizer(BPEModel.from_str(json.dumps(saved["model"])))


def pieces(text: str) -> Iterator[str]:
    """A text in pieces of about a million characters, cut before a space, where no token spans.

    Encoding piece by piece gives the tokens of the whole and needs memory for one piece only.
    Where a million characters more have no such space, the piece is cut there all the same: then a
    few characters around the cut may be other tokens than in the whole, of the same text.
    """
    space_after_word = re.compile(r"(?<=\S)\s")
    start = 0
    while start < len(text):
        latest = start + 2 * PIECE_CHARACTERS
        match = space_after_word.search(text, start + PIECE_CHARACTERS, latest)
        end = match.start() if match else _outside_separator(text, latest)
        yield text[start:end]
        start = end


def _outside_separator(text: str, place: int) -> int:
    """`place`, or the end of the separator that it lies in."""
    earliest = max(0, place - len(SEPARATOR) + 1)
    begin = text.find(SEPARATOR, earliest, place + len(SEPARATOR) - 1)
    return place if begin < 0 else begin + len(SEPARATOR)
