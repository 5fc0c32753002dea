"""Feed-forward parts in chunks of tokens: plain PyTorch's losses and gradients, fewer live bytes, on any cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.engine.probe import find_unread_products
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.worker_model import WorkerOptions
from roundpipe_cli.schedule.actions import Schedule
from tests.engine.test_parity import check_gradients, set_weights
from tests.support.e2e import finetune, make_model, make_workspace, metrics
from tests.support.tiny import Rig, make_rig, plain_copy, plain_step, random_microbatches, schedule_for

CHUNK = 5
SIZES = [(2, 9), (1, 7), (2, 5)]
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-lora": ("llama", "lora", {}),
    "llama-full": ("llama", "full", {}),
    "qwen3_moe-lora": ("qwen3_moe", "lora", {}),
    "qwen3_moe-full": ("qwen3_moe", "full", {}),
    "gpt_oss-lora": ("gpt_oss", "lora", {}),  # its experts return a tuple
    "mixtral-full": ("mixtral", "full", {}),
    "glm4_moe-lora": ("glm4_moe", "lora", {}),
    "gemma2-lora": ("gemma2", "lora", {}),  # a norm reads what the feed-forward part returns
    "phi-full": ("phi", "full", {}),  # attention and feed-forward part side by side
    "gpt2-full": ("gpt2", "full", {}),
}
WHOLLY_UNREAD = ("llama", "qwen3_moe", "gpt_oss", "mixtral", "glm4_moe", "phi", "gpt2")


def coarse(rig: Rig, num_workers: int) -> Schedule:
    last = rig.num_layers - 1
    return schedule_for(rig, num_workers, len(SIZES), backward=[(last, last), (2, last - 1), (0, 1)])


def unread_of(rig: Rig) -> dict[int, tuple[str, ...]]:
    return find_unread_products(rig.skeleton, rig.split, rig.store, WorkerOptions(CHUNK))


WITHIN_OTHERS = ("llama-full", "qwen3_moe-full")
"""The same parts as `llama-lora` and `qwen3_moe-lora`; full training has three others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] if name in WITHIN_OTHERS else []) for name in sorted(CASES)]
)
def test_agrees_with_plain_pytorch(name: str) -> None:
    model_type, method, changes = CASES[name]
    rig = make_rig(model_type, method, **changes)
    plain = plain_copy(rig.skeleton, rig.store)
    set_weights(plain, rig.store)
    unread = unread_of(rig)
    microbatches = random_microbatches(SIZES)
    loss = plain_step(rig, microbatches, 0, None, plain)
    for options in ({"unread": unread, "keep_inputs": True}, {"unread": unread, "recompute": "layer"}):
        with rig.engine(2, copy=True, mlp_chunk_tokens=CHUNK, **options) as engine:
            result = engine.run_step(microbatches, coarse(rig, 2), step=0)
        assert abs(result.loss - loss) <= 1e-6 * abs(loss)
        check_gradients(plain, rig.store)


@pytest.mark.parametrize("model_type", ["gemma2", *WHOLLY_UNREAD])
def test_what_a_recompute_leaves_out(model_type: str) -> None:
    rig = make_rig(model_type, "lora")
    has_it = {index for index, names in unread_of(rig).items() if "mlp" in names}
    assert has_it == (set(range(rig.split.num_blocks)) if model_type in WHOLLY_UNREAD else set())


def bits(rig: Rig, num_workers: int, **options: Any) -> tuple[object, ...]:
    with rig.engine(num_workers, seed=3, mlp_chunk_tokens=CHUNK, **options) as engine:
        result = engine.run_step(random_microbatches(SIZES), coarse(rig, num_workers), step=0)
    return result.loss.hex(), result.gradient_norm.hex(), tuple(g.numpy().tobytes() for g in rig.store.gradients)


