#!/usr/bin/env bash
# The test suite: ./tools/test.sh [pytest arguments], such as -k name, or --full for the long matrices.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/tools/environment.sh"
cd "$ROOT"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# Two at a time: most tests wait for processes of their own. A file's tests stay together and share its worlds.
exec "$PYTHON" -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile "$@"
