"""Costs of each layer: the one input of planner and simulator. Seconds and bytes throughout."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from roundpipe_cli.choices import OPTIMIZERS
from roundpipe_cli.errors import Problem, RecipeError, RefusedError, closest
from roundpipe_cli.regular_files import read_regular

CHUNK_BYTES = 32 * 1024**2
"""A transfer can be overtaken by a more urgent one after every chunk of this size."""
ADDING_BYTES = 10
"""Traffic of host memory while one value of a 16-bit gradient is added to its sum: 2 read, 4 read and 4 written.
Measured: 0.32 ns where AdamW's update, which moves 30, takes 0.97."""
SQUARING_BYTES = 5
"""Traffic while one value of a sum is squared for the norm: 0.17 ns measured."""
StageRange = tuple[int, int]
"""Inclusive range of layer indices; `(a, a - 1)` is an empty stage."""


NUM_SLOTS = 2
"""Stages whose weights are on a device at once: one is computed while the next is uploaded."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Costs of one layer for one microbatch on a worker of speed 1."""

    name: str
    """`embed`, `block.3` or `head`."""
    forward_s: float
    backward_s: float
    """Without recompute."""
    recompute: bool
    """Whether its backward is preceded by a recompute that takes `forward_s`."""
    param_bytes: int = 0
    """Bytes uploaded per stage visit; 0 means that uploads are free."""
    boundary_bytes: int = 0
    """Bytes of the hidden states that this layer passes on, one microbatch."""
    grad_bytes: int = 0
    """Bytes of the gradient accumulators, downloaded after a backward visit."""
    optimizer_s: float = 0.0
    """Host seconds of one optimizer update of this layer."""
    activation_bytes: int = 0
    """Bytes kept on the device between recompute and backward of one microbatch."""
    recompute_skippable_s: float = 0.0
    """Part of the recompute that can be left out because backward never reads its result."""
    recompute_s: float | None = None
    """Seconds of the recompute where they differ from `forward_s`; see `skip_projections`. Not in costs files."""
    visit_s: float = 0.0
    """Seconds that a visit takes once, however many microbatches pass: packed weights are unpacked. See
    `share_out_visits`. Not in costs files."""
    whole_bytes: int = 0
    """Bytes of its packed weights, unpacked, where they stay so for a visit. Not in costs files."""
    launches_s: tuple[float, float] = (0.0, 0.0)
    """Seconds in which the interpreter issues a forward and a backward. Not in costs files."""
    starved_s: tuple[float, float] = (0.0, 0.0)
    """Seconds of `forward_s` and of `backward_s` in which the device waits for launches. Not in costs files."""

    @property
    def recomputed_s(self) -> float:
        """Seconds of the recompute; 0 for a layer that is not recomputed."""
        if not self.recompute:
            return 0.0
        return self.forward_s if self.recompute_s is None else self.recompute_s

    @property
    def visit_bytes(self) -> int:
        """Bytes on the device while a backward visit computes a microbatch, beside weights and gradients."""
        return self.activation_bytes + self.whole_bytes


