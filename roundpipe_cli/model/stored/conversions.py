"""transformers' own rules from a checkpoint's tensors to a model's weights, applied to one weight at a time.

Most mixtures of experts are published with one tensor per expert, which transformers stacks. Its loader converts the
whole model; here the same rules convert the tensors that belong together:

    experts.0.gate_proj.weight ... experts.127.up_proj.weight  ->  experts.gate_up_proj

This is the only file that knows transformers' `core_model_loading` and `conversion_mapping`, which are not public. With
a version that has them otherwise, names are matched as they are, and `rules` is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from roundpipe_cli.choices import BLOCK_SIZE
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.stored.tensors import OpenFiles, StoredTensor, own_shapes

Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class WeightConversion:
    """Tensors of the checkpoint that become weights of the model together."""

    sources: tuple[str, ...]
    """Names in the checkpoint, in the order in which transformers takes them."""
    targets: Shapes
    """Names in the model."""
    rule: Any = None
    """transformers' converter; None: the one source is the weight."""
    patterns: tuple[str, ...] = ()
    """For each source, the pattern of the rule that it matched."""

    def keeps_blocks(self, shapes: Iterable[Sequence[int]]) -> bool:
        """Whether blocks of the sources, of these shapes, are blocks of the target: it is the one source, or stacks
        experts, and joins parts of them only at the edges of blocks."""
        if self.rule is None:
            return True
        is_joined = len(self.rule.source_patterns) > 1
        whole = not is_joined or all(size % BLOCK_SIZE == 0 for shape in shapes for size in shape)
        return whole and len(self.targets) == 1 and _stacks(self.rule, self.patterns)

    def apply(self, read: Callable[[str], torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
        """The model's weights from the checkpoint's tensors, which `read` gives by name.

        Raises:
            RefusedError: they do not fit together.
        """
        if self.rule is None:
            return {next(iter(self.targets)): read(self.sources[0])}
        try:
            if _stacks(self.rule, self.patterns):
                return _by_expert(self, read, model)
            return _convert(self, self.sources, self.patterns, read, model=model)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
            raise RefusedError(
                "tensors of the files do not fit together",
                where=f"{self.sources[0]} ... {self.sources[-1]}",
                found=str(error).splitlines()[0][:200] if str(error) else type(error).__name__,
                expected=f"what makes {', '.join(self.targets)}",
            ) from error


@dataclass(frozen=True)
class WeightGroup:
    """Weights of the model that are read together."""

    targets: Shapes
    sources: Sequence[str]
    """The tensors of the files that they are made of."""
    read: Callable[[OpenFiles, torch.dtype | None], dict[str, torch.Tensor]]
    """Reads them, as the files have them or in a type; what lies in a file as it is stays a view of it."""
    stored: Mapping[str, StoredTensor] = field(default_factory=dict)
    """The files' tensors by name; empty for a GGUF file."""
    conversion: WeightConversion | None = None

    @property
    def is_grown(self) -> bool:
        """Whether it is a table that has more rows in the model than in the files."""
        shapes = [*self.targets.values()], [one.shape for one in self.stored.values()]
        return self.conversion is not None and self.conversion.rule is None and shapes[0] != shapes[1]


@dataclass(frozen=True)
class Conversions:
    """All of a model's weights that a checkpoint has."""

    found: tuple[WeightConversion, ...]
    unused: tuple[str, ...]
    """Tensors of the checkpoint that are in no weight of the model."""
    rules: tuple[Any, ...] | None
    """transformers' rules for this model; None where it has them in another form than is known here."""

    def revert(
        self, conversion: WeightConversion, weights: Mapping[str, torch.Tensor], model: nn.Module
    ) -> dict[str, torch.Tensor] | None:
        """The checkpoint's tensors from all of the conversion's targets, real or on the meta device; None where
        transformers' rules do not lead back."""
        if conversion.rule is None:
            return {conversion.sources[0]: next(iter(weights.values()))}
        from transformers.core_model_loading import revert_weight_conversion

        used = [rule for rule in self.rules or () if not hasattr(rule, "was_used") or rule.was_used()]
        stand_in: Any = SimpleNamespace(_weight_conversions=used, config=model.config)
        try:
            made = revert_weight_conversion(stand_in, dict(weights))
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AttributeError, NotImplementedError):
            return None
        return made if made.keys() == set(conversion.sources) else None


def find_conversions(model: nn.Module, stored: Shapes, own: Shapes, rules: list[Any] | None = None) -> Conversions:
    """How a checkpoint's tensors, `stored`, become a model's weights and persistent buffers, `own`, without adapters.

    `rules`: transformers' for another kind of file; None: those for safetensors.

    Raises:
        RefusedError: tensors that do not fit together.
    """
    from transformers.core_model_loading import dot_natural_key  # experts.2 before experts.10

    rules = _rules(model) if rules is None else rules
    groups: dict[str, list[tuple[str, str | None]]] = {}
    unused = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = _renamed(name, rules, model, own)
        if target in own:
            groups.setdefault(target, []).append((name, pattern))
        else:
            unused.append(name)
    found = tuple(
        _conversion(target, members, rules, model, stored=stored, own=own) for target, members in groups.items()
    )
    return Conversions(found, tuple(unused), None if rules is None else tuple(rules))


def find_targets(model: nn.Module, names: Iterable[str], own: Shapes) -> dict[str, str]:
    """Name in the checkpoint -> name of the weight that it becomes, or a part of it, for those that become one."""
    rules = _rules(model)
    targets = {name: _renamed(name, rules, model, own)[0] for name in names}
    return {name: target for name, target in targets.items() if target in own}


def current_names(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """Names of weights -> those that they have in the model, by transformers' rules for checkpoints of older releases.
    Names that lead to no weight, or to one that is made of several, stay as they are."""
    own, rules = own_shapes(model), _rules(model)
    found = {}
    for name in names:
        target, pattern = (name, None) if name in own else _renamed(name, rules, model, own)
        found[name] = target if pattern is None and target in own else name
    return found


def fused_names(names: Iterable[str], model: nn.Module) -> dict[str, tuple[str, int]]:
    """Names of weights of single experts -> the model's parameter of all experts that holds them, and how many weights
    of each expert it holds; names of other weights are left out."""
    own, rules = own_shapes(model), _rules(model)
    found = {}
    for name in names:
        target, pattern = _renamed(name, rules, model, own)
        if pattern is not None and target in own:
            rule = next(rule for rule in rules or () if pattern in rule.source_patterns)
            found[name] = target, len(rule.source_patterns)
    return found


def _conversion(
    target: str,
    members: list[tuple[str, str | None]],
    rules: list[Any] | None,
    model: nn.Module,
    *,
    stored: Shapes,
    own: Shapes,
) -> WeightConversion:
    names = tuple(name for name, _ in members)
    patterns = tuple(pattern for _, pattern in members if pattern is not None)
    if not patterns:
        return WeightConversion(names[:1], {target: own[target]})
    converters = [rule for rule in rules or () if hasattr(rule, "operations")]
    rule = next(rule for rule in reversed(converters) if patterns[0] in rule.source_patterns)
    first = WeightConversion(names, {target: own[target]}, rule, patterns)
    shapes = {name: torch.empty(stored[name], device="meta") for name in names}
    made = first.apply(shapes.__getitem__, model)
    return WeightConversion(names, {name: part.shape for name, part in made.items()}, rule, patterns)


def _rules(model: nn.Module) -> list[Any] | None:
    """transformers' rules for this model; None where it has them in another form than is known here."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping

        rules = list(get_model_conversion_mapping(model))  # type: ignore[arg-type]
        for rule in rules:
            _ = rule.source_patterns, rule.rename_source_key, rule.add_tensor, rule.convert
        return rules
    except (ImportError, AttributeError, TypeError, ValueError):
        return None


def gguf_rules(architecture: str, config: Any) -> list[Any] | None:
    """transformers' rules for a GGUF file; None for an architecture that its older tables know."""
    try:
        from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
    except ImportError:
        return None
    return list(GGUF_ARCHS[architecture](config)) if architecture in GGUF_ARCHS else None


def _renamed(name: str, rules: list[Any] | None, model: nn.Module, own: Shapes) -> tuple[str, str | None]:
    """(name in the model, pattern of the converter that it matched), as transformers' loader finds them."""
    target, pattern = name, None
    for rule in rules or ():
        if not hasattr(rule, "operations"):
            target, _ = rule.rename_source_key(target)
    for rule in rules or ():
        if hasattr(rule, "operations"):
            target, pattern = rule.rename_source_key(target)
            if pattern is not None:
                break
    target = _with_prefix(target, model, own)
    if target not in own and (kept := _with_prefix(name, model, own)) in own:
        return kept, None
    return target, pattern


def _with_prefix(name: str, model: nn.Module, own: Shapes) -> str:
    """With the backbone's prefix, or without it, where the model has the name so."""
    prefix = str(getattr(model, "base_model_prefix", "")) + "."
    candidates = (name.removeprefix(prefix), name, prefix + name)
    return next((candidate for candidate in candidates if candidate in own), name)


def _convert(
    conversion: WeightConversion,
    sources: Sequence[str],
    patterns: Sequence[str],
    read: Callable[[str], torch.Tensor],
    *,
    model: nn.Module,
) -> dict[str, torch.Tensor]:
    rule, target = deepcopy(conversion.rule), next(iter(conversion.targets))
    for name, pattern in zip(sources, patterns, strict=True):
        rule.add_tensor(target, name, pattern, read(name))
    made = rule.convert(target, model=model, config=model.config)
    return {name: part[0] if isinstance(part, list) else part for name, part in made.items()}


def _stacks(rule: Any, patterns: Sequence[str]) -> bool:
    """Whether the rule stacks experts along the first dimension and then only joins what each of them has."""
    first, *others = rule.operations
    counts = {patterns.count(pattern) for pattern in rule.source_patterns}
    return (
        type(first).__name__ == "MergeModulelist"
        and first.dim == 0
        and len(counts) == 1
        and all(type(one).__name__ == "Concatenate" and one.dim in (1, 2) for one in others)
    )


def _by_expert(
    conversion: WeightConversion, read: Callable[[str], torch.Tensor], model: nn.Module
) -> dict[str, torch.Tensor]:
    """Tensors as `_convert` makes them, one expert after the other: memory holds the result and one expert."""
    kinds = conversion.rule.source_patterns
    lists = [
        [name for name, own in zip(conversion.sources, conversion.patterns, strict=True) if own == kind]
        for kind in kinds
    ]
    whole: dict[str, torch.Tensor] = {}
    for expert, names in enumerate(zip(*lists, strict=True)):
        for target, part in _convert(conversion, names, kinds, read, model=model).items():
            if target not in whole:
                whole[target] = torch.empty((len(lists[0]), *part.shape[1:]), dtype=part.dtype, device=part.device)
            whole[target][expert] = part[0]
    return whole
