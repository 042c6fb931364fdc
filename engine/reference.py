"""docs/recipe.md, made from the types: `python -m engine.reference > docs/recipe.md`.

The source is read as text, since what stands below a field is no docstring to Python.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from engine import recipe
from engine.recipe import Section
from engine.recipe_file import toml

BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}

HEAD = """# Recipe reference

Made from `engine/recipe.py` by `python -m engine.reference`; a test keeps the two alike.

A recipe is TOML. Every key is known or the run does not start. `base = "other.toml"`, relative to the recipe, lays it
over another one; `--set section.key=value` overrides a key; `rlvr run RECIPE --dry-run` prints the whole of it.
"""


def markdown() -> str:
    """The page."""
    classes = {node.name: node for node in ast.parse(inspect.getsource(recipe)).body if isinstance(node, ast.ClassDef)}
    sections = [line for node in _fields(classes["Recipe"]) for line in _section(classes[_class_of(node)])]
    return "\n".join([HEAD, *sections])


def _class_of(field: ast.AnnAssign) -> str:
    """The section's class in an annotation such as `Lora | None` or `tuple[Gate, ...]`."""
    names = [node.id for node in ast.walk(field.annotation) if isinstance(node, ast.Name) and node.id != "tuple"]
    return names[0]


def _section(node: ast.ClassDef) -> Iterator[str]:
    section: type[Section] = getattr(recipe, node.name)
    title, _, meaning = (ast.get_docstring(node) or "").replace("\n", " ").partition(": ")
    yield f"## {title}\n\n{meaning[:1].upper()}{meaning[1:]}\n\n| key | value | default | meaning |\n|---|---|---|---|"
    schemas = section.model_json_schema()["properties"]
    for name, text in _documented(node).items():
        field = section.model_fields[name]
        default = "required" if field.is_required() else f"`{toml(field.get_default(call_default_factory=True))}`"
        cells = [f"`{name}`", _kind(schemas[name]), default, text]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _documented(node: ast.ClassDef) -> dict[str, str]:
    """Each field's name with the text below it."""
    found = {}
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = following.value if isinstance(following, ast.Expr) else None
            text = str(value.value) if isinstance(value, ast.Constant) else ""
            found[statement.target.id] = inspect.cleandoc(text).replace("\n", " ")
    return found


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]


def _kind(schema: Mapping[str, Any]) -> str:
    """What a value may be, in words, from its JSON schema."""
    if "enum" in schema:
        return ", ".join(f"`{toml(value)}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        items = schema.get("prefixItems") or [schema["items"]]
        return f"list of {_kind(items[0])}"
    word = {"integer": "whole number", "string": "text", "boolean": "true or false", "object": "table"}.get(kind, kind)
    bounds = [f"{sign} {schema[key]:g}" for key, sign in BOUNDS.items() if key in schema]
    return " ".join([word, ", ".join(bounds)]).strip()


if __name__ == "__main__":
    print(markdown(), end="")