@dataclass(frozen=True, slots=True)
class CostModel:
    """Everything that planner and simulator know about a model on a machine."""

    name: str
    layers: tuple[LayerCost, ...]
    """Layers in order: `embed` (optional) first, `head` last."""
    hop_s: float = 0.0
    """Latency of a boundary between two different workers."""
    link_bytes_per_s: float = 25e9
    """Rate of each worker's host link in each direction."""
    device_memory_bytes: int | None = None
    slots: int = NUM_SLOTS
    worker_speed: tuple[float, ...] | None = None
    """Relative speed per worker; None means all 1.0."""
    host_bytes_per_s: float | None = None
    """Rate of the host's memory, which all links and the host's own work share; None: all that costs no time."""
    update_bytes: float = OPTIMIZERS["adamw"].update_bytes
    """Traffic of the host's memory while one value is updated, which takes `optimizer_s`. Not in costs files."""
    leaving_bytes: int = 4
    """Bytes of a value of a gradient that leaves its device to be added up on the host. Not in costs files."""
    tied: bool = False
    """The embedding is the head's matrix: its rows are new when the head's update is done. Not in costs files."""

    @property
    def boundaries_move(self) -> bool:
        """Whether hidden states have bytes. Then the fused head's stage waits for its input, as it must in reality.

        The published accounting lets its forward end when the input arrives, as if it were a recompute; so does the
        default one where nothing has bytes, and the two agree there.
        """
        return any(layer.boundary_bytes for layer in self.layers)

    @property
    def equal_workers(self) -> bool:
        """Whether all workers have the same speed."""
        return len(set(self.worker_speed or (1.0,))) == 1

    @property
    def has_frozen_blocks(self) -> bool:
        """Whether most of each block's weights are frozen: what is trained is small beside them."""
        blocks = self.layers[1:-1]
        return all(2 * (layer.grad_bytes // 4) * self.leaving_bytes < layer.param_bytes for layer in blocks)

    @property
    def embedding_squares_bytes(self) -> int:
        """Traffic of the host's memory for the norm of the embedding's gradient, which is complete last."""
        head = self.layers[-1]
        if self.host_bytes_per_s is None or self.layers[0].name != "embed":
            return 0
        own = int(self.layers[0].optimizer_s * self.host_bytes_per_s / self.update_bytes) * SQUARING_BYTES
        return own + (head.grad_bytes // 4 * SQUARING_BYTES if self.tied else 0)

    @property
    def update_order(self) -> tuple[int, ...]:
        """Layers in the order in which a step's forward needs their updates: a tied head is the embedding, so first."""
        head = len(self.layers) - 1
        return (head, *range(head)) if self.tied else tuple(range(head + 1))

    @property
    def has_updates(self) -> bool:
        """Whether layers are updated. Then a chained step waits for the step two before, whose update it reads.

        The published accounting knows no updates: there as many steps may overlap as workers have room for.
        """
        return any(layer.grad_bytes or layer.optimizer_s for layer in self.layers)


def without_bytes(costs: CostModel) -> CostModel:
    """The costs as the published accounting sees them: nothing is moved or updated."""
    none: dict[str, Any] = dict.fromkeys(("param_bytes", "boundary_bytes", "grad_bytes", "optimizer_s"), 0)
    return replace(costs, layers=tuple(replace(layer, **none) for layer in costs.layers))


def skip_projections(costs: CostModel) -> CostModel:
    """The costs where each recompute leaves out what backward never reads: a block's last projection.

    Exact: the product is only the block's output, which is not needed again.
    """
    layers = tuple(
        replace(layer, recompute_s=layer.forward_s - layer.recompute_skippable_s) if layer.recompute else layer
        for layer in costs.layers
    )
    return replace(costs, layers=layers)


def keep_activations(costs: CostModel, kept: Collection[int]) -> CostModel:
    """The costs where the layers in `kept` are not recomputed, as if their activations had been kept.

    An upper bound of what keeping them can gain: where they are kept, and how they get there, costs nothing here.
    """
    layers = tuple(
        replace(layer, recompute=layer.recompute and index not in kept) for index, layer in enumerate(costs.layers)
    )
    return replace(costs, layers=layers)


def without_unpacked(costs: CostModel) -> CostModel:
    """The costs where no weights stay unpacked for a visit; times stay as they are."""
    return replace(costs, layers=tuple(replace(layer, whole_bytes=0) for layer in costs.layers))


def share_out_visits(costs: CostModel, microbatches: float) -> CostModel:
    """The costs where each microbatch bears its share of what a visit takes once.

    A visit begins with a forward, or with a recompute or backward, of which the backward bears it here.

    Args:
        microbatches: of a visit, on average.
    """
    if not any(layer.visit_s for layer in costs.layers):
        return costs
    layers = []
    for layer in costs.layers:
        again_s, share_s = layer.recomputed_s if layer.recompute else None, layer.visit_s / microbatches
        passes_s: dict[str, Any] = {"forward_s": layer.forward_s + share_s, "backward_s": layer.backward_s + share_s}
        layers.append(replace(layer, recompute_s=again_s, visit_s=0.0, **passes_s))
    return replace(costs, layers=tuple(layers))


_NOT_IN_FILES = (
    *("recompute_s", "visit_s", "whole_bytes", "launches_s", "starved_s"),
    *("update_bytes", "leaving_bytes", "tied"),
)
_LAYER_FORMS, _MODEL_FORMS = (
    {field.name: str(field.type) for field in fields(kind) if field.name not in _NOT_IN_FILES}
    for kind in (LayerCost, CostModel)
)
"""Keys of a layer and of the whole model in a costs file, with the types of their values."""
FILE_KEYS = tuple(_LAYER_FORMS)
"""Keys of a layer in a costs file."""
_ABOVE_ZERO = ("link_bytes_per_s", "host_bytes_per_s", "device_memory_bytes", "slots", "worker_speed")
_MAX_NUMBER = 1e300
"""Largest of a file's figures; NaN and infinity are not below it, and whole numbers beyond cannot be made floats."""
_MAX_FILE_BYTES = 16 * 1024**2
COSTS_FORM = (
    '{"name": ..., "hop_s": ..., "layers": [{"name": "block.0", "forward_s": ..., "backward_s": ..., '
    '"recompute": true, "param_bytes": ..., "boundary_bytes": ...}, ...]} in seconds and bytes'
)
COSTS_HINT = "recipes/example_costs.json of the repository is an example; scripts/README.md says what each key means"


def load_costs(path: Path) -> CostModel:
    """Read a costs file: strict JSON, times in seconds; scripts/README.md says what each key means.

    Raises:
        RefusedError: no such file, or not JSON.
        RecipeError: all that is wrong in it at once, each with file and layer.
    """
    try:
        data = json.loads(read_regular(path, _MAX_FILE_BYTES).decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (OSError, ValueError, RecursionError) as error:
        what, reason = "the costs file is not JSON", str(error)
        if isinstance(error, OSError | UnicodeDecodeError):
            what, reason = "cannot read the costs file", getattr(error, "strerror", None) or "not text in UTF-8"
        raise RefusedError(what, where=str(path), found=reason, expected=COSTS_FORM, hint=COSTS_HINT) from error
    problems: list[Problem] = []
    costs = _cost_model(data, str(path), problems)
    if costs is None or problems:
        raise RecipeError(problems)
    return costs


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is there twice")
        found[key] = value
    return found


def _cost_model(data: Any, file: str, problems: list[Problem]) -> CostModel | None:
    if not isinstance(data, dict):
        problems.append(Problem("not a costs file", file, type(data).__name__, 'an object with "name" and "layers"'))
        return None
    listed = data.pop("layers", None)
    values = {"name": Path(file).stem, **_values(data, _MODEL_FORMS, file, problems)}
    if not isinstance(listed, list) or not listed:
        problems.append(Problem("no layers", f"{file}: layers", _shown(listed), "a list of layers, the head last"))
        return None
    layers = [_layer(entry, f"{file}: layers[{index}]", problems) for index, entry in enumerate(listed)]
    known = [layer for layer in layers if layer is not None]
    if len(known) < len(layers):
        return None
    if known[-1].name != "head":
        where = f"{file}: layers[{len(known) - 1}]"
        problems.append(Problem("the last layer is not the head", where, repr(known[-1].name), "head"))
    for index, layer in enumerate(known):
        if (layer.name == "head" and index < len(known) - 1) or (layer.name == "embed" and index):
            where, expected = f"{file}: layers[{index}]", "head last, embed first"
            problems.append(Problem("a layer out of place", where, repr(layer.name), expected))
    if not any(layer.forward_s or layer.backward_s for layer in known):
        problems.append(Problem("no layer takes any time", f"{file}: layers", "all times are 0", "times in seconds"))
    return CostModel(layers=tuple(known), **values)


def _layer(entry: Any, where: str, problems: list[Problem]) -> LayerCost | None:
    if not isinstance(entry, dict):
        problems.append(Problem("not a layer", where, _shown(entry), "an object with name, forward_s, backward_s"))
        return None
    name = entry.get("name")
    where = f"{where} ({name})" if isinstance(name, str) else where
    values = {"recompute": name != "head", **_values(entry, _LAYER_FORMS, where, problems)}
    missing = [key for key in ("name", "forward_s", "backward_s") if key not in entry]
    if missing:
        problems.append(Problem(f"{', '.join(missing)} missing", where, None, "name, forward_s and backward_s"))
        return None
    layer = LayerCost(**values)
    if layer.recompute and layer.recompute_skippable_s > layer.forward_s:
        expected, found = "at most forward_s, which the recompute takes", str(layer.recompute_skippable_s)
        problems.append(Problem("more is skipped than recomputed", f"{where}: recompute_skippable_s", found, expected))
    return layer


def _values(entry: dict[str, Any], forms: Mapping[str, str], where: str, problems: list[Problem]) -> dict[str, Any]:
    """The values of known keys; with something in place of a refused one, so that the rest can still be checked."""
    values: dict[str, Any] = {}
    for key, value in entry.items():
        form = forms.get(key, "")
        if not form:
            nearest = closest(key, list(forms))
            hint = f"did you mean {nearest}?" if nearest else f"known: {', '.join(forms)}"
            problems.append(Problem("unknown key", where, repr(key), None, hint))
        elif form == "str":
            values[key] = value if isinstance(value, str) else ""
            if not isinstance(value, str):
                problems.append(Problem("not a name", where, _shown(value), "text"))
        elif form == "bool":
            values[key] = bool(value)
            if not isinstance(value, bool):
                problems.append(Problem(f"{key} is not true or false", where, _shown(value), "true or false"))
        elif value is None and form.endswith("None"):
            values[key] = None
        elif not form.startswith("tuple"):
            values[key] = _number(value, key, f"{where}: {key}", problems, whole=form.startswith("int"))
        elif isinstance(value, list) and value:
            places = (f"{where}: {key}[{index}]" for index in range(len(value)))
            values[key] = tuple(_number(one, key, place, problems) for one, place in zip(value, places, strict=False))
        else:
            problems.append(Problem("not a list of speeds", f"{where}: {key}", _shown(value), "like [1.0, 0.5]"))
    return values


def _number(value: Any, key: str, where: str, problems: list[Problem], *, whole: bool = False) -> float | int:
    above_zero = key in _ABOVE_ZERO
    expected = f"a {'whole ' if whole else ''}number, {'above 0' if above_zero else '0 or more'}"
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER
    if not good or (whole and value != int(value)):
        problems.append(Problem("not a whole number" if whole else "not a number", where, _shown(value), expected))
    elif value < 0 or (above_zero and not value):
        problems.append(Problem("negative" if value < 0 else "zero", where, _shown(value), expected))
    else:
        return int(value) if whole else float(value)
    return 1


def _shown(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
