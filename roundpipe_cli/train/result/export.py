"""From a run's result to a folder for other programs: the adapter or the merged model.

Merging goes module by module: the base weights of one adapted module are read, PEFT's own merge adds the adapter in
float32, the sum is written into a shard, and nothing stays in memory. The folder appears under its name only when it
is complete.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Say
from roundpipe_cli.faults import fault
from roundpipe_cli.files import require_free_bytes, shared_mode, sync, write_new_file
from roundpipe_cli.heap import settle_heap
from roundpipe_cli.model.adapter_files import (
    ADAPTER_CONFIG,
    BY_PEFT_HINT,
    ExpertProduct,
    StartedBase,
    as_single_experts,
    check_adapter_folder,
    expert_products,
    put_adapter,
    read_adapter_config,
    read_adapter_tensors,
    trained_tokens,
)
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import check_file, check_model_folder, file_tensors
from roundpipe_cli.model.load import build_skeleton, has_tokenizer, load_config, load_tokenizer
from roundpipe_cli.model.new_tokens import grow_tables, trained_rows
from roundpipe_cli.model.stored.conversions import WeightGroup
from roundpipe_cli.model.stored.nf4 import is_nf4
from roundpipe_cli.model.stored.tensors import (
    DTYPES,
    OpenFiles,
    StoredTensor,
    base_name,
    check_finite,
    is_adapter,
    plain,
    tied_names,
)
from roundpipe_cli.model.stored.untied import untie_stored
from roundpipe_cli.model.weights_io import BaseWeights
from roundpipe_cli.train.checkpoint.output_dir import whole_folder
from roundpipe_cli.train.checkpoint.writing import TensorSpec, stream_file
from roundpipe_cli.train.prepare.base_files import (
    ESCAPED,
    GENERATION_CONFIG,
    OTHER_NAMES,
    describe_added,
    read_base_files,
    read_tokenizer_files,
    write_files,
)
from roundpipe_cli.train.result.gguf_adapter import write_adapter_gguf
from roundpipe_cli.train.result.gguf_types import ADAPTER_GGUF, GGUF_NAME
from roundpipe_cli.train.result.model_card import model_card
from roundpipe_cli.train.result.ollama import modelfile
from roundpipe_cli.train.result.packed_again import Merge, Rounding, can_pack, pack_again
from roundpipe_cli.units import counted, format_bytes, format_seconds


class MergedTensors:
    """The tensors of the result on demand: the base's, those of adapted modules with the adapter added."""

    def __init__(
        self,
        model: nn.Module,
        base: BaseWeights,
        result: Path | None,
        *,
        dtype: torch.dtype | None,
        unpacked: torch.dtype,
    ) -> None:
        """`model`: gets the modules of the adapter in `result`, if there is one; `dtype`: of the weights; None: as the
        files have it, or `unpacked`."""
        tied = tied_names(model)
        parameters = {name: parameter.shape for name, parameter in model.named_parameters()}
        named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        first = {twin: name for name in parameters for twin in tied.get(name, ())}
        self.adapted = _Adapted(model, base, result, first)
        untied = self.adapted.untied
        self.has_base_names = base.conversions is not None and all(
            not self.adapted.changes(group) or reverts(group, base, model) for group in base.groups
        )
        """Whether the tensors are those of the base's files; else they are the model's own."""
        self._model, self._base = model, base
        self.is_packed = self.has_base_names and dtype is None and _can_stay_packed(base, self.adapted)
        """Whether what the base's files hold quantised is so in the result."""
        self.rounding, self._group_of = Rounding(), {name: group for group in base.groups for name in group.stored}
        self._part_of: dict[str, tuple[StoredTensor, str, str]] = {}
        """Name of a tensor of a quantised weight -> that weight, its name, the tensor's role."""
        self._made = dict[str, torch.Tensor]()
        self.specs: list[TensorSpec] = []
        if base.conversions is not None and self.has_base_names:
            for group in base.groups:  # what is merged together side by side
                grown = next(iter(group.targets.values())) if group.is_grown and self.adapted.changes(group) else None
                asked = dtype if group.targets.keys() & named else None
                for name, stored in group.stored.items():
                    own = unpacked if stored.is_quantized else stored.dtype
                    self._add(name, stored, asked or own, grown or stored.shape)
            beside = {name: base.stored[name] for name in base.conversions.unused}
            for name, stored in (beside | (_unread(base) if self.is_packed else {})).items():
                self._add(name, stored, stored.dtype, stored.shape)
            in_files = {name for group in base.groups for name in group.targets}
            rest = [name for twin, name in untied.items() for name in (twin, name) if name not in in_files]
        else:
            rest = [*parameters, *untied]
        quantized = [group for group in base.groups if any(one.is_quantized for one in group.stored.values())]
        kinds = {name: unpacked for group in quantized for name in group.targets}
        self.specs += [
            TensorSpec(name, dtype or kinds.get(first_name) or base.dtype(first_name), tuple(parameters[first_name]))
            for name, first_name in ((name, untied.get(name, name)) for name in dict.fromkeys(rest))
        ]
        self._current: tuple[WeightGroup | None, Mapping[str, torch.Tensor]] = (None, {})
        sizes = Counter[torch.dtype]()
        for spec in self.specs:
            sizes[spec.dtype] += 0 if spec.name in self._part_of else spec.num_bytes
        self.main_dtype = sizes.most_common(1)[0][0]

    def _add(self, name: str, stored: StoredTensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Announce a weight, or the tensors that it is made of."""
        if not self.is_packed or (name in self._group_of and not stored.is_quantized):
            self.specs.append(TensorSpec(name, dtype, tuple(shape)))
            return
        for role, piece in stored.pieces.items():
            self._part_of[piece.key] = stored, name, role
            self.specs.append(TensorSpec(piece.key, DTYPES[piece.dtype], piece.shape))

    def tensors(self, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of these, in their order."""
        for spec in specs:
            fault("export")
            is_part = spec.name in self._part_of
            yield spec.name, self._part(spec.name) if is_part else _in_type(self._value(spec.name), spec)

    def _value(self, name: str) -> torch.Tensor:
        if name not in self._base.stored or not self.has_base_names:
            return self.adapted.weight(name)
        group, product = self._group_of.get(name), self.adapted.products.get(name)
        if group is not None and self.adapted.changes(group) and (product is None or len(product[0]) > 1):
            return self._reverted(group)[name]
        with OpenFiles() as files:
            values = self._base.stored[name].read(files)
            return values.clone() if product is None else _with_product(values, product, 0)

    def _part(self, key: str) -> torch.Tensor:
        """A tensor that a quantised weight is made of: as published, or packed again with the weight's others."""
        if key not in self._made:
            stored, name, asked = self._part_of[key]
            group = self._group_of.get(name)
            with OpenFiles() as files:
                parts = {role: files.tensor(piece) for role, piece in stored.pieces.items()}
                if group is None or not self.adapted.changes(group):
                    return parts[asked].clone()
                made = pack_again(stored, parts, self._merge_of(name, stored, group), self.rounding)
            self._made |= {piece.key: made[role] for role, piece in stored.pieces.items()}
        return self._made.pop(key)

    def _merge_of(self, name: str, stored: StoredTensor, group: WeightGroup) -> Merge:
        """How a weight of the files gets the adapter; experts one at a time where that is a product alone."""
        is_mxfp4, is_stack = "blocks" in stored.pieces, len(stored.shape) == 3
        product = self.adapted.products.get(name) if is_mxfp4 or not is_stack else None
        if product is not None:
            return lambda number, rows, base: _with_product(base, product, number, rows)
        whole = self._reverted(group)[name].float()
        whole = whole.mT if is_mxfp4 or stored.is_turned else whole
        return lambda number, rows, _: (whole[number] if is_stack else whole)[rows]

    def _reverted(self, group: WeightGroup) -> Mapping[str, torch.Tensor]:
        """The tensors of the files that a group of changed weights becomes."""
        if self._current[0] is not group:
            self._current = (None, {})
            assert self._base.conversions is not None and group.conversion is not None
            weights = {name: self.adapted.weight(name) for name in group.targets}
            made = self._base.conversions.revert(group.conversion, weights, self._model)
            assert made is not None, "it was tried on the meta device"
            self._current = (group, made)
        return self._current[1]


def _with_product(base: torch.Tensor, product: ExpertProduct, number: int, rows: slice = slice(None)) -> torch.Tensor:
    """Rows of the weight of an expert with its adapter, float32."""
    a, b, scale = product
    return torch.addmm(base.float(), b[number, rows].float(), a[number].float(), alpha=scale)


def _can_stay_packed(base: BaseWeights, adapted: _Adapted) -> bool:
    """Whether all that the files hold quantised can be written so."""
    quantized = [one for one in base.stored.values() if one.is_quantized]
    grown = [one for group in base.groups if group.is_grown and adapted.changes(group) for one in group.stored.values()]
    return bool(quantized) and all(map(can_pack, quantized)) and not any(one.is_quantized for one in grown)


def _unread(base: BaseWeights) -> dict[str, StoredTensor]:
    """Tensors of the files that are in no weight, such as scales of activations."""
    pieces = [piece for one in base.stored.values() for piece in one.pieces.values()]
    found, used = file_tensors({piece.path for piece in pieces}), {piece.key for piece in pieces}
    return {key: plain(piece) for key, piece in found.items() if key not in used}


def _in_type(values: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The values in the type in which they are written; refused where they overflow in it."""
    if values.is_floating_point() and spec.dtype.is_floating_point and values.dtype != spec.dtype:
        check_finite(values, spec.dtype, spec.name)
    return values.to(spec.dtype)


def reverts(group: WeightGroup, base: BaseWeights, model: nn.Module) -> bool:
    """Whether a group's weights lead back to the tensors of the files that they are made of."""
    assert base.conversions is not None and group.conversion is not None
    weights = {name: torch.empty(shape, device="meta") for name, shape in group.targets.items()}
    made = base.conversions.revert(group.conversion, weights, model)
    same = made is not None and all(made[name].shape == stored.shape for name, stored in group.stored.items())
    return same or group.is_grown


class _Adapted:
    """Weights of the model by name, those of adapted modules with the adapter added."""

    def __init__(self, model: nn.Module, base: BaseWeights, result: Path | None, first: Mapping[str, str]) -> None:
        """`result`: None: there is no adapter; `first`: other names of a shared weight -> the model's."""
        self._base, self._adapter, stays_tied = base, dict[str, torch.Tensor](), True
        if result is not None:
            config = read_adapter_config(result)
            config.inference_mode, config.lora_dropout, stays_tied = True, 0.0, config.ensure_weight_tying
            put_adapter(model, config, result)
            self._adapter = read_adapter_tensors(model, result)
            self._started = StartedBase(model, result)
            for name in self._started.names:
                if any(is_nf4(weight) for weight in base.group_of(base_name(name)).stored.values()):
                    self._started.refuse_packed(name)
        self._units = dict(_units(model))
        for path, unit in self._units.items():
            _refuse_lost_bias(path, unit, result)
        self._unit_of = {
            base_name(f"{path}.{inner}"): path
            for path, unit in self._units.items()
            for inner, _ in unit.named_parameters()
            if not is_adapter(f".{inner}") and _may_change(unit, inner)
        }
        self._saved_whole = {
            name.replace(".modules_to_save.default", ""): name for name in self._adapter if ".modules_to_save." in name
        }
        self._rows = trained_rows(model, self._adapter)
        self._beside = {base_name(name): tensor for name, tensor in self._adapter.items() if not is_adapter(name)}
        self.replaced = sorted(self._beside)
        """Weights of the base for which the adapter's file has others."""
        self.products = {} if self.replaced or self._saved_whole else expert_products(model, dict(self._adapter))
        """Names in the base's files of experts' weights -> the product that is added to them, and to nothing else."""
        whole = {name.partition(".modules_to_save.")[0] for name in self._saved_whole.values()}
        self.num_modules = len(self._units) + len(whole) + len(self._rows)
        """Modules whose weights the adapter changed."""
        self._changed = self._unit_of.keys() | self._saved_whole.keys() | self._beside.keys() | self._rows.keys()
        self._first, self._own = first, dict[str, str]()
        self._current: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self.untied = {} if stays_tied else {twin: name for twin, name in first.items() if self._differ(twin, name)}
        """Weights that the base has once and the result twice: other name -> the model's."""
        self._own = {twin: name for twin, name in first.items() if twin not in self.untied}

    def _differ(self, twin: str, name: str) -> bool:
        """Whether the adapter treats the names of one weight differently. PEFT adapts the module of one name alone."""
        return not self._changed.isdisjoint((twin, name)) and not torch.equal(self.weight(twin), self.weight(name))

    def changes(self, group: WeightGroup) -> bool:
        """Whether one of a group's weights differs from the base's."""
        names = {self._own.get(name, name) for name in group.targets} | set(group.targets)
        others = {twin for twin, name in self._own.items() if name in names}
        return bool(self._changed & (names | others))

    def weight(self, name: str) -> torch.Tensor:
        """A weight of the result."""
        if name not in self._unit_of and name not in self._saved_whole:
            name = self._own.get(name, name)
        path = self._unit_of.get(name)
        if name in self._saved_whole:
            return self._adapter[self._saved_whole[name]]
        values = self._base_weight(name) if path is None else self._merged(path)[name]
        return self._rows[name].put_into(values) if name in self._rows else values

    def _base_weight(self, name: str) -> torch.Tensor:
        """A weight before the adapter is added."""
        first = self._first.get(name, name)
        for one in (name, first, *(twin for twin, other in self._first.items() if other == first)):
            if one in self._beside:
                return self._beside[one]
        return self._base[name if name in self._base else first]

    def _merged(self, path: str) -> dict[str, torch.Tensor]:
        """The base weights of one adapted module with the adapter added, float32."""
        if self._current[0] == path:
            return self._current[1]
        self._current = ("", {})
        unit = self._units[path]
        real: dict[str, torch.Tensor] = {}
        for name, place, attribute, _ in _parameters(path, unit):
            values = self._adapter[name] if is_adapter(name) else self._base_weight(base_name(name))
            place[attribute] = nn.Parameter(self._started.weight(name, values).float(), requires_grad=False)
        for _, module in unit.named_modules():
            if hasattr(module, "merged_adapters"):
                module.merge(safe_merge=True)
                module.merged_adapters.clear()  # it may be asked for again, and PEFT merges nothing twice
        for name, place, attribute, parameter in _parameters(path, unit):
            if not is_adapter(name):
                real[base_name(name)] = parameter.detach()
            place[attribute] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        self._current = (path, real)
        return real


def _parameters(path: str, unit: nn.Module) -> list[tuple[str, dict[str, nn.Parameter | None], str, nn.Parameter]]:
    """(whole name, its module's parameters, name there, parameter) of a module at `path`."""
    return [
        (".".join(filter(None, (path, module_path, attribute))), module._parameters, attribute, parameter)
        for module_path, module in unit.named_modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None
    ]


def _may_change(unit: nn.Module, name: str) -> bool:
    """Whether an adapter may change a parameter of the module that it wraps: of experts no bias."""
    own = [layer.parameter_name for layer in unit.modules() if hasattr(layer, "parameter_name")]
    return not own or name.rpartition(".")[2] in own


def _refuse_lost_bias(path: str, layer: Any, result: Path | None) -> None:
    """Raise a RefusedError for an adapter with a bias (`lora_bias`) of a layer that has none to add it to."""
    if any(layer.lora_bias.values()) and getattr(layer.get_base_layer(), "bias", None) is None:
        raise RefusedError(
            "the adapter has a bias where the base model has none to add it to",
            where=f"{result}/{ADAPTER_CONFIG}",
            found=f"lora_bias: true on {path}",
            hint=BY_PEFT_HINT,
        )


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that an adapter wraps."""
    last = None
    for path, module in model.named_modules():
        inside = last is not None and path.startswith(last + ".")
        if hasattr(module, "merged_adapters") and hasattr(module, "lora_A") and not inside:
            last = path
            yield path, module


WRITTEN_PER_S, PACKED_PER_S = 100e6, 5e6
"""Bytes a second of a merge, and of one in which every weight is packed again, on two slow cores."""
MAX_SHARD_BYTES = 5_000_000_000
"""Bytes of a shard, as transformers had it for years: small enough for every file system and download."""
FILE_MODE = 0o644


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """The place where the body writes what is to be in the new folder `folder`."""
    with whole_folder(folder, "the export") as temporary:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            what = "the folder to export to cannot be made"
            raise RefusedError(what, where=str(folder), found=error.strerror) from error
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            path.chmod(shared_mode(0o777 if path.is_dir() else 0o666))
            sync(path)
        fault("export")


def copy_result(
    result: Path,
    folder: Path,
    tell: Say,
    *,
    base: str | None = None,
    gguf: bool = False,
    source: ModelSource | None = None,
    single_experts: bool = False,
) -> None:
    """The adapter or model of a run as it is, without the run's own files.

    Args:
        tell: gets notes on what the result lacks.
        base: for `model_card`.
        gguf: of an adapter a GGUF file is written too; of a model there will be one.
        source: an adapter's base, for its GGUF file and for `single_experts`: fused experts get names of single ones.

    Raises:
        ResourceError: disk full or failing.
        RefusedError: `folder` cannot be made, or a file is not safe to open.
    """
    is_whole = not (result / ADAPTER_CONFIG).is_file()
    (check_model_folder if is_whole else check_adapter_folder)(result)
    single: dict[str, bytes] = {}
    if single_experts and source is not None:
        single = as_single_experts(build_skeleton(load_config(source), torch.float32), result)
        if not single:
            tell("no names changed: vLLM reads PEFT's for this model")
    with _new_folder(folder) as temporary:
        for path in sorted(result.iterdir()):
            is_weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
            if path.is_file() and (is_weights or path.name in RESULT_NAMES):
                check_file(path, None)
                shutil.copyfile(path, temporary / path.name)
        write_files(single, temporary)
        tokenizer = None
        if is_whole or has_tokenizer(result):
            tokenizer = load_tokenizer(ModelSource(str(result), result))
            write_files(read_tokenizer_files(result, tokenizer), temporary)
        else:
            tell("the adapter has no tokenizer: its base's belongs to it")
        _add_extras(result, temporary, tokenizer, tell, base=base, gguf=gguf, source=source)


def _add_extras(
    result: Path, folder: Path, tokenizer: Any, tell: Say, *, base: str | None, gguf: bool, source: ModelSource | None
) -> None:
    """Model card, and a Modelfile for whole weights or, beside its GGUF file, for an adapter of `source`."""
    whole = not (folder / ADAPTER_CONFIG).is_file()
    card = model_card(result, base=base, merged=whole, gguf=gguf)
    write_new_file(folder / "README.md", [card.encode(errors=ESCAPED)], FILE_MODE)
    settings, weights, adapter = folder / GENERATION_CONFIG, f"./{GGUF_NAME}" if gguf else ".", None
    generation = json.loads(settings.read_bytes()) if settings.exists() else {}
    if gguf and source is not None:
        weights, adapter = str(source.folder.absolute() / (source.gguf_file or "")), f"./{ADAPTER_GGUF}"
        generation = read_base_files(source, load_config(source)).generation
        tokenizer = tokenizer or load_tokenizer(source)
        write_adapter_gguf(result, source, folder / ADAPTER_GGUF)
    if whole or adapter is not None:
        text, has_template = modelfile(tokenizer, weights, generation, adapter)
        write_new_file(folder / "Modelfile", [text.encode(errors=ESCAPED)], FILE_MODE)
        if not has_template:
            tell("the chat template cannot be written in Ollama's language, so the Modelfile has none")


RESULT_NAMES = (ADAPTER_CONFIG, "config.json", GENERATION_CONFIG, *OTHER_NAMES)


@torch.no_grad()
def merge_result(
    result: Path,
    source: ModelSource | None,
    folder: Path,
    dtype: str | None,
    *,
    tell: Say,
    base: str | None = None,
    gguf: bool = False,
    progress: Say = lambda text: None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> tuple[str, dict[str, float]]:
    """Write base model and adapter as one model in Hugging Face format, or a whole model in another type.

    Args:
        result: a folder with an adapter in PEFT's format; where it has no tokenizer, the base's is taken.
        source: the base model; None: `result` is a whole model.
        dtype: of the weights written; None keeps that of the base's files, bfloat16 for GGUF; quantised weights stay
            so where they can be packed again, and are of the type of the base's configuration otherwise.
        tell: gets notes on differences from the base's files.
        base, gguf: for `model_card`.
        progress: gets what is going to be written, and what was.

    Returns:
        a line on how many modules changed, and what was written; the figures of `Rounding`, empty where no weight was
        packed again.

    Raises:
        RefusedError: `folder` cannot be made, the adapter does not fit the base, or one of them cannot be read.
        ResourceError: disk full or failing.
    """
    adapter = None if source is None else result
    if source is None:
        check_model_folder(result)
        source = ModelSource(str(result), result)
    settle_heap()  # or the pieces between live tensors add up to more than a shard
    with _new_folder(folder) as temporary:
        config = load_config(source)
        base_files = read_base_files(source, config)
        own_dtype = _own_dtype(config)  # a skeleton's own replaces it
        model = build_skeleton(config, torch.float32)
        if adapter is not None:
            tokens = trained_tokens(read_adapter_config(adapter).trainable_token_indices)
            grow_tables(model, tokens, str(adapter / ADAPTER_CONFIG))
        if source.gguf_file is None:
            untie_stored(model, source.folder)
        weights = BaseWeights(source, model, torch.float32)
        asked = dtype or ("bfloat16" if source.gguf_file else None)
        kind = None if asked is None else getattr(torch, asked)
        merging = MergedTensors(model, weights, adapter, dtype=kind, unpacked=own_dtype)
        total = sum(spec.num_bytes for spec in merging.specs)
        require_free_bytes(temporary, total, "the exported model")
        num_shards = _write_shards(merging, temporary, max_shard_bytes, progress)
        own = result if has_tokenizer(result) else None
        tokenizer = load_tokenizer(source if own is None else ModelSource(str(own), own))
        base_files, added_ends = base_files.with_tokenizer(source, tokenizer, own).ending_as_trained(tokenizer)
        if merging.adapted.untied:
            written: Any = model.config
            for part in (written, written.get_text_config()):
                part.tie_word_embeddings = False
        contents = base_files.contents(model, merging.main_dtype, packed=merging.is_packed)
        write_files({**contents, **base_files.tokenizer}, temporary)
        _add_extras(result, temporary, tokenizer, tell, base=base, gguf=gguf, source=None)
    quantized = [re.sub(r"\.\d+(?=\.)", ".*", name) for name, weight in weights.stored.items() if weight.is_quantized]
    if merging.rounding.count:
        tell(str(merging.rounding))
    if quantized and not merging.is_packed:
        tell(f"quantised in the base's files, and whole here: {', '.join(dict.fromkeys(quantized))}")
    if not merging.has_base_names and source.gguf_file is None:
        tell("transformers cannot undo how it fuses this model's weights: they are written as it has them")
    if merging.adapted.untied:
        tell("the adapter changes one of the tables that the base shares: both are written, no longer tied")
    if merging.adapted.replaced:
        names = ", ".join(merging.adapted.replaced)
        tell(f"whole weights in the adapter's file take the place of the base's: {names}")
    if added_ends:
        tell(describe_added(added_ends))
    done = f"weights in {dtype}" if adapter is None else f"merged {merging.adapted.num_modules} modules"
    return f"{done}: {format_bytes(total)} in {counted(num_shards, 'file')}", merging.rounding.figures()


def _own_dtype(config: Any) -> torch.dtype:
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.bfloat16


def _write_shards(merging: MergedTensors, folder: Path, max_bytes: int, progress: Say) -> int:
    """Write the tensors into files of at most `max_bytes`, or of one tensor, with an index; returns their number."""
    of_name: Any = {spec.name: spec for spec in merging.specs}
    split = split_state_dict_into_shards_factory(
        of_name,
        get_storage_size=lambda spec: spec.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    files, total = split.filename_to_tensors, sum(spec.num_bytes for spec in merging.specs)
    memory, rate = format_bytes(2 * min(total, max_bytes)), PACKED_PER_S if merging.is_packed else WRITTEN_PER_S
    progress(
        f"writing {format_bytes(total)} in {counted(len(files), 'file')}, with about {memory} of memory, "
        f"in up to {format_seconds(total / rate)} ..."
    )
    done, began_s = 0, time.monotonic()
    for number, (file, names) in enumerate(files.items(), start=1):
        # Larger elements first, as the format's alignment wants it.
        specs = sorted((of_name[name] for name in names), key=lambda spec: -spec.dtype.itemsize)
        write_new_file(folder / file, stream_file(specs, merging.tensors(specs), {"format": "pt"}), FILE_MODE)
        done += sum(spec.num_bytes for spec in specs)
        left_s = (time.monotonic() - began_s) * (total / done - 1)
        progress(f"wrote {number} of {counted(len(files), 'file')}, about {format_seconds(left_s)} left")
    if split.is_sharded:
        content = json.dumps({"metadata": split.metadata, "weight_map": split.tensor_to_filename}, indent=2).encode()
        write_new_file(folder / "model.safetensors.index.json", [content], FILE_MODE)
    return len(files)
