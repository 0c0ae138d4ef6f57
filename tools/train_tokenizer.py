#!/usr/bin/env python
"""Train a byte-level BPE tokenizer; written as tokenizer.json and as tiktoken ranks in tokenizer.model.

    python tools/train_tokenizer.py corpus/ --vocab-size 32000 --out tokenizer/

The vocabulary counts the two specials that begin and end a document. Use it with model.hf_assets_path = "tokenizer/".
Needs the extra hf (tokenizers).
"""

import argparse
import base64
import json
import sys
from pathlib import Path

import _environment  # noqa: F401

from titanlite.errors import UserError

SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="+", help="files, folders or globs of text, JSONL or Parquet")
    parser.add_argument("--vocab-size", required=True, type=int, help="tokens, at least 258")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--text-key", default="text", help="field that holds the text")
    arguments = parser.parse_args()
    try:
        train(arguments.input, arguments.vocab_size, arguments.out, arguments.text_key)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"tokenizer of {arguments.vocab_size} tokens: {arguments.out}")
    return 0


def train(inputs: list[str], vocab_size: int, out: Path, text_key: str) -> None:
    """Train and write."""
    from tokenize_corpus import kind_of

    from titanlite.data.sources import build_source
    from titanlite.data.tokenizer import LLAMA3_PATTERN, ByteTokenizer, bytes_of_characters

    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise UserError("training a tokenizer needs the package tokenizers: pip install 'titanlite[hf]'") from None
    if vocab_size < 256 + len(SPECIALS):
        raise UserError(f"--vocab-size must be at least {256 + len(SPECIALS)}: every byte is a token")

    def texts():
        for path in inputs:
            source = build_source(kind_of(path), path, ByteTokenizer(), text_key)
            for index in range(len(source)):
                yield source.document(index)

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = vocab_size - len(SPECIALS)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=sys.stderr.isatty())
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens(SPECIALS)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": SPECIALS[0], "eos_token": SPECIALS[1]}, indent=1)
    )
    byte = bytes_of_characters()
    vocabulary = json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]
    ranks = sorted((rank, bytes(byte[c] for c in token)) for token, rank in vocabulary.items() if token not in SPECIALS)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in ranks]
    (out / "tokenizer.model").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
