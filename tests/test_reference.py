from __future__ import annotations

from pathlib import Path

from engine.recipe import Recipe
from engine.reference import markdown

PAGE = Path(__file__).parents[1] / "docs" / "recipe.md"


def test_the_page_is_what_the_types_say() -> None:
    assert PAGE.read_text() == markdown(), "run python -m engine.reference > docs/recipe.md"


def test_every_key_has_a_meaning() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    keys = sum(
        len(model.model_fields)
        for field in Recipe.model_fields.values()
        for model in [field.annotation, *getattr(field.annotation, "__args__", ())]
        if hasattr(model, "model_fields")
    )
    assert len(rows) == keys
    assert not [row for row in rows if row.endswith("|  |")]
