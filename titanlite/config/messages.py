"""Validation errors in words: which key, where it stands, what is allowed, what was probably meant."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from titanlite.config import flags
from titanlite.config.schema import Config


def place(path: tuple[str, ...], origins: dict[tuple[str, ...], str]) -> str:
    """Where the value of a key was given: "file.toml:12: training.steps", or the flag."""
    origin = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), None)
    name = ".".join(path)
    if origin is None:
        return name
    return origin if origin.startswith("--") else f"{origin}: {name}"


def unknown(path: tuple[str, ...], where: str) -> str:
    """A key that does not exist."""
    depth = next((n for n in range(1, len(path) + 1) if flags.annotation(path[:n]) is None), len(path))
    if depth == 1:
        what = f"there is no table [{path[0]}]"
        near = difflib.get_close_matches(path[0], list(Config.model_fields), 1)
        hint = f"; did you mean [{near[0]}]?" if near else f"; tables are {', '.join(Config.model_fields)}"
        if len(path) == 1 and not near:
            homes = [name for name in keys() if name.endswith(f".{path[0]}")]
            hint = f"; did you mean {homes[0]}?" if homes else hint
        return f"{where}: {what}{hint}"
    table, key = ".".join(path[: depth - 1]), path[depth - 1]
    inside = [name.removeprefix(f"{table}.") for name in keys() if name.startswith(f"{table}.")]
    near = difflib.get_close_matches(key, inside, 1, 0.6)
    elsewhere = [name for name in keys() if name.split(".")[-1] == key]
    far = difflib.get_close_matches(".".join(path), keys(), 1, 0.7)
    if elsewhere and not near:
        hint = f"; did you mean {elsewhere[0]}?"
    elif near:
        hint = f"; did you mean {table}.{near[0]}?"
    else:
        hint = f"; did you mean {far[0]}?" if far else f"; its keys are {', '.join(inside)}"
    return f"{where}: table [{table}] has no key {key!r}{hint}"


def keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every key as "table.key"."""
    return list(_keys(model, prefix))


def _keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = [
            one for one in flags.alternatives(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)
        ]
        if inner and type(None) not in flags.alternatives(field.annotation):
            yield from _keys(inner[0], f"{prefix}{name}.")
        else:
            yield prefix + name


def invalid(error: ValidationError, origins: dict[tuple[str, ...], str]) -> str:
    """The first thing that pydantic found wrong, in words."""
    first = error.errors()[0]
    path = _key_path(first["loc"])
    if first["type"] == "extra_forbidden":
        return unknown(path, place(path, origins))
    where = place(path, origins)
    if first["type"] == "missing":
        return f"{where}: {first['loc'][-1]} is missing"
    kind = flags.annotation(path)
    allowed = describe(kind) if kind is not None else first["msg"]
    return f"{where}: {_shown(first['input'])} is not allowed; it must be {allowed}{_meant(first['input'], kind)}"


def _key_path(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """The keys of pydantic's location, without the names of union members and list positions that it adds."""
    path: list[str] = []
    for part in loc:
        if not isinstance(part, str) or (
            path and flags.annotation((*path, part)) is None and part not in _extra(path, part)
        ):
            break
        path.append(part)
    return tuple(path) or (str(loc[0]),)


def _extra(path: list[str], part: str) -> tuple[str, ...]:
    kind = flags.annotation(tuple(path))
    is_table = any(isinstance(one, type) and issubclass(one, BaseModel) for one in flags.alternatives(kind))
    return (part,) if is_table else ()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:76] + "..."


def _meant(value: Any, kind: Any) -> str:
    choices = [c for one in flags.alternatives(kind) if typing.get_origin(one) is Literal for c in typing.get_args(one)]
    near = difflib.get_close_matches(str(value), choices, 1) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def describe(kind: Any) -> str:
    """A type in words."""
    if typing.get_origin(kind) is typing.Annotated:
        limits = ", ".join(
            _limit(note) for note in typing.get_args(kind)[1:] for note in getattr(note, "metadata", [note])
        )
        return describe(typing.get_args(kind)[0]) + (f" {limits}" if limits else "")
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(kind))
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
