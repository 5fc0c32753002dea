"""New tokens (`add_tokens`): their rows trained as PEFT and plain PyTorch train them, saved, merged, read by others.

The tiny models have 300 rows and a tokenizer of 259 entries: 41 tokens take padding rows, with more the tables grow.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_cli.costs.analytic import trainable_params
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.new_tokens import grow_tables
from roundpipe_cli.planning.question import ask
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.batches import make_microbatches, make_sampler
from roundpipe_cli.train.build import make_engine, make_planner
from roundpipe_cli.train.prepare.ready import Setup
from tests.support.e2e import STAGES_OF_TWO, Outcome, finetune, make_model, make_workspace, run
from tests.support.tiny import tiny_config
from tests.train.test_training_options import setup_of

KNOWN, ROWS, GROWN = 259, 300, 304
WORDS = [f"<w{number}>" for number in range(GROWN - KNOWN)]
TEXT = "Say <w1> 1:<w44>"


def workspace(folder: Path, model: Path, words: list[str] = WORDS, **changes: Any) -> Path:
    made = make_workspace(folder, model, add_tokens=words, lora__dropout=0.0, **STAGES_OF_TWO, **changes)
    rows = [{"prompt": f"Say <w{n}> {n}: ", "completion": f"{n}<w{n + 3}> is said<w{n}>"} for n in range(10)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.fixture(scope="module", params=["untied", "tied"])
def trained(request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder of a finished run whose tables grew, what it printed)."""
    changes = {"val_set_size": 2, "max_steps": 4, "num_train_epochs": 1, "max_grad_norm": 0.5}
    folder = workspace(tmp_path_factory.mktemp("trained") / "work", models[request.param], **changes)
    return folder, finetune(folder).expect(0)


ONE_OF_THEM = pytest.mark.parametrize(
    "trained", ["untied", pytest.param("tied", marks=pytest.mark.sweep)], indirect=True
)


