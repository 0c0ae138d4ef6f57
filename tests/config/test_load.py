"""Where values come from: defaults, files, the files they extend, flags; and the texts made from the schema."""

import re

import pytest

from tests.command import ROOT
from titanlite.config import from_dict, load, to_toml
from titanlite.config.checks import BYTE_VOCABULARY
from titanlite.config.messages import keys
from titanlite.config.show import help_text, reference

CONFIGS = {
    "debug_model": 1,
    "debug_tensor": 2,
    "debug_pipeline": 2,
    "debug_context": 2,
    "debug_float8": 1,
    "llama3_1b": 8,
    "llama3_3b": 8,
    "llama3_8b": 8,
    "llama3_70b": 256,
    "llama3_405b": 512,
}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "base.toml").write_text("[training]\nsteps = 100\nseq_len = 64\n[debug]\nseed = 1\n")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/middle.toml").write_text('extends = "../base.toml"\n\n[training]\nseq_len = 128\n')
    (tmp_path / "top.toml").write_text('extends = "deeper/middle.toml"\n[debug]\nseed = 2\n')
    return tmp_path


def test_flags_win_over_files_over_what_they_extend_over_defaults(files):
    config = load([f"--job.config_file={files / 'top.toml'}", "--training.local_batch_size=4"], world_size=1)
    assert (config.training.steps, config.training.seq_len, config.debug.seed) == (100, 128, 2)
    assert (config.training.local_batch_size, config.training.max_norm) == (4, 1.0)
    assert load([f"--job.config_file={files / 'top.toml'}", "--training.seq_len=32"], 1).training.seq_len == 32


def test_each_printed_value_says_where_it_came_from(files, capsys):
    with pytest.raises(SystemExit) as end:
        load([f"--job.config_file={files / 'top.toml'}", "--optimizer.lr=1", "--print-config"], world_size=1)
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("steps = 100")).endswith(f"{files / 'deeper'}/../base.toml:2")
    assert next(line for line in lines if line.startswith("seq_len = 128")).endswith("middle.toml:4")
    assert next(line for line in lines if line.startswith("seed = 2")).endswith("top.toml:3")
    assert next(line for line in lines if line.startswith("lr = ")).endswith("--optimizer.lr")
    assert next(line for line in lines if line.startswith("eps = ")).endswith("default")


def test_the_printed_config_gives_the_same_config(files, capsys):
    flags = [
        "--model.rope_scaling.factor=2",
        "--data.sources=[{name='a', dataset='embedded'}]",
        '--job.description="é"',
    ]
    config = load([f"--job.config_file={files / 'top.toml'}", *flags], world_size=1)
    with pytest.raises(SystemExit):
        load([f"--job.config_file={files / 'top.toml'}", *flags, "--print-config"], world_size=1)
    for text in (capsys.readouterr().out, to_toml(config)):
        (files / "again.toml").write_text(text)
        again = load([f"--job.config_file={files / 'again.toml'}"], world_size=1)
        job = again.job.model_copy(update={"config_file": config.job.config_file})
        assert again.model_copy(update={"job": job}) == config


