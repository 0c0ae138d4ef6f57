"""The commands of README.md and docs/: every config they name is right, every tool and flag exists."""

import re
import shlex
import subprocess
import sys

import pytest

from tests.command import ROOT, environment
from titanlite.config import load

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = re.compile(r"(corpus|tokens|tokenizer|held_out|my|/data|/shared|/scratch)[/.\w*]*")
"""Files and folders of the reader's own."""


def _commands(kind):
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if any(word.endswith(kind) for word in words[:6]):
                    found.append(pytest.param(words, id=f"{page.name}: {' '.join(words)[:60]}"))
    return found


@pytest.mark.parametrize("words", _commands("run_train.sh"))
def test_the_config_of_a_command_is_right(words, monkeypatch):
    at = next(i for i, word in enumerate(words) if word.endswith("run_train.sh"))
    given = dict(word.split("=", 1) for word in words[:at] if "=" in word)
    size = given.get("NGPU", "1")
    file = given.get("CONFIG_FILE", "train_configs/debug_model.toml")
    if not size.isdigit() or ELSEWHERE.fullmatch(file) or "$" in " ".join(words):
        pytest.skip("it names what is the reader's own")
    flags = [word for word in words[at + 1 :] if word not in ("--help", "--print-config")]
    monkeypatch.chdir(ROOT)
    nodes = given.get("NNODES", "1").split(":")[-1]
    world_size = int(size) * (int(nodes) if nodes.isdigit() else 1)
    own = [f for f in flags if "=" in f and ELSEWHERE.fullmatch(f.split("=", 1)[1])]
    kinds = [f for f in flags if own and ("dataset" in f or "vocab_size" in f or "validation" in f)]
    load([f"--job.config_file={file}", *(f for f in flags if f not in own + kinds)], world_size=world_size)


@pytest.mark.parametrize("words", _commands(".py"))
def test_the_tool_of_a_command_has_its_flags(words):
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    tool = ROOT / words[at]
    if not words[at].startswith("tools/"):
        pytest.skip("no tool of ours")
    told = _help(tool)
    for word in words[at + 1 :]:
        flag = word.split("=")[0]
        if flag.startswith("--") and "." not in flag:
            assert flag in told, f"{words[at]} has no {flag}"


_helps = {}


def _help(tool):
    if tool not in _helps:
        done = subprocess.run(
            [sys.executable, str(tool), "--help"], capture_output=True, text=True, env=environment(), timeout=120
        )
        assert done.returncode == 0, done.stderr
        _helps[tool] = done.stdout
    return _helps[tool]


@pytest.mark.parametrize("tool", sorted((ROOT / "tools").glob("*.py")), ids=lambda tool: tool.name)
def test_every_tool_explains_itself(tool):
    if not tool.name.startswith("_"):
        assert "usage" in _help(tool)


def test_every_link_leads_somewhere():
    for page in PAGES + [ROOT / "STATUS.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
