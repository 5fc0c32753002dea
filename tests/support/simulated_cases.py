"""What the engine can do, as steps to be run on simulated GPUs and on the processor: the bits must be equal."""

from __future__ import annotations

import _thread
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from roundpipe_cli import faults
from roundpipe_cli.costs.cost import CHUNK_BYTES
from roundpipe_cli.engine import layer as layer_file
from roundpipe_cli.engine import worker
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.backends.turns import IssueTurns
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions, GradientOptions
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.errors import InternalError
from roundpipe_cli.kernels import random_masks, rms_norm, unpack_codes
from roundpipe_cli.model import attention
from roundpipe_cli.model.sequence_loss import Preference
from roundpipe_cli.model.stored import packed_weights
from roundpipe_cli.planning.resident import DEALING, resident_cut
from roundpipe_cli.schedule.actions import Schedule, equal_costs
from roundpipe_cli.schedule.builders import Options, Rounds, build_forward, build_schedule
from roundpipe_cli.train.optim.optimizer import HostOptimizer
from roundpipe_cli.train.optim.updater import Updater
from tests.support.schedules import dealt
from tests.support.simulated_cuda import SMALL_CARD, Card, Simulation
from tests.support.simulated_cuda.threads import BACKWARD
from tests.support.tiny import Rig, make_rig, random_microbatches, write_new_weights

SIZES, MORE_SIZES = ((2, 5), (1, 4)), ((2, 6), (1, 5), (2, 4))
CARDS = (Card(), SMALL_CARD)
Bits = list[object]


def roundpipe(rig: Rig, num_microbatches: int, *, workers: int = 2, blocks: int = 2, **options: Any) -> Schedule:
    """So many blocks a forward stage, one a backward stage, the head alone."""
    last = rig.num_layers - 1
    starts = range(0, last, 2) if blocks == 2 else (0, *range(2, last))
    forward = [(start, max(1, min(start + blocks - 1, last - 1))) for start in starts]
    backward = [(last, last), *((layer, layer) for layer in range(last - 1, 1, -1)), (0, 1)]
    return dealt(forward, backward, workers, num_microbatches, **options)


def one_f_one_b(rig: Rig, num_microbatches: int) -> Schedule:
    stages = [(0, 1), (2, rig.num_layers - 1)]
    return build_schedule("1f1b", forward_stages=stages, num_workers=2, rounds=Rounds(num_microbatches))


def resident(rig: Rig, num_microbatches: int) -> Schedule:
    """Each microbatch stays on one worker, all weights on both."""
    found = resident_cut(equal_costs(rig.num_layers), 2, lambda cut: True)
    assert found is not None
    return dealt(found.forward_stages, found.backward_stages, 2, num_microbatches, options=DEALING)


def gradient_bits(rig: Rig) -> Bits:
    return [gradient.clone() for gradient in rig.store.gradients]


def train(engine: Engine, rig: Rig, case: Case) -> Bits:
    """Steps one after the other, with updates between them."""
    bits: Bits = []
    schedule = case.schedule(rig, len(case.microbatches) * case.chunks)
    for step in range(case.num_steps):
        scaled = GradientOptions(loss_scale=case.loss_scale)
        result = engine.run_step(case.microbatches, schedule, step=step, version=step, gradients=scaled)
        bits += [result.loss, result.gradient_norm, *gradient_bits(rig), str(result.part_sums)]
        if step < case.num_steps - 1:
            write_new_weights(rig)
    return bits


def update_early(engine: Engine, rig: Rig, case: Case) -> Bits:
    """Steps without clipping: each layer is updated by another thread as soon as its gradient is complete."""
    bits: Bits = []
    schedule = case.schedule(rig, len(case.microbatches))
    with Updater(rig.store, HostOptimizer(rig.store), num_threads=1) as updater:
        for step in range(case.num_steps):
            updater.begin_early(step, 1e-2)
            gradients = GradientOptions(on_complete=updater.gradient_complete)
            result = engine.run_step(case.microbatches, schedule, step=step, gradients=gradients)
            updater.wait()
            bits += [result.loss, result.gradient_norm, *(tensor.clone() for tensor in rig.store.masters)]
    return bits


