"""TOML files and flags to one checked ``Config``.

>>> load(["--job.config_file=train_configs/debug_model.toml", "--training.steps=20"]).training.steps
20
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from titanlite.config import checks, dialect, flags, messages, show
from titanlite.config.checker import Origins
from titanlite.config.schema import Config
from titanlite.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load(argv: list[str], world_size: int | None = None) -> Config:
    """The config that ``argv`` asks for: flags over a TOML file over defaults.

    ``world_size`` is the number of processes that it is checked for; None takes it from torchrun's environment, or from
    ``NGPU`` and ``NNODES``. ``--help`` and ``--print-config`` print and raise ``SystemExit(0)``.

    Raises:
        UserError: with one message that names the file and line or the flag, what is allowed, what was probably meant.
    """
    if "--help" in argv or "-h" in argv:
        _show(show.help_text())
    wants_print = "--print-config" in argv
    overrides = flags.split([word for word in argv if word != "--print-config"])
    given: dict[str, Any] = {}
    origins: Origins = {}
    file = next((flag.text for flag in overrides if flag.path == ("job", "config_file")), None)
    if file is not None:
        given = _read(Path(file), origins, ())
    for flag in overrides:
        kind = flags.annotation(flag.path)
        if kind is not None:
            _set(given, flag.path, flags.value(flag, kind), origins, flag.written)
        elif dialect.is_elsewhere(flag.path):
            _set(given, flag.path, flags.guess(flag.text), origins, flag.written)
        else:
            raise UserError(messages.unknown(flag.path, flag.written))
    config = _checked(given, origins, _world_size() if world_size is None else world_size)
    if wants_print:
        _show(show.toml_text(config, origins))
    return config


def _show(text: str) -> NoReturn:
    """Print and end; a reader that has seen enough, such as head, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)


def from_dict(values: dict[str, Any], world_size: int = 1) -> Config:
    """A config from nested values, with the same checks as ``load``."""
    return _checked(copy.deepcopy(values), {}, world_size)


def _checked(given: dict[str, Any], origins: Origins, world_size: int) -> Config:
    dialect.refuse_others(given, origins)
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        raise UserError(messages.invalid(error, origins)) from None
    checks.refuse_contradictions(config, world_size, origins)
    return config


def _world_size() -> int:
    if os.environ.get("WORLD_SIZE"):
        return _count("WORLD_SIZE")
    nodes = os.environ.get("NNODES", "1").split(":")[-1]
    return (int(nodes) if nodes.isdigit() else 1) * _count("NGPU")


def _count(name: str) -> int:
    text = os.environ.get(name) or "1"
    if not text.isdigit() or int(text) == 0:
        raise UserError(f"environment variable {name} must be a whole number from 1 on, not {text!r}")
    return int(text)


def _read(path: Path, origins: Origins, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The values of a file over those of the files it extends."""
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"config file {path} is not TOML: {error}") from None
    lines = _lines(text)
    base = values.pop("extends", None)
    result: dict[str, Any] = {}
    if base is not None:
        where = f"{path}:{lines.get(('extends',), 1)}"
        if not isinstance(base, str):
            raise UserError(f"{where}: extends must be the name of one file, not {base!r}")
        parent = path.parent / base
        if path.resolve() in seen or parent.resolve() == path.resolve():
            raise UserError(f"{where}: extends goes round in a circle through {base}")
        if not parent.exists():
            raise UserError(f"{where}: extends {base}, but {parent} does not exist")
        result = _read(parent, origins, (*seen, path.resolve()))
    for keys, line in lines.items():
        origins[keys] = f"{path}:{line}"
    for keys, value in _leaves(values):
        inside = next((lines[keys[:n]] for n in range(len(keys), 1, -1) if keys[:n] in lines), None)
        _set(
            result, keys, value, origins, f"{path}:{lines.get(keys, inside)}" if inside or keys in lines else str(path)
        )
    return result


def _leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _set(values: dict[str, Any], path: tuple[str, ...], value: Any, origins: Origins, origin: str) -> None:
    for name in path[:-1]:
        inner = values.get(name)
        if not isinstance(inner, dict):
            inner = values[name] = {}
        values = inner
    values[path[-1]] = value
    if origin.startswith("--"):
        for inside in [other for other in origins if other[: len(path)] == path]:
            del origins[inside]
    origins[path] = origin


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """The line of each table and key, elements of arrays of tables by their position."""
    found: dict[tuple[str, ...], int] = {}
    counts: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[([^\[\]]+)\]\]\s*(#.*)?$", line):
            name = _dotted(header[1])
            counts[name] = counts.get(name, -1) + 1
            found.setdefault(name, number)
            table = (*name, str(counts[name]))
            found[table] = number
        elif header := re.match(r"\s*\[([^\[\]]+)\]\s*(#.*)?$", line):
            table = _dotted(header[1])
            found.setdefault(table, number)
        elif key := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            found.setdefault(table + _dotted(key[1]), number)
    return found


def _dotted(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split("."))
