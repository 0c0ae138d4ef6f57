"""Imported first by every tool: the repository is importable, and Python has torch."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
_own = ROOT / ".venv" / "bin" / "python"
if importlib.util.find_spec("torch") is None:
    if not _own.exists() or Path(sys.executable) == _own:
        sys.exit("no environment with torch is active and there is no .venv yet: ./run_train.sh makes one")
    os.execv(_own, [str(_own), *sys.argv])
