"""Command-line overrides: ``--table.key=value``, ``--table.key value``, ``--table.flag``, ``--table.no-flag``."""

from __future__ import annotations

import json
import sys
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from titanlite.config.schema import Config
from titanlite.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Flag:
    """One override: the key's path, the text it was given, and how it was written."""

    path: tuple[str, ...]
    text: str | None
    written: str


def split(argv: list[str]) -> list[Flag]:
    """The overrides in ``argv``; a value is the text after ``=`` or the next argument that is no flag."""
    flags: list[Flag] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"{word}: not a flag; overrides are --table.key=value, see --help")
        name, equals, value = word[2:].partition("=")
        table, negated, key = name.partition(".no-")
        path = tuple((f"{table}.{key}" if negated else name).replace("-", "_").split("."))
        text: str | None = value if equals else None
        if negated and equals:
            raise UserError(f"--{name} takes no value")
        if negated:
            text = "false"
        elif not equals and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        if any(flag.path == path for flag in flags):
            raise UserError(f"--{'.'.join(path)} is given twice; which one is meant?")
        flags.append(Flag(path, text, f"--{name}"))
    return flags


def annotation(path: tuple[str, ...]) -> Any | None:
    """The type of a key by its path, list positions included, or None where there is no such key."""
    kind: Any = Config
    for name in path:
        items = [typing.get_args(one)[0] for one in alternatives(kind) if typing.get_origin(one) is list]
        if items and name.isdecimal():
            kind = items[0]
            continue
        found = tables(kind)
        if not found or name not in found[0].model_fields:
            return None
        kind = found[0].model_fields[name].rebuild_annotation()
    return kind


def tables(kind: Any) -> list[type[BaseModel]]:
    """The tables among a type's alternatives."""
    return [one for one in alternatives(kind) if isinstance(one, type) and issubclass(one, BaseModel)]


def alternatives(kind: Any) -> list[Any]:
    """The members of a union, without the notes that pydantic attaches."""
    if typing.get_origin(kind) is typing.Annotated:
        return alternatives(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [one for member in typing.get_args(kind) for one in alternatives(member)]
    return [kind]


def value(flag: Flag, kind: Any) -> Any:
    """The value that the flag's text means for a key of type ``kind``.

    Text that means nothing for the type is returned as it is, so that validation says what is allowed.
    """
    kinds = alternatives(kind)
    if flag.text is None:
        if bool in kinds:
            return True
        raise UserError(f"{flag.written} needs a value: {flag.written}=...")
    text = flag.text
    if text.lower() in ("none", "null") and type(None) in kinds:
        return None
    if any(typing.get_origin(one) is list for one in kinds):
        return _list(text, flag)
    if tables(kind):
        return _literal(text, flag)
    for one in kinds:
        found = _scalar(text, one)
        if found is not None:
            return found
    return text


def _scalar(text: str, kind: Any) -> Any | None:
    if kind is bool:
        return {"true": True, "false": False, "1": True, "0": False}.get(text.lower())
    if kind in (int, float):
        try:
            return kind(text.replace("_", ""))
        except ValueError:
            return None
    if typing.get_origin(kind) is Literal:
        return text if text in typing.get_args(kind) else None
    return None


def _list(text: str, flag: Flag) -> list[Any]:
    if text.lstrip().startswith("["):
        found = _literal(text, flag)
        if not isinstance(found, list):
            raise UserError(f"{flag.written}: {text!r} is not a list")
        return found
    items = [item.strip() for item in text.split(",") if item.strip()]
    inner = next(
        typing.get_args(one)[0] for one in alternatives(annotation(flag.path)) if typing.get_origin(one) is list
    )
    return [next((v for one in alternatives(inner) if (v := _scalar(item, one)) is not None), item) for item in items]


def _literal(text: str, flag: Flag) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return json.loads(text)
    except ValueError:
        raise UserError(f"{flag.written}: {text!r} is neither TOML nor JSON") from None


def guess(text: str | None) -> Any:
    """The value that a text most likely means where no type is known."""
    if text is None:
        return True
    try:
        return json.loads(text)
    except ValueError:
        return text
