"""LoRA by PEFT: adapters put into the skeleton, their first values, and the adapter as a folder."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.model.adapter_files import (
    ADAPTER_CONFIG,
    PEFT_PREFIX,
    merge_first,
    put_adapter,
    read_adapter_config,
    refuse_not_trained,
)
from roundpipe_cli.model.stored.packed_weights import import_bitsandbytes, is_linear
from roundpipe_cli.model.stored.tensors import base_name, is_adapter
from roundpipe_cli.sizes import SIZE_NAMES, size_of

# Mixtures of experts: one rule for all types, whatever PEFT's own names for them are.
#
#     mlp.gate, mlp.shared_expert_gate      never adapted: they weigh experts
#     mlp.experts.gate_up_proj [E, ...]     one adapter of `expert_r` for each expert, PEFT's `target_parameters`
#     mlp.shared_expert.gate_proj, q_proj   like every linear layer
#
# PEFT itself adapts experts and routers of the types in its table, and takes the names of the other layers there for
# theirs; such layers are named by their weights.

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names, beside fused or listed experts, of what chooses or weighs them."""
_PARTS = {
    "gate_up_proj": (("gate_up_proj",), ("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",), ("w1",)),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Fused parameter of experts -> names that mean it, each all together."""
EXPERT_PATTERN = r"experts\..*"
"""The matrices of experts in PEFT's `rank_pattern`."""


def fused_experts(model: nn.Module, blocks_path: str | None) -> list[str]:
    """Names of parameters in the blocks that hold a matrix of every expert."""
    start = f"{blocks_path}." if blocks_path else ""
    named = ((name, parameter) for name, parameter in model.named_parameters() if name.startswith(start))
    return [name for name, one in named if one.dim() == 3 and one.shape[0] > 1 and name.split(".")[-2] == "experts"]


def experts_per_token(text_config: Any) -> int:
    """Experts that compute a token; 0 where there are none."""
    return size_of([text_config], SIZE_NAMES["num_experts_per_tok"])


def _routers(model: nn.Module) -> set[str]:
    """Paths of the modules that choose or weigh experts, and of those in them."""
    paths = [path for path, _ in model.named_modules()]
    beside = {path.removesuffix("experts") for path in paths if path.endswith(".experts")}
    tops = tuple(f"{holder}{name}" for holder in beside for name in ROUTERS)
    tops += tuple(path for path, module in model.named_modules() if re.search("Router|TopKGat", type(module).__name__))
    return {path for path in paths if path in tops or path.startswith(tuple(f"{top}." for top in tops))}


def _targets(
    model: nn.Module, settings: LoraSettings, blocks_path: str | None
) -> tuple[str | list[str], list[str], dict[str, int]]:
    """Modules and parameters that the settings name, and ranks other than most adapters', all in PEFT's words."""
    paths = {path: module for path, module in model.named_modules() if path}
    fused, routers = fused_experts(model, blocks_path), _routers(model)
    names = settings.target_modules
    if names == "all-linear":
        chosen = {path for path, reason in _linear_layers(model, blocks_path) if not reason} - routers
        experts = fused
    else:
        chosen = {path for path in paths if _is_named(path, names)}
        listed = () if isinstance(names, str) else names
        if named := [name for name in listed if any(_is_named(path, [name]) for path in routers)]:
            raise RefusedError(
                "the router of experts is never adapted",
                where="lora.target_modules",
                found=", ".join(named),
                hint="leave it out: a router that moves while its experts learn undoes what they have learned",
            )
        chosen -= routers
        experts = [name for name in fused if _names_experts(name, names)]
        if not chosen and not experts:
            raise _nothing_to_adapt(model, settings, "no module has such a name")
        _refuse_names(model, [name for name in listed if not _is_known(name, chosen, experts)])
    rank, expert_rank = settings.ranks_of(model.config)
    if expert_rank == 0:
        chosen, experts = {path for path in chosen if ".experts." not in path}, []
    taken = _names_taken_by_peft(model)
    by_weight = {path for path in chosen if path.rpartition(".")[2] in taken}
    if names != "all-linear" and not (fused or routers or by_weight):  # as they are: `lora.start_from` compares them
        return names if isinstance(names, str) else list(names), [], {}
    parameters = {name for name, _ in model.named_parameters()}
    weights = _shortest({*experts, *(f"{path}.weight" for path in by_weight)}, parameters)
    ranks = {EXPERT_PATTERN: expert_rank} if (fused or routers) and expert_rank not in (0, rank) else {}
    return _shortest(chosen - by_weight, paths), weights, ranks


def _is_named(path: str, names: str | Sequence[str]) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


def _names_experts(parameter: str, names: str | Sequence[str]) -> bool:
    """Whether names, or a pattern, mean the matrices of experts in a fused parameter."""
    holder, _, own = parameter.rpartition(".")
    return any(all(_is_named(f"{holder}.{part}", names) for part in parts) for parts in _PARTS.get(own, ((own,),)))


def _is_known(name: str, chosen: Collection[str], experts: Collection[str]) -> bool:
    parts = {
        f"{one.rpartition('.')[0]}.{part}" for one in experts for part in chain(*_PARTS.get(one.rpartition(".")[2], ()))
    }
    return any(_is_named(path, [name]) for path in (*chosen, *experts, *parts))


def _names_taken_by_peft(model: nn.Module) -> frozenset[str]:
    """Names of layers that PEFT takes for experts' in models of this type."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    names = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
    config = LoraConfig(target_modules=list(names))
    convert_peft_config_for_transformers(config, model, None)
    return frozenset(names) - frozenset(config.target_modules or ())


def _shortest(chosen: Collection[str], every: Iterable[str]) -> list[str]:
    """The shortest ends of `chosen` that no other of `every` has, as PEFT reads names in a list."""
    others = {end for path in set(every) - set(chosen) for end in _ends(path)}
    return sorted({next((end for end in _ends(path) if end not in others), path) for path in chosen})


def _ends(path: str) -> Iterator[str]:
    """`c`, `b.c`, `a.b.c` of `a.b.c`."""
    parts = path.split(".")
    return (".".join(parts[-count:]) for count in range(1, len(parts) + 1))


def _outer(path: str) -> Iterator[str]:
    """`a.b`, `a` of `a.b.c`."""
    while path := path.rpartition(".")[0]:
        yield path


def describe_adapted_experts(model: nn.Module) -> str | None:
    """A notice on what is adapted in a model with experts, read from its adapters; None: it has none."""
    if not _routers(model) and not fused_experts(model, None):
        return None
    ranks: dict[int, set[str]] = {}
    of_experts = set()
    for path, module in model.named_modules():
        if hasattr(module, "lora_A") and ADAPTER in module.lora_A:
            own = getattr(module, "parameter_name", "weight")
            name = base_name(path) if own == "weight" else f"{base_name(path)}.{own}"
            ranks.setdefault(module.r[ADAPTER], set()).add(re.sub(r"\.\d+\.", ".*.", re.sub(r"^.*?\.\d+\.", "", name)))
            if ".experts." in name:
                of_experts.add(module.r[ADAPTER])
    adapted = "; ".join(
        f"rank {rank}: {', '.join(sorted(names))}" for rank, names in sorted(ranks.items(), reverse=True)
    )
    experts = f"experts at rank {', '.join(map(str, sorted(of_experts)))}" if of_experts else "no experts"
    return f"adapters: {adapted} ({experts}: lora.expert_r; routers are never adapted)"


def describe_left_out(model: nn.Module, blocks_path: str) -> list[str]:
    """Notes on linear layers within the blocks that get no adapter: one text for each reason."""
    reasons: dict[str, set[str]] = {}
    for path, reason in _linear_layers(model, blocks_path):
        if reason:
            reasons.setdefault(reason, set()).add(re.sub(r"^\d+\.", "", path[len(blocks_path) + 1 :]))
    return [
        f"lora.target_modules: all-linear leaves out {', '.join(sorted(names))} of the blocks: {reason}"
        for reason, names in reasons.items()
    ]


def _linear_layers(model: nn.Module, blocks_path: str | None) -> Iterator[tuple[str, str]]:
    """(path, reason) of the linear layers that `all-linear` means: why an adapter would break it; empty: none."""
    forbidden, head = _peft_forbids(model), model.get_output_embeddings()  # type: ignore[operator]
    for path, module in model.named_modules():
        is_inside = not blocks_path or path.startswith(f"{blocks_path}.")
        if not is_inside or module is head or not (isinstance(module, nn.Linear) or is_linear(module)):
            continue
        reason = ""
        if not is_linear(module):
            reason = f"{type(module).__name__} returns more than one tensor"
        elif path.rpartition(".")[2] in forbidden:
            kind = getattr(getattr(model, "config", None), "model_type", "")
            reason = f"PEFT forbids it in models of the type {kind}"
        yield path, reason


def _peft_forbids(model: nn.Module) -> set[str]:
    """Names of linear layers that PEFT itself refuses to adapt in this model."""
    import_bitsandbytes()
    from peft import LoraConfig, LoraModel

    check = getattr(LoraModel, "_check_target_module_compatiblity", None)  # not public, and spelled so
    if check is None:
        return set()
    names = {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    forbidden = set()
    for name in names:
        try:
            check(LoraModel, LoraConfig(), model, name)
        except ValueError:
            forbidden.add(name)
    return forbidden


ADAPTER = "default"
TARGETS_HINT = "lora.target_modules=all-linear adapts every linear layer of the blocks"


@dataclass(frozen=True)
class LoraSettings:
    """The modules that get an adapter, and its settings."""

    r: int
    """Rank."""
    alpha: float
    """The product of an adapter's matrices is multiplied by alpha / r."""
    dropout: float = 0.0
    """Share of an adapter's inputs that are dropped in training."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """`all-linear`, names of modules, or a regular expression for whole names."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules whose full weights are trained."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(r) instead."""
    use_dora: bool = False
    """Weight-decomposed adapters."""
    init: str = "default"
    """`default` or `gaussian`; see `initial_values`."""
    expert_r: int | None = None
    """Rank of the adapters of experts; 0: they get none; None: `r` divided by the experts that compute a token."""
    new_ids: Sequence[int] = ()
    """Tokens whose rows of embedding and LM head are trained, but for those of `modules_to_save`."""

    def ranks_of(self, config: Any) -> tuple[int, int]:
        """(rank of most adapters, rank of those of experts) in a model of this configuration."""
        active = max(1, experts_per_token(config.get_text_config()))
        return self.r, max(1, self.r // active) if self.expert_r is None else self.expert_r


def add_lora(
    model: nn.Module, settings: LoraSettings, *, dtype: torch.dtype, base_name: str, blocks_path: str | None = None
) -> Any:
    """The PEFT model around `model` (parameters on the meta device), in which only LoRA modules are trainable.

    Args:
        dtype: of the adapter's weights while training; their masters are float32.
        base_name: what the adapter's configuration calls the base model.
        blocks_path: of the language model's blocks; `all-linear` then leaves out linear layers elsewhere.

    Raises:
        RefusedError: no module of that name, or one that the engine cannot adapt.
    """
    import_bitsandbytes()
    from peft import LoraConfig, get_peft_model

    try:
        modules, parameters, ranks = _targets(model, settings, blocks_path)
    except re.error as error:
        raise _nothing_to_adapt(model, settings, str(error)) from error
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=modules,
        target_parameters=parameters or None,
        rank_pattern=ranks,
        bias="none",
        task_type="CAUSAL_LM",
        modules_to_save=list(settings.modules_to_save) or None,
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        init_lora_weights="gaussian" if settings.init == "gaussian" else True,
        trainable_token_indices=_trained_rows(model, settings),
    )
    _refuse_missing(model, settings.modules_to_save)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that all-linear covers fused experts; the run's notices say it too
            peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    except ValueError as error:
        reason = str(error).splitlines()[0][:200]
        leave_out = "or leave the experts out with lora.expert_r=0"
        if settings.use_dora and "dora" in reason.lower():
            hint = f"set lora.use_dora=false, {leave_out}"
            raise RefusedError(
                "DoRA cannot adapt this model", where="lora.use_dora", found=reason, hint=hint
            ) from error
        if settings.dropout and "lora_dropout" in reason:  # PEFT has none there
            found, hint = f"{settings.dropout:g}", f"lora.dropout=0, {leave_out}"
            raise RefusedError(
                "adapters on fused experts have no dropout", where="lora.dropout", found=found, expected="0", hint=hint
            ) from error
        raise _nothing_to_adapt(model, settings, reason) from error
    peft_model.peft_config[ADAPTER].base_model_name_or_path = base_name
    _use_dtype(model, dtype)
    return peft_model


def _trained_rows(model: nn.Module, settings: LoraSettings) -> dict[str, list[int]] | None:
    """Name of a table, as PEFT finds it -> its trained rows; of tables that are one, the first."""
    found: dict[int, str] = {}
    paths = {path: module for path, module in model.named_modules() if path}
    ends = [get() for get in (model.get_input_embeddings, model.get_output_embeddings)]  # type: ignore[operator]
    for path in [path for end in ends for path, module in paths.items() if module is end]:
        if settings.new_ids and not _is_named(path, settings.modules_to_save):
            if getattr(paths[path], "bias", None) is not None:
                raise RefusedError(
                    "PEFT cannot train single rows of an LM head with a bias",
                    where="add_tokens",
                    found=f"{path}.bias",
                    hint=f"lora.modules_to_save=[{path}], or method: full",
                )
            found.setdefault(id(paths[path].weight), path)
    return {_shortest([path], paths)[0]: list(settings.new_ids) for path in found.values()} or None


def _nothing_to_adapt(model: nn.Module, settings: LoraSettings, reason: str) -> RefusedError:
    return RefusedError(
        "LoRA finds nothing to adapt",
        where="lora.target_modules",
        found=f"{settings.target_modules!r}: {reason}",
        hint=_nearest(model, settings.target_modules) or TARGETS_HINT,
    )


def continue_lora(model: nn.Module, folder: Path, *, dropout: float, dtype: torch.dtype, base_name: str) -> Any:
    """Put the modules of the adapter in `folder` into `model` and leave only them trainable.

    Raises:
        RefusedError: it cannot be read, or does not fit the model.
    """
    config = read_adapter_config(folder, refuse_not_trained)
    config.inference_mode = False
    config.lora_dropout = dropout
    config.base_model_name_or_path = base_name
    _refuse_missing(model, tuple(config.modules_to_save or ()), start=folder)
    peft_model = put_adapter(model, config, folder)
    hint = "delete it there: the adapter has no weights for it"
    _refuse_unmatched(peft_model, f"{folder / ADAPTER_CONFIG}: target_modules", hint)
    _use_dtype(model, dtype)
    return peft_model


def _use_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.requires_grad and parameter.dtype != dtype:
                module._parameters[name] = nn.Parameter(parameter.to(dtype))


def _refuse_missing(model: nn.Module, modules_to_save: tuple[str, ...], start: Path | None = None) -> None:
    """PEFT leaves out what it does not find, and a table that embedding and head share would come apart.

    `start`: folder of the adapter that is trained further and has these modules.
    """
    where, hint = "lora.modules_to_save", "leave it out, or use method: full"
    if start is not None:
        where, hint = "lora.start_from", merge_first(start)
    paths = dict(model.named_modules())
    saved = [path for path in paths if path.endswith(modules_to_save)]  # as PEFT finds them: `c_attn` by `attn` too
    for wanted in modules_to_save:
        if not any(_is_named(path, [wanted]) for path in saved):
            raise RefusedError("no such module to train", where=where, found=wanted, hint=_nearest(model, [wanted]))
        named = [path for path in saved if path.endswith(wanted)]
        found = [paths[path] for path in named]
        inner = [(path, end) for path in named for end in _outer(path) if end in saved]
        if inner:  # PEFT cannot read what it would write
            path, end = inner[0]
            advice = f"leave {wanted} out: it is trained with the other one"
            if not _is_named(path, [wanted]):
                advice = f"PEFT takes every name that ends so: name more of it, a block each, such as {end}"
            raise RefusedError(
                "a module that is trained whole is inside another one",
                where=where,
                found=f"{wanted}, inside {end}" if _is_named(path, [wanted]) else f"{wanted}: {path}, inside {end}",
                hint=advice if start is None else hint,
            )
        uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        if any(uses[id(parameter)] > 1 for module in found for parameter in module.parameters()):
            raise RefusedError(
                "embedding and LM head of this model are one table, which cannot be trained beside adapters",
                where=where,
                found=wanted,
                hint=hint,
            )


def _refuse_unmatched(peft_model: Any, where: str, hint: str) -> None:
    """PEFT adapts what it finds of several names, and says nothing of the others."""
    tuner, config = peft_model.base_model, peft_model.peft_config[ADAPTER]
    if isinstance(config.target_modules, str):
        return
    # What is saved whole needs no adapter beside it: PEFT makes none.
    inner = (path.partition(f".modules_to_save.{ADAPTER}") for path, _ in tuner.model.named_modules())
    saved = [f"{path}{rest}" for path, mark, rest in inner if mark]
    found = [f".{path}" for path in (*tuner.targeted_module_names, *tuner.targeted_parameter_names, *saved)]
    # PEFT itself moves names of experts whose weights are fused to the parameters that hold them.
    names = sorted({*(config.target_modules or ()), *(config.target_parameters or ())})
    unmatched = [name for name in names if not any(path.endswith(f".{name}") for path in found)]
    _refuse_names(tuner.model, unmatched, where, hint)


def _refuse_names(
    model: nn.Module, names: Sequence[str], where: str = "lora.target_modules", hint: str | None = None
) -> None:
    if names:
        hint = hint or _nearest(model, names) or TARGETS_HINT
        raise RefusedError("no such module to adapt", where=where, found=", ".join(names), hint=hint)


def _nearest(model: nn.Module, names: str | Sequence[str]) -> str | None:
    """A hint with the model's own names for misspelt ones; None where none is near."""
    paths = [base_name(path).split(".") for path, _ in model.named_modules() if path and not is_adapter(f".{path}.")]
    known: dict[str, None] = {}
    for name in [names] if isinstance(names, str) else names:
        num_parts = name.count(".") + 1
        ends = {".".join(path[-num_parts:]) for path in paths if not path[-1].isdecimal()}
        if name in ends and isinstance(names, str):
            return f"a name is written in a list: lora.target_modules=[{name}]"
        if name not in ends and (near := closest(name, sorted(ends))):
            known[near] = None
    return f"did you mean {', '.join(known)}?" if known else None


def describe_dead_alternatives(model: nn.Module, pattern: str) -> list[str]:
    """Notes on the parts of a pattern between `|` without which it matches the same modules."""
    paths = [path for path, _ in model.named_modules()]
    notes = []
    for alternative, alone in _alternatives(pattern):
        with suppress(re.error):  # a group that is referred to elsewhere
            if alternative and not any(re.fullmatch(alone, path) for path in paths):
                text = f"lora.target_modules: {alternative} in the pattern matches no module of this model"
                near = _nearest(model, [alternative])
                notes.append(f"{text}; {near}" if near else text)
    return notes


def _alternatives(pattern: str) -> Iterator[tuple[str, str]]:
    """(text between `|`, the pattern with that text alone in its group), but for groups that exclude."""
    open_groups: list[list[int]] = [[0]]
    """Places of each group that is open: where its text begins, then each of its `|`."""
    groups: list[tuple[list[int], int]] = []
    passed_over, opening = r"\\.|\[\^?\]?[^]]*\]|\{[^}]*\}", r"\((?:\?(?::|P?<\w+>|=|!|<=|<!))?"
    for token in re.finditer(rf"(?s){passed_over}|{opening}|[|)]", pattern):
        if token[0].startswith("("):
            open_groups.append([token.end()])
        elif token[0] == "|":
            open_groups[-1].append(token.start())
        elif token[0] == ")" and len(open_groups) > 1:
            groups.append((open_groups.pop(), token.start()))
    groups.append((open_groups[0], len(pattern)))
    for (begin, *bars), end in groups:
        if bars and not pattern[:begin].endswith("!"):
            for left, right in zip([begin, *(bar + 1 for bar in bars)], [*bars, end], strict=True):
                yield pattern[left:right], pattern[:begin] + pattern[left:right] + pattern[end:]


def refuse_adapters_outside_blocks(model: nn.Module, blocks_path: str) -> None:
    """Low-rank adapters belong into blocks: the head computes in chunks, and the embedding stays on the host."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_" in name and not name.startswith(blocks_path + "."):
            raise RefusedError(
                "adapters outside the model's blocks are not supported",
                where="lora.target_modules",
                found=name,
                expected=f"modules below {blocks_path}",
                hint="lora.target_modules=all-linear leaves them out; lora.modules_to_save trains one of them whole",
            )


def initial_values(
    model: nn.Module, seed: int, base: Callable[[str], torch.Tensor], init: str = "default"
) -> Iterator[tuple[str, torch.Tensor]]:
    """PEFT's start of an adapter, each random tensor from a seed of its own name.

    A: Kaiming uniform with a = sqrt 5, or normal with deviation 1 / r; B: zero; DoRA's magnitudes: the norms of the
    base weight's rows; modules that are saved whole, and rows of tables: their base weights.

    Args:
        base: the base weight of a parameter's name, in any dtype.
        init: of A, `default` or `gaussian`.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        values = torch.zeros(parameter.shape, dtype=torch.float32)
        if ".lora_A." in name:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            if init == "gaussian":
                wrapper: Any = model.get_submodule(name.partition(".lora_A.")[0])
                nn.init.normal_(values, std=1 / wrapper.r[ADAPTER], generator=generator)
            else:
                nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        elif ".lora_magnitude_vector." in name:
            path = name.partition(".lora_magnitude_vector.")[0]
            values = torch.linalg.norm(base(f"{path}.base_layer.weight").float(), dim=1)
        elif ".modules_to_save." in name:
            values = base(name.replace(f".modules_to_save.{ADAPTER}.", ".original_module.")).float()
        elif ".trainable_tokens_delta." in name:
            path = name.partition(".trainable_tokens_delta.")[0]
            owner: Any = model.get_submodule(path)
            values = base(f"{path}.base_layer.weight")[owner.token_indices[ADAPTER]].float()
        yield name, values


def save_adapter(peft_model: Any, masters: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the adapter in PEFT's format, from float32 `masters` by parameter name of the inner model."""
    kept = {name: b for name, b in peft_model.base_model.model.named_buffers() if ".modules_to_save." in name}
    state = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in {**kept, **masters}.items()}
    # Embeddings are never resized here; to find out, PEFT would ask the hub for the newest configuration.
    options = {"safe_serialization": True, "save_embedding_layers": False}
    peft_model.create_or_update_model_card = lambda folder: None  # full of blanks, and longer to make than all the rest
    peft_model.save_pretrained(str(folder), state_dict=state, **options)