def write_layers(rig: Rig, gradients: Sequence[torch.Tensor], layers: Sequence[int]) -> None:
    """The next version of these layers, in float32."""
    for layer in layers:
        with rig.store.next_version(layer) as place:
            place.masters.add_(gradients[layer], alpha=-0.01)


def update_beside(engine: Engine, rig: Rig, case: Case) -> Bits:
    """Steps, each given to the workers while another thread writes the weights for it."""
    bits: Bits = []
    schedule, draw = case.schedule(rig, len(case.microbatches)), random.Random(5)

    def update() -> None:
        for layer in range(rig.num_layers):
            time.sleep(0.02 * draw.random())
            write_layers(rig, rig.store.gradients, [layer])

    for step in range(case.num_steps):
        result = engine.run_step(case.microbatches, schedule, step=step, version=step)
        bits += [result.loss, result.gradient_norm, *gradient_bits(rig)]
        if step + 1 < case.num_steps:
            threading.Thread(target=update).start()
    return bits


@contextmanager
def faulty(text: str) -> Iterator[None]:
    """A fault asked for, as the environment variable has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.ENVIRONMENT_VARIABLE, text)
        faults.load_faults()
        yield
    faults.load_faults()


@contextmanager
def copies_that_take_long() -> Iterator[None]:
    """No copy that is issued within has arrived as far as the host knows."""

    def long(copy: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*args: Any) -> Any:
            event = copy(*args)
            event.query = lambda: False
            return event

        return issue

    with pytest.MonkeyPatch.context() as patch:
        for name in ("copy_up", "copy_down"):
            patch.setattr(cuda.CudaBackend, name, long(getattr(cuda.CudaBackend, name)))
        yield


def after_failures(engine: Engine, rig: Rig, case: Case) -> Bits:
    """Steps after one that failed at each kind of work; the host writes over its memory in between. Where nothing is
    copied, which tells what to expect, no step fails."""
    bits: Bits = []
    if any(one.backend.aliases_host for one in engine._workers):
        return [one for _ in range(3) for one in train(engine, rig, case)]
    ways = {"work:slow=0.02:worker=0:nth=2,work:raise:worker=0:nth=2": copies_that_take_long()}
    for fault, copies in {**ways, "upload:raise:nth=5": nullcontext(), "download:raise:nth=4": nullcontext()}.items():
        with faulty(fault), copies, pytest.raises(InternalError, match="fault asked for"):
            train(engine, rig, case)
        for buffer in rig.store.transferred:
            buffer.copy_(buffer.clone())
        bits += train(engine, rig, case)
    return bits


def evaluate(engine: Engine, rig: Rig, case: Case) -> Bits:
    """A training step, then scores with and without adapters."""
    bits = train(engine, rig, replace(case, num_steps=1))
    stages = [(0, 1), (2, rig.num_layers - 1)]
    schedule = build_forward(stages, num_workers=2, num_microbatches=len(case.microbatches))
    for adapters in (True, False):
        for scores in engine.score(case.microbatches, schedule, step=0, adapters=adapters, top_k=3):
            bits += [value.clone() for value in vars(scores).values() if isinstance(value, torch.Tensor)]
    return bits


def packed_rows() -> list[Microbatch]:
    made = []
    for microbatch in random_microbatches([(1, 9), (1, 7)]):
        tokens = microbatch.input_ids.shape[1]
        positions = torch.cat([torch.arange(4), torch.arange(tokens - 4)])[None]
        made.append(replace(microbatch, position_ids=positions))
    return made


def pairs() -> list[Microbatch]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for microbatch in random_microbatches([(4, 6), (2, 5)]):
        reference = -30 + torch.randn(len(microbatch.labels), generator=generator, dtype=torch.float64)
        made.append(replace(microbatch, preference=Preference("dpo", 0.3, reference)))
    return made


@dataclass(frozen=True)
class Case:
    """A model, an engine and what it is to do."""

    model_type: str
    method: str
    model: Mapping[str, Any] = field(default_factory=dict)  # options of `make_rig`, beside `kernels: auto`
    engine: Mapping[str, Any] = field(default_factory=dict)  # values of `EngineOptions`
    chunk_bytes: int = CHUNK_BYTES
    schedule: Callable[[Rig, int], Schedule] = roundpipe
    microbatches: Sequence[Microbatch] = field(default_factory=lambda: random_microbatches(SIZES))
    chunks: int = 1
    num_steps: int = 1
    loss_scale: float = 1.0
    steps: Callable[[Engine, Rig, Any], Bits] = train
    bound: float = 0.0  # relative error of loss and gradients, where devices compute by other formulas
    waits: bool = False  # whether threads that issue wait for a device, as is known
    devices: Sequence[int] = (0, 1)  # one for each worker of the schedule
    float16_accumulation: bool = False

    def rig(self) -> Rig:
        return make_rig(self.model_type, self.method, **{"num_hidden_layers": 2, "kernels": "auto", **self.model})

    def on(self, rig: Rig, backends: Sequence[Backend]) -> Bits:
        """What the steps come to on these devices."""
        with patch.object(worker, "CHUNK_BYTES", self.chunk_bytes), engine_of(rig, backends, **self.engine) as engine:
            return self.steps(engine, rig, self)

    def on_processor(self) -> Bits:
        """What to expect: by workers that use the host's memory as it is, so without slots, transfers, their order."""
        with rounding_as_on_cards(narrow=self.float16_accumulation):
            return self.on(self.rig(), [CpuBackend(1) for _ in self.devices])

    def simulated(
        self, seed: int, devices: Sequence[int] | None = None, rig: Rig | None = None, **options: Any
    ) -> tuple[Bits, Simulation]:
        """The same on simulated GPUs, from page-locked weights; fails if accesses are not ordered."""
        rig = rig or self.rig()
        with simulated(seed, **options) as simulation, page_locked(rig), narrow_sums(self.float16_accumulation):
            bits = self.on(rig, backends_of(devices or self.devices))
        return bits, simulation


