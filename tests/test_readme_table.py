"""Every test that the table in README.md names is there."""

import re
from pathlib import Path

HERE = Path(__file__).parent
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def test_the_table_names_tests_that_exist():
    rows = [line for line in (HERE / "README.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 40
    for row in rows:
        _, fault, held, _ = row.split("|")
        named = NAMED.findall(held)
        assert named or "not offered" in held, f"no test: {fault}"
        for file, name in named:
            assert re.search(rf"^def {name}\(", (HERE / file).read_text(), re.MULTILINE), f"{file} has no {name}"
