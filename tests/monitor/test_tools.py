"""Runs are read back, compared and shown; from outside, as a user calls the tools."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests.command import ROOT, environment
from titanlite.monitor import page, plot, runs


def _line(step, loss):
    return {
        "step": step,
        "data_step": step,
        "loss": loss,
        "grad_norm": 1.0 + step / 10,
        "lr": 1e-3,
        "tokens_seen": 100 * step,
        "tokens_per_second": 50.0,
        "memory_peak_gib": 0.5,
        "memory_peak_percent": 2.0,
        "step_seconds": 0.2,
        "data_wait_seconds": 0.01,
        "eta_seconds": 61.0,
        "time": 1.0e9,
    }


def _run(folder, losses, extra=()):
    folder.mkdir(parents=True)
    lines = [_line(step, loss) for step, loss in enumerate(losses, 1)] + list(extra)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "lo')
    return folder


@pytest.fixture
def a(tmp_path):
    extra = [{"step": 2, "event": "skip", "text": "the <loss> is nan"}, _line(3, 3.0) | {"validation_loss": 4.5}]
    return _run(tmp_path / "a", [5.0, 4.0, 3.0, 2.5], extra)


def _tool(name, *args):
    words = [sys.executable, str(ROOT / "tools" / name), *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=120)


def test_a_half_written_line_is_passed_over_and_the_rest_is_read(a):
    run = runs.read(a)
    assert runs.curve(run, "loss") == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.5)]
    assert run.events == [(2, "skip", "the <loss> is nan")] and run.validation == [(3, 4.5)]


def test_the_first_step_where_runs_part_is_named(a, tmp_path):
    b = _run(tmp_path / "b", [5.0, 4.0 * (1 + 2e-6), 3.1, 2.5])
    done = _tool("compare_runs.py", a, b)
    assert done.returncode == 1
    assert "they part at step 3" in done.stdout and "0.0323 at step 3" in done.stdout
    assert _tool("compare_runs.py", a, b, "--tolerance", "0.1").returncode == 0
    assert _tool("compare_runs.py", a, b, "--key", "grad_norm").returncode == 0


def test_nan_in_one_run_is_a_parting(a, tmp_path):
    b = _run(tmp_path / "b", [5.0, float("nan"), 3.0, 2.5])
    compared = runs.compare(runs.read(a), runs.read(b), "loss", 1.0)
    assert compared.parted_at == 2 and compared.largest_at == 2


@pytest.mark.parametrize("tool", ["compare_runs.py", "watch.py"])
def test_a_folder_without_a_run_is_told(tool, tmp_path, a):
    arguments = (a, tmp_path / "none") if tool == "compare_runs.py" else (tmp_path / "none",)
    done = _tool(tool, *arguments)
    assert done.returncode == 2 and "no metrics.jsonl" in done.stderr and "Traceback" not in done.stderr


def test_the_terminal_view_has_curves_facts_and_events(a):
    done = _tool("watch.py", a, "--once")
    assert done.returncode == 0, done.stderr
    for part in ("loss", "2.5", "tokens a second", "0:01:01", "skip: the <loss> is nan", "4.5000 at step 3"):
        assert part in done.stdout


class _Strict(HTMLParser):
    """Every element is closed, in order."""

    empty = {"meta", "line", "polyline"}

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in self.empty:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.empty:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(a, tmp_path):
    done = _tool("watch.py", a, "--html", tmp_path / "run.html")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "run.html").read_text()
    parser = _Strict()
    parser.feed(text)
    assert not parser.open and parser.seen.count("svg") == 7
    assert not re.search(r"https?://|src=|<script|@import", text)
    assert "the &lt;loss&gt; is nan" in text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed: the page was only parsed")
def test_a_browser_draws_the_page(a, tmp_path):
    (tmp_path / "run.html").write_text(page.html_page(runs.read(a)))
    words = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path / 'run.html'}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("<polyline") >= 7


def test_a_flat_or_empty_curve_is_drawn_too():
    assert "nothing to draw" in plot.text({"a": []}, "loss")
    assert "loss" in plot.text({"a": [(1, 2.0), (2, 2.0)]}, "loss")
    assert plot.svg({"a": [(1, 2.0)]}, "x").count("<polyline") == 1
