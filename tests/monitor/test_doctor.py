"""Each fault made on purpose is named first."""

import json

import pytest

from tests.monitor.test_tools import _line
from titanlite.errors import UserError
from titanlite.monitor import doctor, runs


def _findings(tmp_path, **changes):
    folder = tmp_path / "run"
    folder.mkdir()
    lines = []
    for step in range(1, 9):
        line = _line(step, 5.0) | {"time": 100.0 + 2 * step, "checkpoint_stall_seconds": 0.0, "data_wait_seconds": 0.0}
        lines.append(line | {key: change(step) for key, change in changes.items()})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return doctor.of_run(runs.read(folder))


@pytest.mark.parametrize(
    ("changes", "told", "share"),
    [
        ({"data_wait_seconds": lambda s: 0.1}, "waiting for data", 0.5),
        ({"checkpoint_stall_seconds": lambda s: 1.0 * (s % 2)}, "waiting for checkpoints", 3 / 14),
        ({"rank_seconds_spread": lambda s: 0.05}, "waiting for slow ranks", 0.25),
        ({"step_seconds": lambda s: 2.0 if s == 5 else 0.2}, "single slow lines, such as step 5", 1.8 / 3.2),
        ({"memory_peak_percent": lambda s: 97.0}, "memory is 97 % full", 0.0),
    ],
)
def test_a_run_with_one_fault(tmp_path, changes, told, share):
    findings = _findings(tmp_path, **changes)
    assert findings[0].what == told
    assert findings[0].share == pytest.approx(share, abs=0.02)
    assert len(findings) == 1


def test_a_healthy_run_has_no_findings(tmp_path):
    assert _findings(tmp_path) == []


def _trace(tmp_path, *events):
    file = tmp_path / "trace.json"
    step = {"ph": "X", "name": "ProfilerStep#3", "ts": 0, "dur": 1000}
    file.write_text(json.dumps({"traceEvents": [step, *({"ph": "X", **event} for event in events)]}))
    return doctor.of_trace(file)


def test_communication_that_hides_behind_computing_is_no_finding(tmp_path):
    work = {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 1000}
    hidden = {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING", "ts": 100, "dur": 500}
    assert _trace(tmp_path, work, hidden) == []


def test_exposed_communication_and_a_waiting_device_are_told_apart(tmp_path):
    work = {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 400}
    exposed = {"cat": "kernel", "name": "ncclDevKernel_ReduceScatter_Sum", "ts": 300, "dur": 400}
    first, second = _trace(tmp_path, work, exposed)
    assert (first.what, first.share) == ("exposed communication: ReduceScatter", pytest.approx(0.3))
    assert (second.what, second.share) == ("the device waits for the CPU", pytest.approx(0.3))


def test_on_the_cpu_the_costliest_collective_comes_first(tmp_path):
    found = _trace(
        tmp_path,
        {"name": "gloo:all_gather", "ts": 0, "dur": 300},
        {"name": "gloo:all_reduce", "ts": 400, "dur": 100},
        {"name": "aten::mm", "ts": 500, "dur": 400},
    )
    assert [finding.what for finding in found] == ["communication: all_gather", "communication: all_reduce"]


def test_what_is_no_trace_is_told(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(UserError, match="no trace"):
        doctor.of_trace(tmp_path / "x.json")
