"""Every wrong config is told in one message: where it stands, what is allowed, what was probably meant."""

import subprocess
import sys
import time

import pytest

from tests.command import ROOT, command, environment
from titanlite.config import from_dict, load
from titanlite.errors import UserError

FLAGS = [
    # keys
    (1, ["--training.step=3"], ["--training.step:", "did you mean training.steps?"]),
    (1, ["--trainning.steps=3"], ["there is no table [trainning]", "[training]"]),
    (1, ["--steps=3"], ["did you mean training.steps?"]),
    (1, ["--zebra.x=3"], ["there is no table [zebra]", "tables are job, profiling"]),
    (1, ["--training.zebra=3"], ["has no key 'zebra'", "local_batch_size"]),
    (1, ["--training.lr=0.1"], ["did you mean optimizer.lr?"]),
    (1, ["--training.steps.x=3"], ["training.steps is not a table"]),
    (1, ["--model.rope_scaling.fact=2"], ["did you mean model.rope_scaling.factor?"]),
    (1, ["--data.sources=[{nam='a',dataset='embedded'}]"], ["data.sources.0.name: is missing"]),
    # how flags are written
    (1, ["training.steps=3"], ["not a flag"]),
    (1, ["--training.steps"], ["--training.steps needs a value"]),
    (1, ["--training.steps=3", "--training.steps=4"], ["--training.steps is given twice"]),
    (1, ["--checkpoint.enable", "--checkpoint.no-enable"], ["checkpoint.enable is given twice"]),
    (1, ["--checkpoint.no-enable=true"], ["takes no value"]),
    (1, ["--data.sources=[{"], ["neither TOML nor JSON"]),
    (1, ["--model.rope_scaling=big"], ["neither TOML nor JSON"]),
    # types
    (1, ["--training.steps=ten"], ["'ten' is not allowed", "a whole number at least 1"]),
    (1, ["--training.steps=1.5"], ["a whole number at least 1"]),
    (1, ["--training.steps=true"], ["a whole number at least 1"]),
    (1, ["--checkpoint.enable=maybe"], ["true or false"]),
    (1, ["--optimizer.lr=fast"], ["a number at least 0"]),
    (1, ["--profiling.ranks=0,x"], ["profiling.ranks", "a whole number at least 0"]),
    (1, ["--debug.seed=1.5"], ["a whole number or none"]),
    # values
    (1, ["--training.steps=0"], ["0 is not allowed", "at least 1"]),
    (1, ["--training.seq_len=-8"], ["at least 1"]),
    (1, ["--training.local_batch_size=0"], ["at least 1"]),
    (1, ["--training.global_batch_size=0"], ["-1 or at least 1"]),
    (1, ["--optimizer.lr=-0.1"], ["at least 0"]),
    (1, ["--optimizer.lr=nan"], ["nan is not allowed"]),
    (1, ["--optimizer.beta2=1.0"], ["below 1"]),
    (1, ["--lr_scheduler.decay_ratio=1.5"], ["at most 1"]),
    (1, ["--lr_scheduler.decay_type=cosin"], ["did you mean 'cosine'?"]),
    (1, ["--optimizer.name=adamw"], ["did you mean 'AdamW'?"]),
    (1, ["--training.mixed_precision_param=fp16"], ["'float32', 'bfloat16', 'float16'"]),
    (1, ["--training.dataset=wiki"], ["'embedded'", "'jsonl'"]),
    (1, ["--training.loss_chunks=0"], ["at least 1 or 'auto'"]),
    (1, ["--training.spike_threshold=1"], ["above 1"]),
    (1, ["--parallelism.fsdp_reshard_after_forward=sometimes"], ["'default', 'always', 'never' or a whole number"]),
    (1, ["--activation_checkpoint.selective_ac_option=0"], ["'op' or a whole number"]),
    (1, ["--activation_checkpoint.mode=all"], ["'selective', 'full', 'memory_budget', 'none'"]),
    (1, ["--quantize.linear.float8.recipe_name=tensor"], ["did you mean 'tensorwise'?"]),
    (1, ["--checkpoint.keep_latest_k=-1"], ["at least 0"]),
    (1, ["--checkpoint.load_step=-2"], ["-1 or a step"]),
    (1, ["--checkpoint.exclude_from_loading=optim"], ["'optim' is none of optimizer"]),
    (1, ["--job.run_id=a/b"], ["plain name"]),
    (1, ["--debug.faults=explode@3:0"], ["nan@step:rank"]),
    (1, ["--comm.train_timeout_seconds=0"], ["at least 1"]),
    # the model
    (1, ["--model.name=llama4"], ["'llama3', 'qwen3'"]),
    (1, ["--model.flavor=7B"], ["no flavor '7B'", "8B"]),
    (1, ["--model.n_heads=6"], ["not a multiple of n_heads = 6"]),
    (1, ["--model.n_kv_heads=5"], ["not a multiple of n_kv_heads = 5"]),
    (1, ["--model.vocab_size=256"], ["320 tokens of the byte tokenizer"]),
    (1, ["--model.hf_assets_path=/nowhere"], ["/nowhere does not exist"]),
    # the layout
    (4, ["--parallelism.tensor_parallel_degree=3"], ["does not divide the 4 processes", "NGPU"]),
    (2, ["--parallelism.data_parallel_shard_degree=4"], ["has 2 processes", "NGPU=4"]),
    (2, ["--parallelism.data_parallel_shard_degree=0"], ["-1 or at least 1"]),
    (3, ["--parallelism.tensor_parallel_degree=3"], ["does not divide model.n_heads = 16", "is 2"]),
    (8, ["--parallelism.tensor_parallel_degree=8", "--model.n_kv_heads=4"], ["model.n_kv_heads = 4", "is 4"]),
    (2, ["--parallelism.tensor_parallel_degree=2", "--training.seq_len=129"], ["multiple of 2", "take 130"]),
    (2, ["--parallelism.context_parallel_degree=2", "--training.seq_len=130"], ["multiple of 4", "take 132"]),
    (2, ["--training.global_batch_size=9"], ["9 rows cannot be dealt evenly to 2", "take a multiple of 2, such as 10"]),
    (4, ["--training.global_batch_size=2"], ["2 rows cannot be dealt evenly to 4", "such as 4"]),
    (1, ["--training.global_batch_size=12", "--training.local_batch_size=8"], ["12 rows", "take 6"]),
    (2, ["--parallelism.fsdp_reshard_after_forward=4"], ["4 does not divide the 2 ranks"]),
    (1, ["--parallelism.pipeline_parallel_schedule=1F2B"], ["is not a schedule", "Interleaved1F1B"]),
    (8, ["--parallelism.pipeline_parallel_degree=8", "--parallelism.pipeline_parallel_schedule=GPipe", "--model.n_layers=2"], ["do not make 8 pipeline stages"]),
    (2, ["--parallelism.pipeline_parallel_degree=2", "--model.tie_embeddings"], ["tied embedding"]),
    (2, ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_microbatch_size=3"], ["3 does not divide the 8 rows"]),
    (2, ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=1"], ["at least 2 micro-batches", "take 2"]),
    (2, ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=DualPipeV", "--training.local_batch_size=2"], ["at least 4 micro-batches"]),
    (2, ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule_csv=/nowhere.csv"], ["/nowhere.csv"]),
    (2, ["--parallelism.tensor_parallel_degree=2", "--parallelism.enable_async_tensor_parallel"], ["compile.enable"]),
    (1, ["--profiling.ranks=3"], ["no rank 3 among 1"]),
    # what does not go together
    (1, ["--activation_checkpoint.mode=memory_budget"], ["set compile.enable"]),
    (1, ["--optimizer.early_step_in_backward"], ["training.max_norm = 0"]),
    (1, ["--quantize.linear.float8.enable_fsdp_float8_all_gather", "--quantize.linear.float8.recipe_name=rowwise"], ["tensorwise scales"]),
    (1, ["--data.packing=best_fit", "--training.no-pack_documents"], ["best_fit packs documents"]),
    (1, ["--lr_scheduler.warmup_steps=50", "--lr_scheduler.total_steps=20"], ["50 steps of warm-up", "schedule of 20"]),
    (2, ["--checkpoint.create_seed_checkpoint", "--checkpoint.enable"], ["NGPU=1"]),
    (1, ["--checkpoint.initial_load_in_hf"], ["needs checkpoint.initial_load_path"]),
    # paths
    (1, ["--job.config_file=/nowhere.toml"], ["config file /nowhere.toml does not exist"]),
    (1, ["--job.config_file=/"], ["cannot be read"]),
    (1, ["--training.dataset=jsonl"], ["needs a path"]),
    (1, ["--training.dataset=jsonl", "--training.dataset_path=/nowhere.jsonl"], ["/nowhere.jsonl does not exist"]),
    (1, ["--training.dataset=text", "--training.dataset_path=/nowhere/*.txt"], ["matches no file"]),
    (1, ["--training.dataset_path=/etc"], ["is not used by dataset 'embedded'"]),
    (1, ["--validation.enable"], ["dataset 'c4_validation' needs a path"]),
    (1, ["--data.sources=[{name='a',dataset='text',path='/nowhere'}]"], ["data.sources.0.path", "does not exist"]),
    (1, ["--checkpoint.initial_load_path=/nowhere"], ["there is no folder /nowhere"]),
    (1, ["--job.dump_folder=/dev/null/run"], ["a file is in its way"]),
    (1, ["--job.dump_folder=/proc/run"], ["/proc cannot be written to"]),
    # what titanlite does not do, and older files
    (1, ["--parallelism.expert_parallel_degree=2"], ["mixtures of experts"]),
    (1, ["--fault_tolerance.enable"], ["torchft"]),
    (1, ["--metrics.enable_wandb"], ["Weights & Biases"]),
    (1, ["--model.converters=quantize.linear.mx"], ["MX formats"]),
    (1, ["--training.batch_size=4"], ["training.local_batch_size today"]),
    (1, ["--model.tokenizer_path=x"], ["model.hf_assets_path today"]),
    (1, ["--experimental.pipeline_parallel_degree=2"], ["parallelism.pipeline_parallel_degree today"]),
    (1, ["--float8.enable_float8_linear"], ["model.converters today"]),
]  # fmt: skip


@pytest.mark.parametrize("world_size, argv, words", FLAGS, ids=[" ".join(argv)[:60] for _, argv, _ in FLAGS])
def test_a_wrong_flag_is_told_in_one_line(world_size, argv, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as told:
        load(argv, world_size=world_size)
    message = str(told.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert list(tmp_path.iterdir()) == []


FILES = [
    ("[training]\nsteps = 0\n", ":2: training.steps: 0 is not allowed"),
    ("[training]\nsteps = '10'\n", ":2: training.steps: '10' is not allowed; it must be a whole number"),
    ("[training]\nsteps = true\n", ":2: training.steps: True is not allowed"),
    ("[checkpoint]\n\nenable = 'false'\n", ":3: checkpoint.enable: 'false' is not allowed"),
    ("[training]\nstep = 3\n", ":2: training.step: table [training] has no key 'step'; did you mean training.steps?"),
    ("training.seqlen = 3\n", ":1: training.seqlen: "),
    ("[trainin]\nsteps = 3\n", ":1: trainin: there is no table [trainin]"),
    ("training = 3\n", ":1: training: 3 is not allowed; it must be a table"),
    ("[[data.sources]]\nname = 'a'\ndataset = 'embedded'\n[[data.sources]]\nname = 'b'\ndataset = 'embedded'\nweight = 0\n", ":7: data.sources.1.weight: 0 is not allowed"),
    ("[data]\nsources = [{name = 'a', dataset = 'embedded'}, {name = 'a', dataset = 'embedded'}]\n", ":2: data.sources: two sources are called 'a'"),
    ("[model]\nrope_scaling = {factor = -1}\n", ":2: model.rope_scaling.factor: -1 is not allowed"),
    ("[training\nsteps = 3\n", "is not TOML: "),
    ("[training]\nsteps = 3\nsteps = 4\n", "is not TOML: "),
    ("extends = 'missing.toml'\n", "missing.toml does not exist"),
    ("extends = 'wrong.toml'\n", "extends goes round in a circle"),
    ("extends = ['a.toml']\n", "must be the name of one file"),
    ("[parallelism]\nexpert_parallel_degree = 4\n", ":2: parallelism.expert_parallel_degree: titanlite does not do mixtures of experts"),
    ("[quantize.linear.mx]\nrecipe_name = 'mxfp8'\n", "quantize.linear.mx: titanlite does not do MX formats"),
    ("[float8]\nenable_fsdp_float8_all_gather = true\n", ":1: float8: this key of older files is quantize.linear.float8 today"),
]  # fmt: skip


@pytest.mark.parametrize("text, words", FILES, ids=[text.split("\n")[0][:30] for text, _ in FILES])
def test_a_wrong_file_is_told_with_its_line(text, words, tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(UserError) as told:
        load([f"--job.config_file={file}"], world_size=1)
    assert words in str(told.value)
    assert "wrong.toml" in str(told.value)
    assert "\n" not in str(told.value)


def test_bytes_that_are_no_text_are_told(tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_bytes(b"\xff\xfe[training]")
    with pytest.raises(UserError, match="cannot be read"):
        load([f"--job.config_file={file}"], world_size=1)


def test_values_that_mean_off_are_no_errors():
    config = from_dict(
        {
            "parallelism": {"expert_parallel_degree": 1},
            "fault_tolerance": {"enable": False, "group_size": 4},
            "experimental": {"custom_import": ""},
            "metrics": {"enable_wandb": False},
            "model": {"converters": ["quantize.linear.float8"]},
        }
    )
    assert config.model.converters == ["float8"]


ENVIRONMENT = [
    ({"NGPU": "two"}, "NGPU"),
    ({"NGPU": "0"}, "NGPU"),
    ({"NNODES": "2:1"}, "NNODES"),
    ({"NNODES": "2"}, "MASTER_ADDR"),
    ({"LOG_RANK": "all"}, "LOG_RANK"),
    ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS"),
    ({"COMM_MODE": "magic"}, "COMM_MODE"),
    ({"CONFIG_FILE": "nowhere.toml"}, "nowhere.toml"),
]


def _wrong(tmp_path, *args, env=None):
    words = command(*args, cwd=tmp_path)
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(1, env), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
    return done.stderr


@pytest.mark.parametrize("env, words", ENVIRONMENT, ids=[" ".join(env) + "=" + str(list(env.values())[0]) for env, _ in ENVIRONMENT])  # fmt: skip  # noqa: RUF015
def test_a_wrong_variable_is_told_by_name(env, words, tmp_path):
    assert words in _wrong(tmp_path, env=env)


def test_the_command_ends_with_2_and_creates_nothing(tmp_path):
    assert "did you mean training.steps?" in _wrong(tmp_path, "--training.step=3")
    assert "has 1 process;" in _wrong(tmp_path, "--parallelism.data_parallel_shard_degree=2")


def test_torch_is_not_imported_and_the_answer_is_quick():
    code = (
        "import sys; from titanlite.launch import main; code = main(['--training.step=3']); "
        "assert code == 2 and 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )

    def seconds():
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
        return time.perf_counter() - start

    # The contract is half a second; a busy machine may take several times that, importing torch takes longer still.
    assert min(seconds() for _ in range(3)) < 2.0
