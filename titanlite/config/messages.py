"""Validation errors in words: which key, where it stands, what is allowed, what was probably meant."""

from __future__ import annotations

import difflib
import typing
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from titanlite.config import flags
from titanlite.config.schema import Config


def place(path: tuple[str, ...], origins: dict[tuple[str, ...], str]) -> str:
    """Where the value of a key was given: "file.toml:12: training.steps", or the flag."""
    # An element of a list stands where the list does; the line of a whole table says nothing about its keys.
    lengths = range(len(path), 0, -1)
    origin = next((origins[path[:n]] for n in lengths if path[:n] in origins and (n > 1 or len(path) == 1)), None)
    name = ".".join(path)
    if origin is None:
        return name
    return origin if origin == f"--{name}" else f"{origin}: {name}"


def unknown(path: tuple[str, ...], where: str) -> str:
    """A key that does not exist, and the one that was probably meant."""
    depth = next((n for n in range(1, len(path) + 1) if flags.annotation(path[:n]) is None), len(path))
    key, every = path[depth - 1], keys()
    if depth == 1:
        near = difflib.get_close_matches(key, list(Config.model_fields), 1)
        homes = [name for name in every if name.endswith(f".{key}")] if len(path) == 1 else []
        meant = f"[{near[0]}]" if near else homes[0] if homes else None
        hint = f"did you mean {meant}?" if meant else f"tables are {', '.join(Config.model_fields)}"
        return f"{where}: there is no table [{key}]; {hint}"
    table = ".".join(path[: depth - 1])
    found = flags.tables(flags.annotation(path[: depth - 1]))
    if not found:
        return f"{where}: {table} is not a table"
    inside = list(found[0].model_fields)
    near = difflib.get_close_matches(key, inside, 1)
    homes = [name for name in every if name.endswith(f".{key}")]
    meant = f"{table}.{near[0]}" if near and not homes else next(iter(homes), None)
    hint = f"did you mean {meant}?" if meant else f"its keys are {', '.join(inside)}"
    return f"{where}: table [{table}] has no key {key!r}; {hint}"


def keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every key as "table.key"."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        inner = flags.tables(field.annotation)
        if inner and type(None) not in flags.alternatives(field.annotation):
            found += keys(inner[0], f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


def invalid(error: ValidationError, origins: dict[tuple[str, ...], str]) -> str:
    """The first thing that pydantic found wrong, in words."""
    first = error.errors()[0]
    path = _key_path(first["loc"])
    where = place(path, origins)
    if first["type"] == "extra_forbidden":
        return unknown(path, where)
    if first["type"] == "missing":
        return f"{where}: is missing"
    kind = flags.annotation(path)
    allowed = describe(kind) if kind is not None else first["msg"]
    return f"{where}: {_shown(first['input'])} is not allowed; it must be {allowed}{_meant(first['input'], kind)}"


def _key_path(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """The keys and list positions of pydantic's location, without the names of union members that it adds."""
    path: list[str] = []
    for part in loc:
        kind = flags.annotation(tuple(path)) if path else Config
        if flags.annotation((*path, str(part))) is None and not flags.tables(kind):
            break
        path.append(str(part))
    return tuple(path)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:76] + "..."


def _meant(value: Any, kind: Any) -> str:
    choices = [c for one in flags.alternatives(kind) if typing.get_origin(one) is Literal for c in typing.get_args(one)]
    folded = {str(choice).lower(): choice for choice in choices}
    near = difflib.get_close_matches(value.lower(), folded, 1) if isinstance(value, str) else []
    return f"; did you mean {folded[near[0]]!r}?" if near else ""


def describe(kind: Any) -> str:
    """A type in words."""
    if typing.get_origin(kind) is typing.Annotated:
        limits = ", ".join(
            _limit(note) for note in typing.get_args(kind)[1:] for note in getattr(note, "metadata", [note])
        )
        return describe(typing.get_args(kind)[0]) + (f" {limits}" if limits else "")
    if typing.get_origin(kind) is Literal:
        choices = [repr(choice) for choice in typing.get_args(kind)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if typing.get_origin(kind) is list:
        return f"a list, each {describe(typing.get_args(kind)[0])}"
    members = typing.get_args(kind) if len(flags.alternatives(kind)) > 1 else ()
    if members:
        return " or ".join(describe(member) for member in members)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    return names.get(kind, "a table")


def _limit(note: Any) -> str:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return " and ".join(f"{words} {getattr(note, sign)}" for sign, words in signs.items() if hasattr(note, sign))
