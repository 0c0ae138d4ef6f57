# Sourced: sets PYTHON to an interpreter with torch and titanlite's dependencies, making .venv where there is none.
# An active environment that has torch is used as it is.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Whether an interpreter has torch; LACKING is what it has not of titanlite's other dependencies. find_spec looks for a
# package without importing it, which would take a second.
has_torch() {
    [ -n "$1" ] && LACKING="$("$1" -c '
import importlib.util, sys
absent = lambda name: importlib.util.find_spec(name) is None
print(*filter(absent, ("pydantic", "rich", "numpy", "tiktoken", "tensorboard")))
sys.exit(absent("torch"))' 2>/dev/null)"
}

make_environment() {
    local base
    base="$(command -v python3 || command -v python)" || { echo "titanlite needs Python 3.10 or newer" >&2; exit 2; }
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        { echo "titanlite needs Python 3.10 or newer; $base is $("$base" --version)" >&2; exit 2; }
    echo "titanlite: making the environment in $ROOT/.venv" >&2
    "$base" -m venv "$ROOT/.venv"
    # torch first and by exact pin: a range would take a CUDA build where a CPU build can be had.
    local pin
    pin="$(grep -E '^torch==' "$ROOT/constraints.txt")"
    "$ROOT/.venv/bin/python" -m pip install --quiet "${pin%% *}" &&
        "$ROOT/.venv/bin/python" -m pip install --quiet --constraint "$ROOT/constraints.txt" --editable "$ROOT[dev]" &&
        touch "$ROOT/.venv/complete"
}

if [ -f "$ROOT/.venv/complete" ] && [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    PYTHON="$ROOT/.venv/bin/python"
elif has_torch "$(command -v python || true)"; then
    PYTHON="$(command -v python)"
elif has_torch "$(command -v python3 || true)"; then
    PYTHON="$(command -v python3)"
else
    # One process installs, others that were started at the same time wait for it.
    exec 8>"$ROOT/.venv.lock"
    command -v flock >/dev/null && flock 8
    [ -f "$ROOT/.venv/complete" ] || make_environment || { echo "titanlite: setting up $ROOT/.venv failed" >&2; exit 1; }
    exec 8>&-
    PYTHON="$ROOT/.venv/bin/python"
fi
if [ -n "${LACKING:-}" ] && [ "$PYTHON" != "$ROOT/.venv/bin/python" ]; then
    echo "titanlite: the active environment has torch but lacks $LACKING; add them with: $PYTHON -m pip install -e $ROOT" >&2
    exit 2
fi
export PYTHON
