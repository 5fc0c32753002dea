"""Model folders made by somebody who means harm: pickles, lures to run code, weights that lie about themselves."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import random
import shutil
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.e2e import Outcome, edit_json, launch
from tests.torture import guard
from tests.torture.arena import Arena, Seen

ENDS_WITHIN_S = 2.0
MEMORY_BYTES = 300 * 1024**2

Spoil = Callable[[Path, str], None]  # spoils a model folder, given the file that code which runs would make


class _Evil:
    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


class _State(_Evil):
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"open({self.canary!r}, 'w')",)


def _plain(canary: str) -> bytes:
    return pickle.dumps(_Evil(canary), protocol=2)


def _evaluated(canary: str) -> bytes:
    return pickle.dumps({"model.embed_tokens.weight": _State(canary)}, protocol=4)


def _text(canary: str) -> bytes:
    return f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()


def _zipped(canary: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", _plain(canary))
        archive.writestr("archive/version", "3\n")
    return data.getvalue()


def _tarred(canary: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in ("pickle", "tensors", "storages", "../../escaped"):
            entry = tarfile.TarInfo(name)
            payload = _plain(canary)
            entry.size = len(payload)
            archive.addfile(entry, io.BytesIO(payload))
    return data.getvalue()


PAYLOADS = {"reduce": _plain, "eval": _evaluated, "text": _text, "zip": _zipped, "tar": _tarred}
PICKLE_NAMES = ("pytorch_model.bin", "pytorch_model.pt", "consolidated.00.pth", "model.safetensors", "model.ckpt")


def _only_pickle(name: str, payload: str, model: Path, canary: str) -> None:
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(PAYLOADS[payload](canary))


def _pickle_index(model: Path, canary: str) -> None:
    _only_pickle("pytorch_model-00001-of-00001.bin", "zip", model, canary)
    index = {"weight_map": {"lm_head.weight": "pytorch_model-00001-of-00001.bin"}}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _index_to_pickle(model: Path, canary: str) -> None:
    (model / "evil.bin").write_bytes(_plain(canary))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "evil.bin"}}))


def _adapter_pickle(model: Path, canary: str) -> None:
    (model / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "."}))
    (model / "adapter_model.bin").write_bytes(_plain(canary))


def _pickle_tokenizer(model: Path, canary: str) -> None:
    (model / "tokenizer.json").unlink()
    (model / "vocab.pkl").write_bytes(_plain(canary))
    (model / "tokenizer.model").write_bytes(_plain(canary))
    edit_json(model / "tokenizer_config.json", tokenizer_class="TransfoXLTokenizer")


def pickles() -> list[tuple[str, Spoil]]:
    """30 folders whose weights, adapter or tokenizer are pickles."""
    cases: list[tuple[str, Spoil]] = [
        (f"{payload} as {name}", functools.partial(_only_pickle, name, payload))
        for name in PICKLE_NAMES
        for payload in PAYLOADS
    ]
    cases += [("index of pickles", _pickle_index), ("index to a pickle", _index_to_pickle)]
    return [*cases, ("adapter", _adapter_pickle), ("tokenizer", _pickle_tokenizer), ("7z", _seven_zip)]


def _seven_zip(model: Path, canary: str) -> None:
    (model / "model.safetensors").write_bytes(b"7z\xbc\xaf\x27\x1c\x00\x04" + _zipped(canary))


# --- code -------------------------------------------------------------------------------------------------------------
def _with_code(model: Path, canary: str) -> None:
    for name in ("modeling", "configuration", "tokenization", "__init__", "conftest", "sitecustomize"):
        (model / f"{name}.py").write_text(f"open({canary!r}, 'w')\n")


def _lure(file: str, changes: dict[str, Any], model: Path, canary: str) -> None:
    _with_code(model, canary)
    edit_json(model / file, **changes)


REMOTE: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("auto_map model", "config.json", {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}),
    ("auto_map config", "config.json", {"auto_map": {"AutoConfig": "configuration.Mine"}}),
    ("auto_map elsewhere", "config.json", {"auto_map": {"AutoModelForCausalLM": "evil/repo--modeling.Mine"}}),
    ("auto_map nested", "config.json", {"text_config": {"auto_map": {"AutoConfig": "configuration.Mine"}}}),
    ("unknown type", "config.json", {"model_type": "mine", "architectures": ["Mine"]}),
    ("unknown type and map", "config.json", {"model_type": "mine", "auto_map": {"AutoConfig": "configuration.Mine"}}),
    ("trusted", "config.json", {"trust_remote_code": True}),
    ("trusted, nested", "config.json", {"text_config": {"model": {"trust_remote_code": True}}}),
    ("attention from the hub", "config.json", {"attn_implementation": "evil/kernel"}),
    ("attention, private", "config.json", {"_attn_implementation": "evil/kernel@main:attend"}),
    ("attention, internal", "config.json", {"_attn_implementation_internal": "evil/kernel"}),
    ("attention, a map", "config.json", {"_attn_implementation": {"": "evil/kernel"}}),
    ("experts from the hub", "config.json", {"experts_implementation": "evil/kernel"}),
    ("kernels", "config.json", {"use_kernels": True, "kernel_config": {"RMSNorm": "evil/kernel:RMSNorm"}}),
    ("tokenizer", "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tokenization.Mine", None]}}),
    ("tokenizer, a list", "tokenizer_config.json", {"auto_map": ["tokenization.Mine", "tokenization.Mine"]}),
    ("processor", "processor_config.json", {"auto_map": {"AutoProcessor": "modeling.Mine"}}),
    ("image processor", "preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "modeling.Mine"}}),
    ("generation", "generation_config.json", {"custom_generate": "evil/repo"}),
    ("adapter class", "adapter_config.json", {"peft_type": "LORA", "auto_mapping": {"parent_library": "modeling"}}),
)


def lures() -> list[tuple[str, Spoil]]:
    """20 folders that ask for code of theirs to be run."""
    return [(name, functools.partial(_lure, file, changes)) for name, file, changes in REMOTE]


# --- safetensors ------------------------------------------------------------------------------------------------------
def _tensor(begin: int, end: int, dtype: str = "F32", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def _header(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def _many(count: int) -> bytes:
    return b"{" + b",".join(b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(count)) + b"}"


T8 = bytes(8)
WEIGHTS: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "length 0": lambda: struct.pack("<Q", 0),
    "length 2^64-1": lambda: struct.pack("<Q", 2**64 - 1) + b"{}",
    "length beyond the file": lambda: _header({}, length=1000),
    "100 MB of JSON": lambda: _header(b"{" + b" " * (100 * 1024**2) + b"}"),
    "11 MB of JSON": lambda: _header(b'{"__metadata__":{"a":"' + b"x" * (11 * 1024**2) + b'"}}'),
    "a million tensors": lambda: _header(_many(1_000_000)),
    "150,000 tensors of nothing": lambda: _header(_many(150_000)),
    "60,000 tensors of nothing": lambda: _header(_many(60_000)),
    "deep JSON": lambda: _header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "twice": lambda: _header(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        T8,
    ),
    "overlap": lambda: _header({"a": _tensor(0, 8), "b": _tensor(4, 12)}, bytes(12)),
    "hidden first bytes": lambda: _header({"a": _tensor(8, 16)}, bytes(16)),
    "beyond the end": lambda: _header({"a": _tensor(0, 800)}, T8),
    "backwards": lambda: _header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, T8),
    "shape against bytes": lambda: _header({"a": _tensor(0, 8, shape=[3])}, T8),
    "overflow": lambda: _header({"a": _tensor(0, 8, shape=[2**62, 4])}, T8),
    "unknown type": lambda: _header({"a": _tensor(0, 8, dtype="OBJECT")}, T8),
    "more keys": lambda: _header({"a": {**_tensor(0, 8), "run": "me"}}, T8),
    "other tensors": lambda: _header({"a": _tensor(0, 8)}, T8),
}
"""Beside values of other types and out of range in a header, of which `fuzz-weights` tries thousands."""
INDEXES: dict[str, Any] = {
    "index ../": {"lm_head.weight": f"../{guard.SECRET}.safetensors"},
    "index absolute": {"lm_head.weight": "/etc/passwd"},
    "index absolute safetensors": {"lm_head.weight": f"/tmp/{guard.SECRET}.safetensors"},
    "index below": {"lm_head.weight": "a/../../model.safetensors"},
    "index link out": {"lm_head.weight": "link.safetensors"},
    "index missing shard": {"lm_head.weight": "model-00002-of-00002.safetensors"},
    "index of numbers": {"lm_head.weight": 7},
    "index a list": [["lm_head.weight", "model-00001-of-00002.safetensors"]],
    "index NUL": {"lm_head.weight": "model\0.safetensors"},
}


def _write_weights(make: Callable[[], bytes], model: Path, canary: str) -> None:
    (model / "model.safetensors").write_bytes(make())


def _write_index(weight_map: Any, model: Path, canary: str) -> None:
    secret = model.parent / f"{guard.SECRET}.safetensors"
    secret.write_bytes((model / "model.safetensors").read_bytes())
    (model / "link.safetensors").symlink_to(secret)
    if "link" not in str(weight_map):
        (model / "link.safetensors").unlink()
    # a file of just this name would be read in place of the index, as transformers does
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _link_out(name: str, model: Path, canary: str) -> None:
    secret = (model.parent / guard.SECRET).with_suffix(Path(name).suffix)
    (model / name).rename(secret)
    (model / name).symlink_to(secret)


def _link_to_itself(model: Path, canary: str) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("model.safetensors")


def _pipe(model: Path, canary: str) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors", stat.S_IRUSR | stat.S_IWUSR)


def _deep_config(model: Path, canary: str) -> None:
    (model / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)


def weights() -> list[tuple[str, Spoil]]:
    """34 folders whose weights or index are crafted."""
    cases: list[tuple[str, Spoil]] = [(name, functools.partial(_write_weights, make)) for name, make in WEIGHTS.items()]
    cases += [(name, functools.partial(_write_index, weight_map)) for name, weight_map in INDEXES.items()]
    cases += [("link out", functools.partial(_link_out, "model.safetensors")), ("link to itself", _link_to_itself)]
    cases += [("pipe", _pipe), ("config link out", functools.partial(_link_out, "config.json"))]
    return [*cases, ("deep config", _deep_config)]


# --- trials -----------------------------------------------------------------------------------------------------------
AFTER_THE_DATA = ("60,000 tensors of nothing", "other tensors", "twice", "more keys")
"""Refused when the model is built: processes of our own have tokenised rows and tried the template by then."""


def _refused(cases: list[tuple[str, Spoil]], arena: Arena, count: int) -> Seen:
    chosen = [cases[index * len(cases) // count] for index in range(count)] if count < len(cases) else cases
    seconds = [0.0]

    def attempt(index: int, draw: random.Random) -> None:
        name, spoil = chosen[index]
        work = arena.workspace()
        shutil.copytree(arena.folder / "model", work / "model")
        canary = work / "canary"
        spoil(work / "model", str(canary))
        report = work / "report"
        before = functools.partial(guard.watch, str(report), MEMORY_BYTES, name in AFTER_THE_DATA)
        done = launch(work, "finetune", "recipe.yaml", "model=./model", before=before).finish()
        _check(name, done, canary, report, ENDS_WITHIN_S * arena.patience)
        assert not (work / "out").exists(), f"{name}: something was written"
        seconds.append(done.seconds)
        shutil.rmtree(work)

    failures = arena.each(len(chosen), attempt)
    return Seen(len(chosen), failures, f"slowest {max(seconds):.1f} s")


def _check(name: str, done: Outcome, canary: Path, report: Path, within_s: float) -> None:
    assert done.code == 2, f"{name}: exit code {done.code}\n{done.err}"
    assert "Traceback" not in done.err and done.err.count("error: ") == 1, f"{name}: {done.err}"
    assert not canary.exists(), f"{name}: the canary was made"
    assert report.read_text() == "", f"{name}: {report.read_text()}"
    assert done.seconds < within_s, f"{name}: {done.seconds:.1f} s"


pickled_models = functools.partial(_refused, pickles())
remote_code = functools.partial(_refused, lures())
crafted_weights = functools.partial(_refused, weights())
