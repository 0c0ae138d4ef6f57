#!/usr/bin/env python
"""Writes docs/config.md from the schema.

python tools/config_reference.py
"""

import argparse

import _environment

from titanlite.config.show import reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    page = _environment.ROOT / "docs" / "config.md"
    page.write_text(reference())
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