@pytest.mark.parametrize("model_type", ["llama", pytest.param("gemma2", marks=pytest.mark.sweep)])
def test_the_same_bits_whatever_is_recomputed_with_dropout(model_type: str) -> None:
    rig = make_rig(model_type, "lora", attention_dropout=0.1, lora_dropout=0.2)
    unread = unread_of(rig)
    expected = bits(rig, 1)
    assert bits(rig, 1, unread=unread) == expected
    assert bits(rig, 2, unread=unread, keep_inputs=True, copy=True) == expected
    assert bits(rig, 2, recompute="layer", copy=True) == expected
    assert bits(rig, 1, keep_blocks=2, copy=True) == expected
    whole = make_rig(model_type, "lora", attention_dropout=0.1, lora_dropout=0.0)
    assert bits(whole, 1)[0] != expected[0], "the adapters' dropout should be on"


def test_four_bit_weights() -> None:
    rig = make_rig("llama", "lora", packed_as="4bit")
    plain = plain_copy(rig.skeleton, rig.store)
    microbatches = random_microbatches(SIZES)
    loss = plain_step(rig, microbatches, 0, None, plain)
    with rig.engine(2, copy=True, mlp_chunk_tokens=CHUNK) as engine:
        result = engine.run_step(microbatches, coarse(rig, 2), step=0)
    assert abs(result.loss - loss) <= 1e-6 * abs(loss)
    check_gradients(plain, rig.store)


def test_live_bytes_fall() -> None:
    """Width 1,024 at hidden size 32: nearly all activations are the feed-forward part's."""
    rig = make_rig("llama", "lora", hidden_size=32, intermediate_size=1024, num_hidden_layers=2)
    microbatches = random_microbatches([(1, 64)] * 2)
    schedule = schedule_for(rig, 1, 2)
    peaks = []
    for chunk in (None, 8):
        with rig.engine(1, copy=True, count_bytes=True, mlp_chunk_tokens=chunk) as engine:
            peaks.append(max(engine.run_step(microbatches, schedule, step=0).device_peak_bytes))
    saved = 2 * 64 * 1024 * 4  # gate and up alone, of all tokens
    assert peaks[1] < peaks[0] - saved


@pytest.mark.parametrize(("model_type", "words"), [("opt", "no feed-forward module"), ("bloom", "more than hidden")])
def test_a_model_without_such_a_part_is_refused(model_type: str, words: str) -> None:
    rig = make_rig(model_type, "lora")
    with pytest.raises(RefusedError, match="chunks of tokens") as caught:
        unread_of(rig)
    problem = caught.value.problems[0]
    assert problem.where == "mlp_chunk_tokens" and words in (problem.found or "")


def test_a_part_that_mixes_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig("llama", "lora")
    kind = type(rig.skeleton.get_submodule(rig.split.blocks_path)[0].mlp)
    whole = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: whole(self, x) + x.mean(1, keepdim=True))
    with pytest.raises(RefusedError) as caught:
        unread_of(rig)
    assert "another result for a part of the tokens" in (caught.value.problems[0].found or "")


def test_a_short_call_is_an_ordinary_one() -> None:
    rig = make_rig("llama", "lora")

    def gradients(chunk: int | None) -> list[bytes]:
        with rig.engine(1, mlp_chunk_tokens=chunk) as engine:
            engine.run_step(random_microbatches(SIZES), coarse(rig, 1), step=0)
        return [gradient.numpy().tobytes() for gradient in rig.store.gradients]

    assert gradients(18) == gradients(None)


def test_a_run(tmp_path: Path) -> None:
    """Through the command line: the losses of a run without, and a model that cannot is refused before training."""
    model = make_model(tmp_path / "model", num_hidden_layers=2)
    work = make_workspace(tmp_path / "work", model, lora__dropout=0.0)
    for words in (["output_dir=whole"], ["output_dir=chunks", "mlp_chunk_tokens=4"]):
        finetune(work, *words).expect(0)
    losses = [[row["loss"] for row in metrics(work / name)] for name in ("whole", "chunks")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1] != losses[0], "some rows should be longer than a chunk"
    other = make_workspace(tmp_path / "other", make_model(tmp_path / "opt", "opt", ffn_dim=64, word_embed_proj_dim=32))
    refused = finetune(other, "mlp_chunk_tokens=4").expect(2)
    assert "remove mlp_chunk_tokens" in refused.err
