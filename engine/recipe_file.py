"""Recipes as TOML: read, layered, overridden, checked, written.

Every key of a recipe is known or the recipe is refused, with the nearest known key in the message. Nothing here
imports torch.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from engine.errors import InputError
from engine.recipe import Recipe, Section


class RecipeError(InputError):
    """A recipe that can't be run; its text names the key, the value and what to do."""


def load(path: str | Path, overrides: tuple[str, ...] = ()) -> Recipe:
    """Read the recipe at `path`, layer it over its `base`, apply `section.key=value` overrides and check it.

    Raises RecipeError with one message that names the key, the value and the nearest valid choice.
    """
    table = _read(Path(path), seen=())
    for text in overrides:
        _override(table, text)
    return parse(table)


def override(recipe: Recipe, overrides: tuple[str, ...]) -> Recipe:
    """A recipe with `section.key=value` overrides applied, checked again. Raises RecipeError as `load` does."""
    table = recipe.model_dump(exclude_none=True)
    for text in overrides:
        _override(table, text)
    return parse(table)


def parse(table: dict[str, Any]) -> Recipe:
    """Check a recipe given as nested dicts, as `tomllib` makes them."""
    try:
        return Recipe.model_validate(_tuples(table))
    except ValidationError as error:
        raise RecipeError("\n".join(_explain(e) for e in error.errors())) from None


def dump(recipe: Recipe) -> str:
    """The resolved recipe as TOML, complete: `load` gives the same recipe back."""
    lines: list[str] = []
    for section, table in recipe.model_dump(exclude_none=True).items():
        for entry in table if isinstance(table, tuple | list) else [table]:
            head = f"[[{section}]]" if isinstance(table, tuple | list) else f"[{section}]"
            lines += [head, *(f"{key} = {toml(value)}" for key, value in entry.items()), ""]
    return "\n".join(lines)


def differences(a: Recipe, b: Recipe) -> list[tuple[str, Any, Any]]:
    """The dotted keys at which two recipes differ, each with both values."""
    flat_a, flat_b = _flat(a.model_dump()), _flat(b.model_dump())
    keys = dict.fromkeys((*flat_a, *flat_b))
    return [(k, flat_a.get(k), flat_b.get(k)) for k in keys if flat_a.get(k) != flat_b.get(k)]


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise RecipeError(f"{path}: its chain of base = ... comes back to itself")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = sorted(str(p) for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        raise RecipeError(f"{path}: no such recipe{_nearest(str(path), near)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: can't be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: not valid TOML: {error}") from None
    base = table.pop("base", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise RecipeError(f"{path}: base = {base!r}: give the path of another recipe, relative to this one")
    return _layer(_read(path.parent / base, (*seen, path.resolve())), table)


def _layer(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _layer(merged[key], value) if both else value
    return merged


def _override(table: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot:
        raise RecipeError(f"--set {text}: write it as section.key=value, such as rollout.group_size=16")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a string: --set run.name=second
    target = table.setdefault(section, {})
    if not isinstance(target, dict):
        raise RecipeError(f"--set {text}: {section} is not a table that --set can reach; edit the recipe")
    *path, last = name.split(".")
    for part in path:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise RecipeError(f"--set {text}: {part} is not a table")
    target[last] = parsed


def _tuples(value: Any) -> Any:
    """TOML's lists as tuples, which strict frozen models want."""
    if isinstance(value, list):
        return tuple(_tuples(v) for v in value)
    return {k: _tuples(v) for k, v in value.items()} if isinstance(value, dict) else value


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    model: Any = Recipe
    for part in location:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        annotation = getattr(field, "annotation", None)
        inner = [a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, Section)]
        model = inner[0] if inner else annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
    return list(model.model_fields)


def _explain(error: ErrorDetails) -> str:
    location, kind, value = error["loc"], error["type"], error["input"]
    key = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        return f"unknown key {key} = {value!r}{_nearest(str(location[-1]), _known_keys(location[:-1]))}"
    if kind == "missing":
        return f"{key} is missing: every recipe must say it"
    if kind == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    if kind == "literal_error":
        choices = str(error.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
        return f"{key} = {value!r}: must be one of {', '.join(choices)}{_nearest(str(value), choices)}"
    message = str(error["msg"])
    return f"{key} = {value!r}: {message[0].lower()}{message[1:]}"


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(known)}" if known else ""


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{toml(k)} = {toml(v)}" for k, v in value.items()) + " }" if value else "{}"
    return repr(value)
