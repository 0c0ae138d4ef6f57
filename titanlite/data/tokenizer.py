"""Text to token numbers and back: bytes, or byte-level BPE through tiktoken."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from titanlite.errors import UserError

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text before merging bytes; a fact of the model."""

LONGEST = 400_000
"""Characters encoded at a time: tiktoken's pattern matcher overflows its stack on a few million without a break."""

LONGEST_RUN = 25_000
"""Characters of one kind, white or not, encoded at a time: merging is quadratic in the length of a piece."""


class Tokenizer(Protocol):
    """What the loader needs of a tokenizer.

    Attributes:
        fingerprint: changes whenever some text would be encoded otherwise.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Token numbers of ``text``, without specials; special tokens written in the text are text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token numbers."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8, and specials after them; needs no files."""

    vocab_size = 320
    bos_id: int | None = None
    eos_id = 256
    fingerprint = "bytes-320"

    def encode(self, text: str) -> np.ndarray:
        """The bytes of ``text``."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens that are bytes."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


class BPETokenizer:
    """Byte-level BPE through tiktoken.

    Args:
        ranks: bytes of each token, by rank.
        specials: special tokens by name.
        extra: what else decides the encoding, for the fingerprint.
    """

    def __init__(self, ranks: dict[bytes, int], pattern: str, specials: dict[str, int], bos: str | None, eos: str):
        import tiktoken

        self._encoding = tiktoken.Encoding("titanlite", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
        self.vocab_size = max([*ranks.values(), *specials.values()]) + 1
        self.bos_id = specials[bos] if bos is not None else None
        self.eos_id = specials[eos]
        told = hashlib.blake2b(digest_size=8)
        told.update(json.dumps([pattern, sorted(specials.items()), bos, eos]).encode())
        for token, rank in sorted(ranks.items(), key=lambda pair: pair[1]):
            told.update(token + rank.to_bytes(4, "little"))
        self.fingerprint = f"bpe-{self.vocab_size}-{told.hexdigest()}"

    def encode(self, text: str) -> np.ndarray:
        """Token numbers of ``text``, in time linear in its length."""
        pieces = [self._encode(piece) for piece in bounded(text)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _encode(self, text: str) -> np.ndarray:
        try:
            # Straight into an array: a list of Python integers costs a sixth of the whole encoding to convert.
            return self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        except UnicodeEncodeError:
            # Half a surrogate pair, which JSON can spell, is no character; it becomes the replacement character.
            return np.array(self._encoding.encode_ordinary(text), dtype=np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token numbers, specials by name."""
        return self._encoding.decode(list(tokens), errors="replace")


def bounded(text: str) -> list[str]:
    """Cut ``text`` so that no piece and no run of white or other characters is too long for the encoder."""
    pieces: list[str] = []
    for start in range(0, max(len(text), 1), LONGEST):
        chunk = text[start : start + LONGEST]
        begin = run = 0
        white = chunk[:1].isspace()
        if not _may_have_long_run(chunk):
            pieces.append(chunk)
            continue
        for i, character in enumerate(chunk):
            if character.isspace() == white:
                run += 1
                if run > LONGEST_RUN:
                    pieces.append(chunk[begin:i])
                    begin, run = i, 1
            else:
                white, run = not white, 1
        pieces.append(chunk[begin:])
    return pieces


def _may_have_long_run(text: str) -> bool:
    """Whether a block of half the longest run is all of one kind: every run that is too long covers such a block."""
    half = LONGEST_RUN // 2
    blocks = (text[start : start + half] for start in range(0, len(text) - half + 1, half))
    return any(block.isspace() or block.split(None, 1)[0] == block for block in blocks)


def build_tokenizer(hf_assets_path: str) -> Tokenizer:
    """The tokenizer of ``model.hf_assets_path``.

    Raises:
        UserError: the folder has no tokenizer that can be read.
    """
    if hf_assets_path == "bytes":
        return ByteTokenizer()
    folder = Path(hf_assets_path)
    ranks_file = folder if folder.is_file() and folder.name.endswith(".model") else folder / "tokenizer.model"
    json_file = folder if folder.is_file() and folder.name.endswith(".json") else folder / "tokenizer.json"
    if json_file.is_file():
        return _from_json(json_file)
    if ranks_file.is_file():
        return _from_ranks(ranks_file)
    raise UserError(
        f"model.hf_assets_path: {folder} has neither tokenizer.json nor tokenizer.model; `bytes` needs no files"
    )


def _from_ranks(file: Path) -> BPETokenizer:
    """Llama 3's ``tokenizer.model``: a line a token, base64 and rank; 256 specials come after the ranks."""
    try:
        ranks = {
            base64.b64decode(word): int(rank)
            for word, rank in (line.split() for line in file.read_bytes().splitlines() if line)
        }
    except ValueError as error:
        raise UserError(f"{file} is not a file of tiktoken ranks: {error}") from None
    named = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"]
    named += ["<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"]
    named += ["<|eot_id|>", "<|python_tag|>"]
    named += [f"<|reserved_special_token_{i}|>" for i in range(2, 256 - len(named) + 2)]
    specials = {name: len(ranks) + i for i, name in enumerate(named)}
    return BPETokenizer(ranks, LLAMA3_PATTERN, specials, "<|begin_of_text|>", "<|end_of_text|>")


def _from_json(file: Path) -> BPETokenizer:
    """A byte-level ``tokenizer.json``: vocabulary, merges and the pattern of its pre-tokenizer."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        model = values["model"]
        vocabulary: dict[str, int] = model["vocab"]
        pattern = _pattern(values.get("pre_tokenizer") or {})
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a tokenizer: {error!r}") from None
    if model.get("type", "BPE") != "BPE" or pattern is None or values.get("normalizer"):
        raise UserError(f"{file}: only byte-level BPE without a normalizer can be read")
    byte = bytes_of_characters()
    added = {entry["content"]: entry["id"] for entry in values.get("added_tokens", [])}
    ranks = {bytes(byte[c] for c in token): rank for token, rank in vocabulary.items() if token not in added}
    bos, eos = _ends(file.parent, added)
    return BPETokenizer(ranks, pattern, added, bos, eos)


def _ends(folder: Path, added: dict[str, int]) -> tuple[str | None, str]:
    """The names of the tokens that begin and end a document."""
    settings: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))

    def name(key: str, guesses: tuple[str, ...]) -> str | None:
        given = settings.get(key)
        given = given.get("content") if isinstance(given, dict) else given
        return given if given in added else next((guess for guess in guesses if guess in added), None)

    eos = name("eos_token", ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>"))
    if eos is None:
        raise UserError(f"{folder}: no special token ends a document; tokenizer_config.json should name eos_token")
    return name("bos_token", ("<|begin_of_text|>", "<s>", "<bos>")), eos


def _pattern(pre: dict[str, Any]) -> str | None:
    steps = pre.get("pretokenizers", [pre])
    for step in steps:
        if step.get("type") == "Split" and "Regex" in step.get("pattern", {}):
            return step["pattern"]["Regex"]
    if any(step.get("type") == "ByteLevel" and step.get("use_regex", True) for step in steps):
        return r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return None


def bytes_of_characters() -> dict[str, int]:
    """GPT-2's printable character for each byte, backwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
