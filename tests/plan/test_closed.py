"""The closed form: published runs, search, the command, and what a run is told. No torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite.config import from_dict, load
from titanlite.errors import UserError
from titanlite.plan import face, hardware
from titanlite.plan.estimate import of_config
from titanlite.plan.search import search, why

ROOT = Path(__file__).resolve().parents[2]
H100 = hardware.DEVICES["h100"]


def plan(*words, gpus=8):
    return load([f"--job.config_file={ROOT}/train_configs/llama3_8b.toml", *words], world_size=gpus)


def tool(*words):
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / words[0]), *words[1:]], capture_output=True, text=True, timeout=300
    )


def test_published_runs_are_predicted():
    found = tool("bench/plan_accuracy.py", str(ROOT / "tools/bench/published.csv"), "--json")
    total = json.loads(found.stdout)["summary"]
    assert total["tokens_per_second"]["rows"] >= 58
    assert total["tokens_per_second"]["median"] <= 0.15 and total["tokens_per_second"]["p90"] <= 0.35
    assert total["memory_gib"]["median"] <= 0.10 and total["memory_gib"]["p90"] <= 0.20


def test_the_command_tells_what_scripts_read_without_torch():
    found = tool("plan.py", str(ROOT / "train_configs/llama3_8b.toml"), "--gpus", "8", "--gpu", "h200", "--json")
    told = json.loads(found.stdout)
    keys = "tokens_per_second_per_device tflops_per_device mfu step_seconds memory_peak_gib memory_gib collectives fits"
    assert set(keys.split()) <= set(told)
    code = "import titanlite.plan.search, titanlite.plan.face, sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


def test_search_writes_a_layout_that_loads(tmp_path):
    file = tmp_path / "best.toml"
    words = ("--gpus", "64", "--gpu", "h100", "--search", "--json", "--write", str(file))
    told = json.loads(tool("plan.py", str(ROOT / "train_configs/llama3_8b.toml"), *words).stdout)
    speeds = [each["tokens_per_second_per_device"] for each in told["layouts"]]
    assert speeds == sorted(speeds, reverse=True) and all(each["fits"] for each in told["layouts"])
    again = load([f"--job.config_file={file}"], world_size=64)
    assert of_config(again, 64, H100).tokens_per_second_per_device == pytest.approx(speeds[0])


def test_search_says_when_nothing_fits():
    config = load([f"--job.config_file={ROOT}/train_configs/llama3_405b.toml"], world_size=512)
    small = hardware.device("h100", memory_gib=4)
    result = search(config, 512, small)
    assert not result.layouts and "None of" in why(result)[0]


def test_a_cluster_of_ones_own(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "h100"\nper_node = 4\n')
    assert hardware.device(str(file)).per_node == 4
    file.write_text('base = "h100"\nper_nodes = 4\n')
    with pytest.raises(UserError, match="per_nodes"):
        hardware.device(str(file))
    with pytest.raises(UserError, match="h100_96gb"):
        hardware.device("v100")


def test_every_knob_moves_memory_the_way_it_should():
    def peak(*words, gpus=8):
        return of_config(plan(*words, gpus=gpus), gpus, H100).peak_gib

    base = peak()
    assert peak("--activation_checkpoint.mode=full") < base < peak("--activation_checkpoint.mode=none")
    assert peak("--training.local_batch_size=2") > base
    assert peak("--training.loss_chunks=1", "--training.local_batch_size=4") > peak("--training.local_batch_size=4")
    assert peak("--optimizer.state_dtype=bfloat16") < base
    assert peak(gpus=64) < base


def test_ways_out_are_three_and_name_the_keys():
    config = plan("--training.local_batch_size=8", "--activation_checkpoint.mode=none")
    ways = face.ways_out(config, 8, H100)
    assert len(ways) == 3
    assert all(way.saves > 0 and way.what.startswith("--") for way in ways)
    assert any("activation_checkpoint" in way.what for way in ways)


def test_flops_are_those_of_the_monitor():
    from titanlite.models.sizes import sizes_of
    from titanlite.monitor.flops import flops_per_token

    config = from_dict({"model": {"flavor": "8B"}})
    w = of_config(config, 1, H100).workload
    assert w.flops_per_token == flops_per_token(sizes_of(config.model), config.training.seq_len)
