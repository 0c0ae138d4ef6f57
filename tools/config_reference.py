#!/usr/bin/env python
"""Writes docs/config.md from the schema: python tools/config_reference.py."""

import _environment

from titanlite.config.show import reference

if __name__ == "__main__":
    page = _environment.ROOT / "docs" / "config.md"
    page.write_text(reference())
    print(f"wrote {page}")
