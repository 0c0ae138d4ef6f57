"""Layouts that cannot be are refused when the config is read, by name and with what would do."""

import pytest

from titanlite.config import from_dict
from titanlite.errors import UserError

CASES = {
    "one key and value head over two": (
        2,
        {"tensor_parallel_degree": 2},
        {"model": {"n_heads": 4, "n_kv_heads": 1, "dim": 64, "head_dim": 16}},
        "n_kv_heads.*1",
    ),
    "three key and value heads over two": (
        2,
        {"tensor_parallel_degree": 2},
        {"model": {"n_heads": 6, "n_kv_heads": 3, "dim": 96, "head_dim": 16}},
        "n_kv_heads.*3",
    ),
    "two key and value heads over four": (
        4,
        {"tensor_parallel_degree": 4},
        {"model": {"n_heads": 4, "n_kv_heads": 2, "dim": 64, "head_dim": 16}},
        "n_kv_heads.*2",
    ),
    "odd vocabulary": (2, {"tensor_parallel_degree": 2}, {"model": {"vocab_size": 321}}, "vocab_size.*321"),
    "odd feed-forward": (2, {"tensor_parallel_degree": 2}, {"model": {"ffn_dim": 193}}, "ffn_dim.*193"),
    "tp and an odd sequence": (2, {"tensor_parallel_degree": 2}, {"training": {"seq_len": 65}}, "seq_len.*65.*66"),
    "cp and an odd sequence": (2, {"context_parallel_degree": 2}, {"training": {"seq_len": 65}}, "seq_len.*65.*68"),
    "head and tail of an odd half": (
        2,
        {"context_parallel_degree": 2},
        {"training": {"seq_len": 66}},
        "seq_len.*66.*68",
    ),
    "tp, cp and an odd quarter": (
        4,
        {"context_parallel_degree": 2, "tensor_parallel_degree": 2},
        {"training": {"seq_len": 34}},
        "seq_len.*34",
    ),
    "more ranks than there are": (2, {"tensor_parallel_degree": 4}, {}, "tensor_parallel_degree"),
    "ranks left over": (6, {"tensor_parallel_degree": 4}, {}, "tensor_parallel_degree"),
    "tied embeddings in a pipeline": (
        2,
        {"pipeline_parallel_degree": 2},
        {"model": {"tie_embeddings": True}},
        "tie_embeddings",
    ),
    "no such schedule": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1C"},
        {},
        "pipeline_parallel_schedule.*1F1B",
    ),
    "too many stages": (8, {"pipeline_parallel_degree": 8}, {"model": {"n_layers": 4}}, "pipeline"),
    "a micro-batch that does not divide": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 3},
        {},
        "pipeline_parallel_microbatch_size.*3",
    ),
    "fewer micro-batches than 1F1B needs": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 8},
        {},
        "micro-?batch",
    ),
    "one stage a rank of a looped schedule": (
        2,
        {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": "Interleaved1F1B",
            "pipeline_parallel_layers_per_stage": 4,
        },
        {},
        "Interleaved1F1B",
    ),
    "weights given away between the halves of a backward pass": (
        2,
        {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": "ZBVZeroBubble",
            "fsdp_reshard_after_forward": "always",
        },
        {},
        "fsdp_reshard_after_forward.*ZBVZeroBubble.*default",
    ),
    "operations kept for one backward pass of two": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
        {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
        "selective_ac_option.*ZBVZeroBubble",
    ),
    "asynchronous tensor parallelism without compile": (
        2,
        {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True},
        {},
        "enable_async_tensor_parallel",
    ),
    "rows that the shards do not divide": (4, {}, {"training": {"global_batch_size": 6}}, "global_batch_size"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_by_name(name):
    size, parallelism, tables, message = CASES[name]
    with pytest.raises(UserError, match=f"(?s){message}"):
        from_dict({"parallelism": parallelism, **tables}, world_size=size)


def test_asynchronous_tensor_parallelism_is_refused_where_there_is_no_gpu():
    from types import SimpleNamespace

    from titanlite.parallel.tensor import _overlap

    config = from_dict({"compile": {"enable": True}}, world_size=1)
    with pytest.raises(UserError, match="enable_async_tensor_parallel needs CUDA"):
        _overlap(config, SimpleNamespace(device_type="cpu"))
