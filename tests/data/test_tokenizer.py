"""Tokenizers equal their reference implementation on text that is hard."""

import base64
import json

import pytest

from titanlite.data.tokenizer import LLAMA3_PATTERN, bounded, build_tokenizer
from titanlite.errors import UserError

HARD = [
    "",
    " ",
    "Hello, world! It's 2026's 12345678 tokens.",
    "   leading\t\ttabs\n\n\n  and   runs \r\n of   white\u00a0space\u3000",
    "def f(x):\n    return {'a': [1, 2, 3]}  # comment\n" * 3,
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 and flags \U0001f1e9\U0001f1ea",
    "\u4e2d\u6587\u6d4b\u8bd5 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "control \x00\x01\x02\x7f characters",
    "<|end_of_text|> written in text <|begin_of_text|>",
    "a" * 5000,
    "=" * 3000 + " " * 3000,
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small byte-level BPE in Hugging Face's format, with Llama 3's pattern, and as tiktoken ranks."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(HARD * 3, trainer)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, tokenizer


@pytest.mark.parametrize("text", HARD)
def test_tokenizer_json_equals_the_reference(trained, text):
    folder, reference = trained
    ours = build_tokenizer(str(folder))
    plain = text.replace("<|", "< |")  # the reference takes special tokens in text for special tokens
    assert ours.encode(plain).tolist() == reference.encode(plain, add_special_tokens=False).ids
    assert ours.decode(ours.encode(text).tolist()) == text


def test_special_tokens_in_text_are_text(trained):
    ours = build_tokenizer(str(trained[0]))
    tokens = ours.encode("<|end_of_text|>").tolist()
    assert ours.eos_id not in tokens and len(tokens) > 1


def test_ranks_with_llama_3_specials(trained, tmp_path):
    folder, reference = trained
    values = json.loads((folder / "tokenizer.json").read_text())
    from titanlite.data.tokenizer import bytes_of_characters

    byte = bytes_of_characters()
    vocabulary = {t: r for t, r in values["model"]["vocab"].items() if not t.startswith("<|")}
    lines = [f"{base64.b64encode(bytes(byte[c] for c in t)).decode()} {r}" for t, r in vocabulary.items()]
    (tmp_path / "tokenizer.model").write_text("\n".join(lines))
    ours = build_tokenizer(str(tmp_path))
    assert ours.bos_id == len(vocabulary) and ours.eos_id == len(vocabulary) + 1
    assert ours.vocab_size == len(vocabulary) + 256
    for text in HARD[:8]:
        assert ours.encode(text).tolist() == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["x" * 1_000_000, " " * 1_000_000, "ab " * 300_000])
def test_long_lines_take_linear_time_and_lose_nothing(trained, text):
    assert "".join(bounded(text)) == text
    assert max(map(len, bounded(text))) <= 400_000
    ours = build_tokenizer(str(trained[0]))
    assert ours.decode(ours.encode(text).tolist()) == text


def test_bytes_round_trip():
    tokenizer = build_tokenizer("bytes")
    for text in HARD:
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_broken_file_is_told(name, tmp_path):
    (tmp_path / name).write_text("nonsense that is no tokenizer")
    with pytest.raises(UserError, match=name):
        build_tokenizer(str(tmp_path))


def test_an_empty_folder_is_told(tmp_path):
    with pytest.raises(UserError, match="neither tokenizer.json nor tokenizer.model"):
        build_tokenizer(str(tmp_path))


def test_half_a_surrogate_pair_is_no_crash(trained):
    ours = build_tokenizer(str(trained[0]))
    assert ours.decode(ours.encode("a\ud800b").tolist()) == "a\ufffdb"