@pytest.mark.parametrize(
    "flags, found",
    [
        (["--checkpoint.enable"], lambda c: c.checkpoint.enable is True),
        (["--checkpoint.enable", "--training.steps=3"], lambda c: c.checkpoint.enable is True),
        (["--checkpoint.enable", "false"], lambda c: c.checkpoint.enable is False),
        (["--training.no-pack_documents"], lambda c: c.training.pack_documents is False),
        (["--training.steps", "7"], lambda c: c.training.steps == 7),
        (["--training.global-batch-size", "-1"], lambda c: c.training.global_batch_size == -1),
        (["--optimizer.lr=1e-3"], lambda c: c.optimizer.lr == 1e-3),
        (["--optimizer.lr=1"], lambda c: c.optimizer.lr == 1.0),
        (["--profiling.ranks=0"], lambda c: c.profiling.ranks == [0]),
        (["--compile.components=model,loss"], lambda c: c.compile.components == ["model", "loss"]),
        (["--checkpoint.exclude_from_loading="], lambda c: c.checkpoint.exclude_from_loading == []),
        (["--parallelism.fsdp_reshard_after_forward=1"], lambda c: c.parallelism.fsdp_reshard_after_forward == 1),
        (["--parallelism.fsdp_reshard_after_forward=never"], lambda c: c.parallelism.fsdp_reshard_after_forward == "never"),
        (["--training.loss_chunks=4"], lambda c: c.training.loss_chunks == 4),
        (["--parallelism.context_parallel_load_balancer=none"], lambda c: c.parallelism.context_parallel_load_balancer is None),
        (["--model.rope_scaling={factor = 2.0}"], lambda c: c.model.rope_scaling.factor == 2.0),
        (['--model.rope_scaling={"factor": 2.0}'], lambda c: c.model.rope_scaling.factor == 2.0),
        (["--job.description=a = b"], lambda c: c.job.description == "a = b"),
        (['--parallelism.module_fqns_per_model_part=[["a"], ["b"]]'], lambda c: c.parallelism.module_fqns_per_model_part == [["a"], ["b"]]),
    ],
    ids=lambda flags: " ".join(flags)[:50] if isinstance(flags, list) else "",
)  # fmt: skip
def test_flags_are_read_by_the_type_of_their_key(flags, found):
    assert found(load(flags, world_size=1))


def test_the_number_of_processes_comes_from_torchrun_or_the_launcher(monkeypatch):
    flags = ["--parallelism.data_parallel_shard_degree=4"]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.setenv("NNODES", "2")
    load(flags)
    monkeypatch.setenv("NGPU", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    load(flags)


def test_a_config_cannot_be_changed_and_defaults_are_not_shared():
    config = from_dict({"training": {"steps": 3}})
    with pytest.raises(Exception, match="frozen"):
        config.training.steps = 4
    assert config.training.steps == 3
    given = {"model": {"converters": ["quantize.linear.float8"]}}
    from_dict(given)
    assert given == {"model": {"converters": ["quantize.linear.float8"]}}


def test_a_smaller_batch_than_local_batch_size_is_one_micro_batch():
    from_dict({"training": {"global_batch_size": 6, "local_batch_size": 8}}, world_size=2)


@pytest.mark.parametrize("name", [file.stem for file in (ROOT / "train_configs").glob("*.toml")])
def test_every_file_that_ships_is_right(name):
    config = load([f"--job.config_file={ROOT / 'train_configs' / name}.toml"], world_size=CONFIGS[name])
    assert config.model.name == "llama3"


def test_help_and_reference_name_every_key_with_its_meaning(capsys):
    text = help_text()
    for key in keys():
        assert f"--{key} " in text
    assert not re.search(r"\n      \n", text), "a key without a meaning"
    with pytest.raises(SystemExit) as end:
        load(["--help"])
    assert end.value.code == 0 and "--training.steps" in capsys.readouterr().out


def test_the_reference_page_is_current():
    page = (ROOT / "docs/config.md").read_text()
    assert page == reference(), "python tools/config_reference.py writes it anew"


def test_the_byte_vocabulary_is_the_tokenizers():
    from titanlite.data.tokenizer import build_tokenizer

    assert build_tokenizer("bytes").vocab_size == BYTE_VOCABULARY


def test_the_dialect_is_whole():
    """The keys and defaults of torchtitan's last TOML schema that files depend on."""
    config = from_dict({})
    assert config.optimizer.lr == 8e-4 and config.optimizer.beta2 == 0.95
    assert config.lr_scheduler.warmup_steps == 200
    assert config.training.steps == 10_000 and config.training.seq_len == 2048
    assert config.checkpoint.interval == 500 and config.checkpoint.keep_latest_k == 10
    assert config.comm.init_timeout_seconds == 300 and config.comm.train_timeout_seconds == 100
    assert config.parallelism.data_parallel_shard_degree == -1
    assert config.activation_checkpoint.mode == "selective"
