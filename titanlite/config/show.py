"""The configuration as text: ``--help`` and ``--print-config``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from titanlite.config import dialect, flags, messages
from titanlite.config.schema import Config, RopeScaling, Source

USAGE = """usage: ./run_train.sh [--table.key=value ...]

Environment: NGPU processes on this machine, CONFIG_FILE the TOML file, LOG_RANK ranks whose output is shown, NNODES,
NODE_RANK, MASTER_ADDR, MASTER_PORT, MAX_RESTARTS as for torchrun, COMM_MODE=fake_backend for a dry run.

Overrides: --table.key=value or --table.key value; --table.flag and --table.no-flag; lists separated by commas.
--print-config prints the resolved config with where each value came from. A file inherits by extends = "base.toml".
"""

REFERENCE = """# Configuration

A run is described by one TOML file and flags over it: flags win over the file, the file over what it extends, that over
the defaults. `./run_train.sh --print-config` prints every value with the file and line, or the flag, that it came from;
`./run_train.sh --help` prints this page for a terminal. Table and key names are those of torchtitan's TOML files.

```toml
extends = "llama3_8b.toml"        # relative to this file

[training]
steps = 2000
```

```bash
CONFIG_FILE=my.toml NGPU=8 ./run_train.sh --training.steps=20 --checkpoint.no-enable --compile.components=model,loss
```

A flag is `--table.key=value` or `--table.key value`; true and false also as `--table.flag` and `--table.no-flag`; lists
separated by commas; lists of tables as TOML or JSON. `none` is a value of the keys that allow it: a flag can say so, in
a file the key is left out. Types are strict: `"4"` is no number. A wrong key, type, value, path or combination ends
with one message and exit code 2, before torch is imported and before anything is created.

This page is written by `python tools/config_reference.py` from `titanlite/config/schema.py`."""


def tables(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every table by name, nested ones after those that hold them."""
    for name, field in model.model_fields.items():
        inner = flags.tables(field.annotation)
        if inner and type(None) not in flags.alternatives(field.annotation):
            yield prefix + name, inner[0]
            yield from tables(inner[0], f"{prefix}{name}.")


def fields(table: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """The keys of a table: name, type in words, default as TOML, meaning."""
    inner = {name.split(".")[0] for name, _ in tables(table)}
    for name, field in table.model_fields.items():
        if name not in inner:
            words = messages.describe(field.rebuild_annotation())
            default = "required" if field.is_required() else toml_value(field.default)
            yield name, words, default, field.description or ""


def help_text() -> str:
    """Every key with its type, default and meaning."""
    lines = [USAGE]
    for name, table in tables():
        keys = list(fields(table))
        if keys:
            lines.append(f"[{name}]  {(table.__doc__ or '').splitlines()[0]}")
        for key, words, default, doc in keys:
            lines.append(f"  --{name}.{key} (default {default})\n      {doc}\n      {words}")
    return "\n".join(lines)


def reference() -> str:
    """The page docs/config.md: every table, key, type, default and meaning."""
    lines = [REFERENCE]
    for name, table in tables():
        keys = list(fields(table))
        if keys:
            lines += [f"\n## `[{name}]`\n", f"{(table.__doc__ or '').splitlines()[0]}\n"]
            lines += ["| key | allowed | default | meaning |", "| --- | --- | --- | --- |"]
        for row in keys:
            key, words, default, doc = (cell.replace("|", "\\|") for cell in row)
            lines.append(f"| `{key}` | {words} | `{default}` | {doc} |")
    for title, table in (("`[[data.sources]]`", Source), ("`model.rope_scaling`", RopeScaling)):
        lines += [f"\n## {title}\n", f"{(table.__doc__ or '').splitlines()[0]}\n"]
        lines += ["| key | allowed | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [f"| `{key}` | {words} | `{default}` | {doc} |" for key, words, default, doc in fields(table)]
    off = "\n".join(f"- `{name}`: {what}" for name, (what, _) in dialect.UNSUPPORTED.items())
    old = "\n".join(f"| `{before}` | `{today}` |" for before, today in dialect.RENAMED.items())
    lines.append(f"\n## Keys that are refused unless they are off\n\n{off}")
    lines.append(f"\n## Keys of older files\n\n| then | today |\n| --- | --- |\n{old}")
    return "\n".join(lines) + "\n"


def toml_text(config: Config, origins: dict[tuple[str, ...], str] | None = None) -> str:
    """The resolved config as TOML, each value with where it came from where that is known; ``load`` reads it back."""
    lines: list[str] = []
    for name, kind in tables():
        path = tuple(name.split("."))
        table: Any = config
        for part in path:
            table = getattr(table, part)
        own = [key for key, *_ in fields(kind)]
        lines += ["", f"[{name}]"] if own else []
        for key in own:
            text = toml_value(getattr(table, key))
            whence = (
                next((origins[p] for p in sorted(origins) if p[: len(path) + 1] == (*path, key)), "default")
                if origins
                else ""
            )
            lines.append(
                f"# {key} is none" if text == "none" else f"{key} = {text}" + (f"  # {whence}" if whence else "")
            )
    return "\n".join(lines).lstrip() + "\n"


def toml_value(value: Any) -> str:
    """A value as TOML; None, which TOML does not have, as "none"."""
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return toml_value(value.model_dump(exclude_none=True))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