def base_with_rows(folder: Path, words: list[str]) -> tuple[Any, list[int]]:
    """The base as transformers and a user make it ready: tables grown, new rows the mean of the known ones."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids = list(range(KNOWN, KNOWN + len(words)))
    model.resize_token_embeddings(max(ROWS, ids[-1] + 1), mean_resizing=False)
    with torch.no_grad():
        for end in {id(one.weight): one for one in (model.get_input_embeddings(), model.get_output_embeddings())}:
            table = next(p for p in model.parameters() if id(p) == end)
            table[ids] = table[:KNOWN].double().mean(0).float()
    return model, ids


def one_step(setup: Setup) -> tuple[list[Any], float]:
    """The microbatches of a step, and its loss; gradients are in the store."""
    microbatches, _ = make_microbatches(setup, make_sampler(setup).next_step())
    with make_engine(setup) as engine:
        result = engine.run_step(microbatches, make_planner(setup).schedule(len(microbatches)), step=0)
    return microbatches, result.loss


def plain_step(model: nn.Module, microbatches: list[Any]) -> float:
    targets = sum(int((m.labels[:, 1:] != -100).sum()) for m in microbatches)
    total = 0.0
    for one in microbatches:
        logits = model(input_ids=one.input_ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, one.labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
        (loss / targets).backward()
        total += float(loss.detach()) / targets
    return total


@pytest.mark.parametrize(
    ("kind", "method", "words"),
    [
        pytest.param("untied", "lora", WORDS, id="untied-lora-grown"),
        pytest.param("tied", "lora", WORDS[:20], id="tied-lora-padding"),
        pytest.param("untied", "full", WORDS[:20], id="untied-full-padding"),
        pytest.param("tied", "full", WORDS, id="tied-full-grown"),
    ],
)
def test_loss_and_gradients_are_those_of_the_libraries(
    kind: str, method: str, words: list[str], tmp_path: Path, models: dict[str, Path]
) -> None:
    from peft import LoraConfig, get_peft_model

    folder = workspace(tmp_path / "work", models[kind], words)
    keys = [f"method={method}", "lora.target_modules=[q_proj, down_proj]"]
    setup = setup_of(folder, *keys)
    config: Any = setup.model.config
    assert config.vocab_size == max(ROWS, KNOWN + len(words)), "a padded vocabulary is kept"
    model, ids = base_with_rows(folder, words)
    whole: Any = model
    if setup.peft_model is not None:
        tables = {"embed_tokens": ids} if kind == "tied" else {"embed_tokens": ids, "lm_head": ids}
        settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", trainable_token_indices=tables, **settings))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert named.keys() == setup.store.trainable_names
    with torch.no_grad():
        for name, parameter in named.items():
            if ".lora_" in name:
                parameter.copy_(setup.store.master(name))
            torch.testing.assert_close(parameter, setup.store.master(name), rtol=1e-6, atol=1e-8)
    microbatches, loss = one_step(setup)
    assert loss == pytest.approx(plain_step(whole, microbatches), rel=1e-6)
    for name, parameter in named.items():
        expected = parameter.grad
        assert expected is not None
        difference = (setup.store.gradient(name) - expected).norm()
        assert difference <= 1e-5 * expected.norm() + 1e-9, name
    rows = [name for name in named if "trainable_tokens_delta" in name]
    assert len(rows) == (0 if method == "full" else 2 if kind == "untied" else 1)
    assert all(setup.store.gradient(name).any(1).all() for name in rows[-1:]), "each row learns, by the head"
    plan = ask(load_recipe(str(folder / "recipe.yaml"), keys), "1x4090")
    counted = trainable_params(plan.architecture, plan.settings)
    padding = (ROWS + len(words) - config.vocab_size) * config.hidden_size * (2 if kind == "untied" else 1)
    expected_count = sum(parameter.numel() for parameter in named.values()) + (padding if method == "full" else 0)
    assert sum(counted) == expected_count, "as many are planned for; new tokens as if no padding row were left"


def logits_of(model: Any, folder: Path) -> torch.Tensor:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    assert [number for number in ids if number >= KNOWN] == [KNOWN + 1, KNOWN + 44], "one token each"
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.tensor([ids])).logits
    return logits


def test_peft_transformers_and_gguf_readers_compute_the_same(trained: tuple[Path, Outcome]) -> None:
    """PEFT reads the adapter as its card says, transformers the merged model and its GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, done = trained
    assert "never contain <w13>, <w14>, <w15>, <w16>, <w17> and 27 more: nothing is learned" in done.err
    run(folder, "export", "out", "--merge", "--to", "merged", "--gguf", "f32").expect(0)
    card = re.search(r"```python\n(.*?)```", (folder / "out" / "README.md").read_text(), re.S)
    assert card is not None
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "out")
        exec(card[1].replace('"bfloat16"', '"float32"'), found)  # noqa: S102
    with_adapter = logits_of(found["model"], folder / "out")
    assert with_adapter.shape[-1] == GROWN
    for how in ({}, {"gguf_file": "model.gguf"}):
        model: Any = AutoModelForCausalLM.from_pretrained(folder / "merged", **how)
        assert model.config.vocab_size == GROWN
        torch.testing.assert_close(logits_of(model, folder / "merged"), with_adapter, rtol=1e-5, atol=1e-5)
        assert model.config.tie_word_embeddings == (
            "untied" not in str(folder) and found["base"].config.tie_word_embeddings
        )
    tokens = AutoTokenizer.from_pretrained(folder / "merged", gguf_file="model.gguf")
    assert tokens("<w44>")["input_ids"] == [KNOWN + 44]
    answer = run(folder, "generate", "out", "Say <w1>", "--max-new-tokens", "2", "--json").expect(0)
    assert json.loads(answer.out)["tokens"] > 0
    losses = [json.loads(line)["loss"] for line in (folder / "out" / "eval.jsonl").read_text().splitlines()]
    setup = setup_of(folder, "val_set_size=2", output="again")
    total, count = 0.0, 0
    for row in setup.eval_rows:
        ids, labels = (torch.tensor(values[None].copy()).long() for values in (row.input_ids, row.labels))
        with torch.no_grad():
            logits = found["model"](ids).logits[0, :-1]
        total += float(nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum"))
        count += int((labels[0, 1:] != -100).sum())
    assert losses[-1] == pytest.approx(total / count, rel=1e-5), "the run's own evaluation"


@ONE_OF_THEM
def test_a_checkpoint_is_resumed_to_the_bit_and_exported(trained: tuple[Path, Outcome]) -> None:
    folder, _ = trained
    run(folder, "export", "out/step-00000002", "--merge", "--to", "early").expect(0)
    assert json.loads((folder / "early" / "config.json").read_text())["vocab_size"] == GROWN
    finetune(folder, "resume_from_checkpoint=out/step-00000002", "output_dir=resumed").expect(0)
    first, second = ((folder / name / "adapter_model.safetensors").read_bytes() for name in ("out", "resumed"))
    assert first == second


@ONE_OF_THEM
def test_an_adapter_with_such_rows_is_trained_further(trained: tuple[Path, Outcome]) -> None:
    """It starts where PEFT would; a recipe with other tokens is refused."""
    from peft import PeftModel

    folder, _ = trained
    start = ["lora.r=16", "lora.alpha=32", f"lora.start_from={folder / 'out'}"]
    setup = setup_of(folder, *start, output="further")
    model, _ = base_with_rows(folder, WORDS)
    whole = PeftModel.from_pretrained(model, str(folder / "out"), is_trainable=True)
    microbatches, loss = one_step(setup)
    assert loss == pytest.approx(plain_step(whole, microbatches), rel=1e-6)
    for other, found in (("[]", "0 tokens: none"), ("[<w1>]", "1 tokens: <w1>")):
        told = f"was trained with other new tokens\n  found: {found}\n  expected: {len(WORDS)} tokens, as in {folder}"
        with pytest.raises(RefusedError, match=told):
            setup_of(folder, *start, f"add_tokens={other}", output="further")


def test_a_piece_of_words_is_no_new_token(tmp_path: Path, models: dict[str, Path]) -> None:
    folder = workspace(tmp_path / "work", models["untied"])
    with pytest.raises(RefusedError, match="makes words of this piece already"):
        setup_of(folder, "add_tokens=[<w1>, a]")


def test_rows_that_would_not_be_trained_are_refused(tmp_path: Path, models: dict[str, Path]) -> None:
    folder = workspace(tmp_path / "work", models["untied"])
    with pytest.raises(RefusedError, match="would never be trained"):
        setup_of(folder, "method=full", "frozen_parameters=[lm_head]")
    setup = setup_of(folder, "lora.modules_to_save=[lm_head]", "load_in_4bit=true")
    assert setup.peft_model.peft_config["default"].trainable_token_indices.keys() == {"embed_tokens"}
    assert one_step(setup)[1] > 0
    with_bias = workspace(tmp_path / "phi", make_model(tmp_path / "tiny", "phi", num_hidden_layers=2))
    with pytest.raises(RefusedError, match="single rows of an LM head with a bias"):
        setup_of(with_bias)
    setup_of(with_bias, "method=full")


def test_tables_do_not_grow_to_any_token() -> None:
    """A file of a few bytes would ask for gigabytes."""
    model: Any = build_skeleton(tiny_config("llama"), torch.float32)
    with pytest.raises(RefusedError, match="cannot grow to these tokens"):
        grow_tables(model, [10**6], "adapter_config.json")
    grow_tables(model, [1, 2, 130])
    assert len(model.get_output_embeddings().weight) == 131
