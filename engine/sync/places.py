"""Where the tensors of a transformers model stand in vLLM's model of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter of vLLM's model and the tensors of the original model that it holds."""

    module: nn.Module
    parameter: str
    """Its name within the module, such as `weight`."""
    sources: tuple[str, ...]
    """Names as transformers spells them; their rows stand in this order behind each other."""
    tied: tuple[nn.Module, ...] = ()
    """Other modules that hold the very same parameter: the output head of a model with tied embeddings."""


def find_places(model: nn.Module, names: Sequence[str]) -> list[Place]:
    """The places of the tensors `names`, each with all the tensors that stand there, named or not.

    Raises LookupError with the list of names that have no place, since such a tensor would do nothing, silently.
    """
    rename = renaming(model)
    wanted = {renamed: name for name in names if (renamed := rename(name)) is not None}
    unplaced = set(names)
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    holders: dict[int, list[nn.Module]] = {}
    places: list[Place] = []
    for path, module in model.named_modules(remove_duplicate=False):  # a tied head may be the embedding itself
        prefix, _, leaf = path.rpartition(".")
        parts = packed.get(leaf, (leaf,))
        for parameter, value in module.named_parameters(recurse=False):
            others = holders.setdefault(id(value), [])
            if module not in others:
                others.append(module)
            ours = [f"{prefix}.{part}.{parameter}".removeprefix(".") for part in parts]
            found = [wanted[name] for name in ours if name in wanted]
            if not found:
                continue
            unplaced.difference_update(found)
            places.append(Place(module, parameter, _siblings(found, parts, parameter)))
    if unplaced:
        raise LookupError(f"tensors without a place in vLLM's model: {', '.join(sorted(unplaced))}")
    return [_with_ties(place, holders) for place in places]


def _siblings(found: Sequence[str], parts: Sequence[str], parameter: str) -> tuple[str, ...]:
    """All tensors of a fused parameter, in the spelling of one of them that is known."""
    if len(parts) == 1:
        return tuple(found)
    layer = found[0].removesuffix(f".{parameter}").rpartition(".")[0]
    return tuple(f"{layer}.{part}.{parameter}".removeprefix(".") for part in parts)


def _with_ties(place: Place, holders: Mapping[int, list[nn.Module]]) -> Place:
    others = holders[id(getattr(place.module, place.parameter))]
    return Place(place.module, place.parameter, place.sources, tuple(m for m in others if m is not place.module))


def renaming(model: nn.Module) -> Callable[[str], str | None]:
    """From transformers' names to vLLM's, for models that it nests deeper: a language model beside a vision tower."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    renamed: Callable[[str], str | None] = mapper.get_rename_mapper().map_name
    return renamed