class Turns(IssueTurns):
    """Turns that autograd's threads may not take: the thread that has one waits for them. They order no accesses."""

    def __init__(self) -> None:
        super().__init__(stuck_s=60.0)
        self._lock = _thread.RLock()  # a simulation's would hand clocks on

    def _take(self) -> bool:
        name = threading.current_thread().name
        assert not name.startswith(BACKWARD), f"{name} waits for the turn of the thread that waits for it"
        return super()._take()


def backends_of(devices: Sequence[int]) -> list[cuda.CudaBackend]:
    """The backends of a run's workers, who take turns."""
    turns = Turns()
    return [cuda.CudaBackend(index, turns) for index in devices]


@contextmanager
def simulated(seed: int = 0, cards: Sequence[Card] = CARDS, **options: Any) -> Iterator[Simulation]:
    """A simulation, and none of its constants in later ones."""
    packed_weights.import_bitsandbytes()  # or something imports it within, and it looks for the library of its kernels
    try:
        with Simulation(cards, seed, **options) as simulation:
            yield simulation
    finally:
        attention._least_capability = None
        random_masks._columns.cache_clear()
        packed_weights._dynamic_map.cache_clear()
        unpack_codes.code_values.cache_clear()
        unpack_codes.powers.cache_clear()


@contextmanager
def rounding_as_on_cards(*, narrow: bool = False) -> Iterator[None]:
    """On the processor norms by torch's function, and unrounded sums of a head's products, as on a card; `narrow`: on
    one that adds up in float16."""

    def adds(like: torch.Tensor) -> bool:
        return like.dtype == torch.bfloat16 or (like.dtype == torch.float16 and not narrow)

    def product_sum(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found = torch.mm(left.float(), right.float())
        return found if total is None else torch.addmm(total, left.float(), right.float(), out=total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rms_norm, "takes_own_formula", lambda device: False)
        patch.setattr(layer_file, "adds_products", adds)
        patch.setattr(layer_file, "product_sum", product_sum)
        yield


@contextmanager
def narrow_sums(on: bool) -> Iterator[None]:
    """Products of float16 that add up in float16, as torch's switch has it."""
    torch.backends.cuda.matmul.allow_fp16_accumulation = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False


@contextmanager
def kernels_as_on(cards: Sequence[Card] = CARDS) -> Iterator[None]:
    """On the processor the kernels of a run on these cards, shared keys and norms: the same rounding of gradients."""
    decide = attention.takes_shared_keys
    attention.set_up_attention(min(card.capability for card in cards))
    attention.takes_shared_keys = lambda key: decide(torch.empty(0, dtype=key.dtype, device="meta"))
    try:
        with rounding_as_on_cards():
            yield
    finally:
        attention.takes_shared_keys = decide
        attention._least_capability = None


@contextmanager
def page_locked(rig: Rig) -> Iterator[None]:
    """Weights and gradients page-locked, as in a run, and changes told by a lock that a simulation may watch."""
    rig.store._changed = threading.Condition()  # whose lock hands clocks on
    buffers = rig.store.transferred
    for buffer in buffers:
        assert cuda.register_host_buffer(buffer, 0)
    try:
        yield
    finally:
        for buffer in buffers:
            cuda.unregister_host_buffer(buffer)


def engine_of(rig: Rig, backends: Sequence[Backend], **options: Any) -> Engine:
    """On these devices, as a case is run; `options` as of `EngineOptions`."""
    settings = EngineOptions(seed=3, head_chunk_tokens=8, fused=rig.fused, **options)
    return Engine(rig.skeleton, rig.split, rig.store, backends, options=settings)


def is_equal(found: Bits, expected: Bits, bound: float = 0.0) -> bool:
    """Whether two runs came to the same bits, or to the same numbers within `bound`."""
    return len(found) == len(expected) and all(_same(*pair, bound) for pair in zip(found, expected, strict=True))


def _same(one: object, other: object, bound: float) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if bound:
            return float((one - other).norm()) <= bound * float(other.norm())
        return bool(torch.equal(one.cpu(), other.cpu()))
    if bound and isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= bound * abs(other)
    return one == other


_DROPOUT = {"attention_dropout": 0.1, "lora_dropout": 0.1}
_REFERENCE = {"kernels": "reference"}
_CACHED = {"weight_cache_bytes": 10**9}
_UNPACKED_ONCE = {"whole_per_visit": True}
_IN_CHUNKS = random_microbatches([(2, 12), (1, 21), (1, 30)])
_FLOAT16 = {"model": {"dtype": torch.float16}, "loss_scale": 1024.0}
CASES: dict[str, Case] = {  # by feature
    "lora": Case("llama", "lora", microbatches=random_microbatches(MORE_SIZES)),
    "full": Case("llama", "full", num_steps=2, microbatches=random_microbatches(MORE_SIZES)),
    "dropout": Case("llama", "lora", _DROPOUT),
    "dropout-full": Case("gpt2", "full", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "n_layer": 2}),
    "tied": Case("gemma3_text", "full", {"tie_word_embeddings": True}),
    "packing": Case("llama", "full", _REFERENCE, microbatches=packed_rows()),
    "packing-by-rows": Case("gemma3_text", "lora", engine={"attends_in_rows": True}, microbatches=packed_rows()),
    "sliding-window": Case("gemma3_text", "lora", {"sliding_window": 4}, engine={"attends_in_rows": True}),
    "sequence-chunks": Case("llama", "full", chunks=2, microbatches=random_microbatches([(1, 9)]),
                            schedule=partial(roundpipe, sequence_chunks=2)),
    "packed-chunks": Case("gemma3_text", "lora", {"sliding_window": 4}, {"attends_in_rows": True}, chunks=3,
                          microbatches=packed_rows(), schedule=partial(roundpipe, sequence_chunks=3)),
    "mlp-chunks": Case("llama", "full", engine={"mlp_chunk_tokens": 5}),
    "kept-activations": Case("llama", "full", engine={"keep_blocks": 2}, schedule=one_f_one_b),
    "kept-activations-moved": Case("llama", "full", {"num_hidden_layers": 3}, {"keep_blocks": 2}, devices=(0,),
                                   schedule=partial(roundpipe, workers=1)),
    "many-visits": Case("llama", "full", {"num_hidden_layers": 5}, microbatches=random_microbatches(MORE_SIZES),
                        schedule=partial(roundpipe, blocks=1)),
    "recompute-layer": Case("llama", "full", _REFERENCE, engine={"recompute": "layer"}),
    "cache-whole": Case("llama", "lora", engine=_CACHED, num_steps=2),
    "cache-partial": Case("llama", "full", engine={"weight_cache_bytes": 180_000}, num_steps=2),
    "resident": Case("llama", "lora", engine=_CACHED, schedule=resident),
    "spread-head": Case("llama", "lora", schedule=partial(roundpipe, options=Options(head_workers=2))),
    "spread-head-full": Case("llama", "full", schedule=partial(roundpipe, options=Options(head_workers=2))),
    "early-updates": Case("llama", "full", num_steps=2, steps=update_early),
    "updates-beside": Case("llama", "full", num_steps=3, steps=update_beside),
    "updates-beside-tied": Case("gemma3_text", "full", {"tie_word_embeddings": True}, num_steps=2,
                                steps=update_beside),
    "updates-beside-cached": Case("llama", "lora", engine=_CACHED, num_steps=3, steps=update_beside),
    "small-chunks": Case("llama", "full", chunk_bytes=10_000,
                         microbatches=random_microbatches([(2, 24), (1, 45)])),
    "after-failures": Case("llama", "full", microbatches=random_microbatches(MORE_SIZES), steps=after_failures),
    "after-failures-lora": Case("llama", "lora", microbatches=random_microbatches(MORE_SIZES), steps=after_failures),
    "after-failures-cached": Case("llama", "lora", engine=_CACHED, steps=after_failures),
    "alike": Case("llama", "lora", microbatches=random_microbatches([(2, 5)] * 4)),
    "mixture-of-experts": Case("qwen3_moe", "full", waits=True),  # torch's grouped product is a loop in float32
    "expert-adapters": Case("qwen3_moe", "lora", {"dtype": torch.bfloat16, "lora_rank": 8}, bound=0.05, waits=True),
    "gpt-oss": Case("gpt_oss", "full", waits=True),
    "4-bit": Case("llama", "lora", {"packed_as": "4bit"}),
    "8-bit": Case("llama", "lora", {"packed_as": "8bit"}),
    "fp8": Case("llama", "lora", {"packed_as": "fp8"}),
    "fp8-blocks": Case("llama", "lora", {"packed_as": "fp8_blocks"}, engine=_UNPACKED_ONCE),
    "4-bit-once": Case("llama", "lora", {"packed_as": "4bit"}, engine=_UNPACKED_ONCE),
    "8-bit-once": Case("llama", "lora", {"packed_as": "8bit"}, engine=_UNPACKED_ONCE),
    "fp8-once": Case("llama", "lora", {"packed_as": "fp8"}, engine=_UNPACKED_ONCE),
    "float16": Case("llama", "full", {"dtype": torch.float16}, loss_scale=1024.0),
    "bfloat16": Case("llama", "lora", {"dtype": torch.bfloat16}),
    "head-in-chunks": Case("llama", "full", microbatches=_IN_CHUNKS),
    "head-in-chunks-float16": Case("llama", "full", microbatches=_IN_CHUNKS, **_FLOAT16),
    "head-in-chunks-narrow": Case("llama", "full", microbatches=_IN_CHUNKS, float16_accumulation=True, **_FLOAT16),
    "head-in-chunks-bfloat16": Case("llama", "full", {"dtype": torch.bfloat16}, microbatches=_IN_CHUNKS),
    "head-in-chunks-bfloat16-narrow": Case("llama", "full", {"dtype": torch.bfloat16}, microbatches=_IN_CHUNKS,
                                           float16_accumulation=True),
    "evaluation": Case("llama", "lora", _REFERENCE, steps=evaluate),
    "preference": Case("llama", "lora", microbatches=pairs()),
}  # fmt: skip
