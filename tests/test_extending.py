"""The seam of the model families: outside its own folder a family is known by name in four places only."""

import re

from tests.command import ROOT

KNOWN = {
    "titanlite/models/registry.py": "names to families",
    "titanlite/models/flavors.py": "published sizes",
    "titanlite/models/hf.py": "names of the Hugging Face format",
    "titanlite/config/schema.py": "allowed names",
}


def test_nothing_else_knows_a_familys_name():
    found = set()
    for file in (ROOT / "titanlite").rglob("*.py"):
        name = file.relative_to(ROOT).as_posix()
        if name.startswith("titanlite/models/qwen3/"):
            continue
        if re.search(r"qwen", file.read_text(encoding="utf-8"), re.IGNORECASE):
            found.add(name)
    assert found == set(KNOWN)


def test_models_know_nothing_of_meshes():
    for file in (ROOT / "titanlite" / "models").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert (
            not re.search(r"titanlite\.(parallel|distributed|train|checkpoint|monitor|plan)|device_mesh", text)
            or file.name == "init.py"
        ), file


def test_config_never_imports_torch():
    for file in [*(ROOT / "titanlite" / "config").rglob("*.py"), ROOT / "titanlite" / "models" / "sizes.py"]:
        assert not re.search(r"^\s*(import|from) torch", file.read_text(encoding="utf-8"), re.MULTILINE), file
