"""Optimizers, schedules, kinds of adapters and regularisers against plain PyTorch, PEFT and transformers.

The reference is the model as transformers loads it, with PEFT's own adapter, trained by the library's own optimizer
and schedule. All it takes from the run are the random A matrices; every other start has to agree by itself.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from roundpipe_cli.costs.memory import moment_bytes_per_param
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Event, Tell
from roundpipe_cli.model.dropout import embedding_noise, layer_seed
from roundpipe_cli.model.stored.packed_weights import import_bitsandbytes
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.schema import RATE_SCHEDULES, Recipe
from roundpipe_cli.train.batches import make_microbatches, make_sampler
from roundpipe_cli.train.loop import Trainer
from roundpipe_cli.train.optim import optimizer
from roundpipe_cli.train.optim.optimizer import Adafactor, AdamW, AdamW8, AdamW16, HostOptimizer, Sgd, UpdateRule
from roundpipe_cli.train.prepare.learning_rate import describe_schedule, rate_schedule_of
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prepare
from roundpipe_cli.train.signals import Reporting, StopSignals
from tests.support.adapters import random_adapter
from tests.support.e2e import make_model, make_tokenizer, make_workspace, metrics
from tests.support.tiny import make_rig
from tests.train.test_export_adapters import adapter_of_experts
from tests.train.test_optimizer import run

bitsandbytes: Any = import_bitsandbytes()

NUM_STEPS = 4
RATE = 5e-3
Optimizer = Callable[[Any, Sequence[nn.Parameter]], torch.optim.Optimizer]


def adamw(model: Any, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)


def lora_plus(model: Any, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    from peft.optimizers import create_loraplus_optimizer

    return create_loraplus_optimizer(model, torch.optim.AdamW, lr=RATE, loraplus_lr_ratio=8, weight_decay=0.0)


def lora_plus_decayed(model: Any, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """PEFT's rates and transformers' weight decay: PEFT's own decays RMS norms, whose class it does not know."""
    rate_of = {
        parameter: group["lr"] for group in lora_plus(model, parameters).param_groups for parameter in group["params"]
    }
    groups = decayed(model, parameters)
    return torch.optim.AdamW(
        [{**group, "params": [one], "lr": rate_of[one]} for group in groups for one in group["params"]]
    )


def transformers_adafactor(model: Any, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers import Adafactor as Theirs

    return Theirs(decayed(model, parameters), lr=RATE, scale_parameter=False, relative_step=False)


def decayed(model: Any, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Groups with the weight decay of these tests, and without, as transformers makes them."""
    import transformers

    names = set(transformers.Trainer.get_decay_parameter_names(None, model))
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: dict[float, list[nn.Parameter]] = {0.1: [], 0.0: []}
    for parameter in parameters:
        groups[0.1 if name_of[id(parameter)] in names else 0.0].append(parameter)
    return [{"params": group, "weight_decay": decay} for decay, group in groups.items() if group]


@dataclass(frozen=True)
class Case:
    """Keys of the recipe, and the same in the libraries' words."""

    overrides: list[str]
    optimizer: Optimizer = adamw
    lora: dict[str, Any] | None = None
    """PEFT's settings; None: full fine-tuning."""
    schedule: tuple[str, dict[str, Any]] = ("constant_with_warmup", {})
    frozen: tuple[str, ...] = ()
    smoothing: float = 0.0
    noise: float = 0.0
    learnt: float = 0.01
    """The loss falls at least by this."""
    model: str = "untied"
    max_norm: float = 0.5


CASES = {
    "adamw-betas frozen smoothing cosine-min-lr": Case(
        [
            *("method=full", "adam_beta1=0.8", "adam_beta2=0.95", "adam_epsilon=1e-6", "weight_decay=0.1"),
            *("frozen_parameters=[embed_tokens, 'layers[.]0[.]', norm]", "label_smoothing_factor=0.1"),
            *("lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs={min_lr_rate: 0.3}"),
        ],
        lambda m, p: torch.optim.AdamW(decayed(m, p), lr=RATE, betas=(0.8, 0.95), eps=1e-6),
        frozen=("embed_tokens", "layers.0.", "norm"),
        smoothing=0.1,
        schedule=("cosine_with_min_lr", {"min_lr_rate": 0.3}),
    ),
    "sgd-momentum stable-decay": Case(
        [
            *("method=full", "optim=sgd", "sgd_momentum=0.9", "weight_decay=0.1", "max_grad_norm=4.61"),
            *("lr_scheduler_type=warmup_stable_decay", "lr_scheduler_kwargs={num_decay_steps: 2, decay_type: linear}"),
        ],
        lambda m, p: torch.optim.SGD(decayed(m, p), RATE, momentum=0.9),
        schedule=("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "linear"}),
        max_norm=4.61,  # between the norms of the steps: some are clipped, others stay as they are
    ),
    "adafactor": Case(["method=full", "optim=adafactor", "weight_decay=0.1"], transformers_adafactor),
    "adafactor-lora neftune": Case(
        ["optim=adafactor", "weight_decay=0.1", "neftune_noise_alpha=5"], transformers_adafactor, {}, noise=5.0
    ),
    "adamw-8bit": Case(
        ["method=full", "optim=adamw_8bit", "weight_decay=0.1"],
        lambda m, p: bitsandbytes.optim.AdamW8bit(decayed(m, p), lr=RATE),
    ),
    "lora-plus rslora": Case(["lora.loraplus_lr_ratio=8", "lora.use_rslora=true"], lora_plus, {"use_rslora": True}),
    "lora-plus decay modules-to-save": Case(
        [
            *("lora.loraplus_lr_ratio=8", "weight_decay=0.1", "lora.target_modules=[q_proj]"),
            "lora.modules_to_save=[v_proj, input_layernorm]",
        ],
        lora_plus_decayed,
        {"target_modules": ["q_proj"], "modules_to_save": ["v_proj", "input_layernorm"]},
        model="biased",
    ),
    "dora": Case(["lora.use_dora=true"], lora={"use_dora": True}),
    "targets": Case(
        [r"lora.target_modules='.*layers\.1\.self_attn\.(q|v|w)_proj'", "learning_rate=0.02"],
        lambda m, p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.0),
        lora={"target_modules": r".*layers\.1\.self_attn\.(q|v)_proj"},
    ),
    "modules-to-save": Case(
        ["lora.modules_to_save=[embed_tokens, lm_head, input_layernorm, norm]"],
        lora={"modules_to_save": ["embed_tokens", "lm_head", "input_layernorm", "norm"]},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    biased = make_model(folder / "biased", num_hidden_layers=2, attention_bias=True)
    weights = load_file(biased / "model.safetensors")
    for name in [name for name in weights if name.endswith("v_proj.bias")]:
        weights[name].fill_(0.5)  # so that decay is seen
    save_file(weights, biased / "model.safetensors", {"format": "pt"})
    return {
        "biased": biased,
        "untied": make_model(folder / "untied", num_hidden_layers=2),
        "tied": make_model(folder / "tied", num_hidden_layers=2, tie_word_embeddings=True),
        "experts": make_model(folder / "experts", "qwen3_moe", num_hidden_layers=2),
    }


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    return make_workspace(tmp_path / "work", models["untied"])


COMMON = [
    *(f"max_steps={NUM_STEPS}", "save_steps=100", "warmup_steps=1", "lr_scheduler_type=constant"),
    *(f"learning_rate={RATE}", "lora.dropout=0", "max_grad_norm=0.5"),
]


def setup_of(folder: Path, *overrides: str, output: str = "out", tell: Tell = lambda event: None) -> Setup:
    loaded = load_recipe(str(folder / "recipe.yaml"), [f"output_dir={folder / output}", *COMMON, *overrides])
    return prepare(loaded, offline=True, tell=tell)


def train(setup: Setup, output: Path) -> None:
    output.mkdir(exist_ok=True)
    run(Trainer(setup, output, StopSignals(), Reporting(lambda event: None)))


def plain_model(folder: Path, case: Case, adapter: Path | None = None) -> tuple[Any, Any]:
    """(the causal model, PEFT's around it or the same) as the libraries make them."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if adapter is not None:
            return model, PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
        if case.lora is not None:
            config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **case.lora}
            return model, get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(word in name for word in case.frozen))
    return model, model


def plain_run(setup: Setup, model: Any, whole: Any, case: Case) -> list[float]:
    """Losses of the same batches, the libraries' own optimizer and schedule, clipping by torch."""
    from transformers import get_scheduler

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = case.optimizer(whole, parameters)
    kind, settings = case.schedule
    scheduler = get_scheduler(kind, optimizer, 1, NUM_STEPS, settings)
    sampler, losses = make_sampler(setup), []
    model.train()
    for step in range(NUM_STEPS):
        microbatches, _ = make_microbatches(setup, sampler.next_step())
        num_targets = sum(int((m.labels[:, 1:] != -100).sum()) for m in microbatches)
        total = 0.0
        for index, microbatch in enumerate(microbatches):
            seed = layer_seed(setup.recipe.seed, step, index, 0)
            noise = lambda module, args, output: output + embedding_noise(output, case.noise, seed)  # noqa: E731, B023
            handle = model.get_input_embeddings().register_forward_hook(noise) if case.noise else None
            logits = model(input_ids=microbatch.input_ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            if handle is not None:
                handle.remove()
            labels = microbatch.labels[:, 1:].flatten()  # -100 is left out
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=case.smoothing)
            (loss / num_targets).backward()
            total += float(loss.detach()) / num_targets
        losses.append(total)
        nn.utils.clip_grad_norm_(parameters, case.max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


def compare(folder: Path, case: Case, setup: Setup, adapter: Path | None = None) -> None:
    model, whole = plain_model(folder, case, adapter)
    named = dict(model.named_parameters())
    assert {name for name, p in named.items() if p.requires_grad} == setup.store.trainable_names
    with torch.no_grad():
        for name in setup.store.trainable_names:
            if ".lora_A." in name and adapter is None:
                named[name].copy_(setup.store.master(name))
            torch.testing.assert_close(named[name].detach(), setup.store.master(name), rtol=1e-6, atol=1e-7)
    expected = plain_run(setup, model, whole, case)
    train(setup, folder / "out")
    losses = [row["loss"] for row in metrics(folder / "out")]
    assert losses == pytest.approx(expected, rel=2e-6)
    assert min(losses[1:]) < losses[0] - case.learnt, "nothing was learnt, so nothing was compared"
    for name in setup.store.trainable_names:
        plain, ours = named[name].detach(), setup.store.master(name)
        if "optim=adamw_8bit" not in case.overrides:
            torch.testing.assert_close(plain, ours, rtol=1e-3, atol=2e-4, msg=name)
            continue
        # The last bit of a gradient decides how a moment between two 8-bit codes is rounded, and so the processor does:
        # about a tenth of an update, in few elements.
        torch.testing.assert_close(plain, ours, rtol=1e-3, atol=RATE / 5, msg=name)
        assert ((plain - ours).abs() > 2e-4).float().mean() < 1e-3, name


@pytest.mark.parametrize("name", sorted(CASES))
def test_equal_to_the_libraries(name: str, tmp_path: Path, models: dict[str, Path]) -> None:
    case, told = CASES[name], list[Event]()
    folder = make_workspace(tmp_path / "work", models[case.model])
    compare(folder, case, setup_of(folder, *case.overrides, tell=told.append))
    assert any("w in the pattern matches no module" in str(event) for event in told) is (name == "targets")


def test_an_adapter_is_trained_further(folder: Path) -> None:
    keys = ["lora.use_dora=true", "lora.modules_to_save=[lm_head]"]
    train(setup_of(folder, *keys, output="first"), folder / "first")
    setup = setup_of(folder, *_start(folder))
    assert setup.recipe.lora.r == 16 and setup.peft_model.peft_config["default"].r == 4
    compare(folder, Case([]), setup, folder / "first")


def test_dropout_and_another_scale_reach_an_adapter_that_is_trained_further(folder: Path) -> None:
    """Story: the proof of an adapter whose alpha was changed in place was that of before."""
    random_adapter(folder / "model", folder / "first")
    path = folder / "first" / "adapter_config.json"
    config = json.loads(path.read_text())
    told: list[Event] = []
    for alpha in (7.25, 9.75):  # of no other test
        path.write_text(json.dumps({**config, "lora_alpha": alpha}))
        setup = setup_of(folder, *_start(folder), "lora.dropout=0.5", tell=told.append)
    assert "p=0.5" in str(setup.model) and sum("backward: 1 of 1" in str(event) for event in told) == 2


@pytest.mark.parametrize(("init", "deviation"), [("default", (3 * 64) ** -0.5), ("gaussian", 1 / 4)])
def test_how_an_adapter_starts(init: str, deviation: float, folder: Path) -> None:
    """As PEFT draws it: with 1 / r, or with Kaiming's bound of sqrt(6 / ((1 + 5) * 64))."""
    store = setup_of(folder, "lora.r=4", f"lora.init={init}").store
    drawn = [name for name in store.trainable_names if "lora_A" in name and "down_proj" not in name]
    values = torch.cat([store.master(name).flatten() for name in drawn])
    assert float(values.std()) == pytest.approx(deviation, rel=0.05) and abs(float(values.mean())) < 0.02
    assert not any(store.master(name).any() for name in store.trainable_names if "lora_B" in name)


def _start(folder: Path) -> list[str]:
    """Rank and alpha at their defaults: they say nothing."""
    return ["lora.r=16", "lora.alpha=32", f"lora.start_from={folder / 'first'}"]


def test_another_shape_than_the_adapters_is_refused(folder: Path) -> None:
    random_adapter(folder / "model", folder / "first")
    for key, value in {"r": "8", "use_dora": "true", "target_modules": "[k_proj]"}.items():
        with pytest.raises(RefusedError, match="another shape") as raised:
            setup_of(folder, *_start(folder), f"lora.{key}={value}")
        assert raised.value.problems[0].where == f"lora.{key}"
    with pytest.raises(RefusedError, match="no adapter there"):
        setup_of(folder, "lora.start_from=nowhere")
    assert setup_of(folder, "lora.start_from=nowhere", "method=full").peft_model is None


def test_packed_rows_need_masks_where_kernels_are_switched_off(folder: Path) -> None:
    words = ["packing=true", "max_seq_length=32768", "micro_batch_size=1", "gradient_accumulation_steps=1"]
    assert setup_of(folder, *words).attends_in_rows
    with pytest.raises(RefusedError, match="need attention masks that are too large"):
        setup_of(folder, *words, "kernels=reference").attends_in_rows  # noqa: B018


@pytest.mark.parametrize(
    ("model", "key", "texts"),
    [
        ("tied", "lora.modules_to_save=[lm_head]", ["are one table, which cannot be trained"]),
        ("untied", "lora.modules_to_save=[lm_hed]", ["no such module to train", "lm_hed", "did you mean lm_head?"]),
        ("experts", "lora.use_dora=true", ["DoRA cannot adapt this model"]),
        ("untied", "lora.target_modules=[lm_head]", ["outside the model's blocks"]),
        ("untied", "lora.target_modules=[q_prj, v_prj, o_proj]", ["q_prj, v_prj", "did you mean q_proj, v_proj?"]),
        ("untied", "lora.target_modules=q_proj", ["lora.target_modules=[q_proj]"]),
        ("untied", "lora.target_modules='('", ["unterminated", "lora.target_modules=all-linear"]),
        ("experts", "lora.target_modules=[q_proj, w1]", ["w1", "lora.target_modules=all-linear"]),
        ("experts", "lora.target_modules=[q_proj, gate]", ["gate", "leave it out"]),  # a router is never adapted
        ("untied", "frozen_parameters=[nothing]", ["no parameter has such a name"]),
        ("untied", "frozen_parameters=[model, head]", ["nothing is left to train"]),
    ],
)
def test_what_cannot_be_trained_is_refused(
    model: str, key: str, texts: list[str], tmp_path: Path, models: dict[str, Path]
) -> None:
    """Story: `[v_prj, q_proj]` trained q_proj alone, with exit code 0."""
    folder = make_workspace(tmp_path / "work", models[model])
    with pytest.raises(RefusedError) as raised:
        setup_of(folder, *(["method=full"] if "frozen" in key else []), key)
    assert raised.value.problems[0].where == key.partition("=")[0]
    assert all(text in str(raised.value) for text in texts), raised.value


def test_names_of_fused_experts_are_there(tmp_path: Path, models: dict[str, Path]) -> None:
    """PEFT finds what they name in the experts' parameters."""
    folder = make_workspace(tmp_path / "work", models["experts"])
    setup = setup_of(folder, "lora.target_modules=[q_proj, gate_proj, up_proj, down_proj]")
    assert sum(".experts." in name for name in setup.store.trainable_names) == 2 * 2 * 2


def test_a_name_that_a_continued_adapter_has_no_weights_for_is_refused(folder: Path) -> None:
    random_adapter(folder / "model", folder / "first", target_modules=["q_proj", "v_proj"])
    path = folder / "first" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "target_modules": ["q_proj", "v_proj", "c_attn"]}))
    with pytest.raises(RefusedError) as raised:
        setup_of(folder, *_start(folder))
    (problem,) = raised.value.problems
    assert (problem.where, problem.found) == (f"{path}: target_modules", "c_attn")
    assert "delete it there" in str(problem.hint)


def check_rates(name: Any, settings: dict[str, Any], num_steps: int, *, warmup: float = 3) -> None:
    """Look at every step of a schedule with a peak of 1."""
    keys: dict[str, Any] = {"lr_scheduler_type": name, "lr_scheduler_kwargs": settings, "warmup_steps": warmup}
    rate_schedule_of(Recipe(model="m", datasets=(), output_dir="o", learning_rate=1.0, **keys), num_steps)


@pytest.mark.parametrize(
    ("name", "settings", "found"),
    [
        ("warmup_stable_decay", {"num_decay_steps": 5, "num_stable_steps": 9, "min_lr_ratio": -0.1}, "-0.1 at step 18"),
        ("polynomial", {"lr_end": -0.5}, "-0.0"),
        ("inverse_sqrt", {"timescale": 0}, "division"),
        ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "sideways"}, "sideways"),
    ],
)
def test_every_step_of_a_schedule_is_in_bounds(name: str, settings: dict[str, Any], found: str) -> None:
    """Only the last step was looked at, and not its value: such a run trained uphill, or far too fast, in silence."""
    with pytest.raises(RefusedError) as raised:
        check_rates(name, settings, 100)
    (problem,) = raised.value.problems
    assert raised.value.exit_code == 2 and problem.where == "lr_scheduler_kwargs"
    assert re.search("does not take these settings|gives a learning rate that is out of bounds", problem.what)
    assert found in str(problem.found) and str(settings) in str(problem.found)
    with pytest.raises(RefusedError, match="at step"):  # a spike in a very long run
        check_rates("warmup_stable_decay", {"num_decay_steps": 3, "min_lr_ratio": 1.5}, 7_654_321, warmup=0)


@pytest.mark.parametrize(
    ("name", "settings", "after_warmup"),
    [
        ("constant", {}, lambda left: 1.0),
        ("linear", {}, lambda left: left),
        ("cosine", {}, lambda left: (1 - math.cos(math.pi * left)) / 2),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, lambda left: 0.1 + 0.9 * (1 - math.cos(math.pi * left)) / 2),
    ],
)
def test_rates_are_those_of_the_formulas(name: str, settings: Any, after_warmup: Callable[[float], float]) -> None:
    """After a fifth of twelve steps, rounded up."""
    keys: dict[str, Any] = {"lr_scheduler_type": name, "lr_scheduler_kwargs": settings, "learning_rate": 0.5}
    rate = rate_schedule_of(Recipe(model="m", datasets=(), output_dir="o", warmup_steps=0.2, **keys), 12)
    rates = [0.5 * (step / 3 if step < 3 else after_warmup((12 - step) / 9)) for step in range(12)]
    assert [rate(step) for step in range(12)] == pytest.approx(rates)


@pytest.mark.parametrize("num_steps", [1, 100, 3_000_000])
@pytest.mark.parametrize("name", RATE_SCHEDULES)
def test_schedules_with_usual_settings_stay_in_bounds(name: str, num_steps: int) -> None:
    """Of any length, warmup as long as the run included."""
    settings = {"cosine_with_min_lr": {"min_lr_rate": 1.0}, "warmup_stable_decay": {"num_decay_steps": 20}}
    for warmup in (0, 3, 0.5):
        if num_steps <= 100 or warmup == 3:
            check_rates(name, settings.get(name, {}), num_steps, warmup=warmup)


def test_a_rate_above_the_peak_can_be_asked_for(folder: Path) -> None:
    keys = ["lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs={min_lr_rate: 3}", "lr_above_peak=true"]
    recipe = load_recipe(str(folder / "recipe.yaml"), [*keys, "max_steps=100"]).recipe
    assert rate_schedule_of(recipe, 100)(99) > 2.9 * recipe.learning_rate


def _stable_steps(num: int) -> list[str]:
    settings = f"lr_scheduler_kwargs={{num_decay_steps: 2, num_stable_steps: {num}}}"
    return ["lr_scheduler_type=warmup_stable_decay", "learning_rate=0.1", settings]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["warmup_steps=10", "max_steps=8"], "never reaches 0.01 in this run of 8 steps, 10 of them warmup"),
        (["max_steps=1"], "is 0 at most"),
        (_stable_steps(3), "is 0 from step 7 to the end, step 10"),
        (_stable_steps(5), "is 0 from step 9 to the end, step 10"),
        (_stable_steps(6), None),  # as most schedules end
        ([], None),
    ],
)
def test_a_schedule_that_trains_little_is_described(keys: list[str], expected: str | None, folder: Path) -> None:
    recipe = load_recipe(str(folder / "recipe.yaml"), ["max_steps=10", "warmup_steps=0.03", *keys]).recipe
    lines = describe_schedule(rate_schedule_of(recipe, recipe.max_steps or 0), recipe, recipe.max_steps or 0)
    assert not lines if expected is None else expected in lines[0]


# --- what the optimizers keep ---------------------------------------------------------------------------------------

RULES: dict[str, UpdateRule] = {
    "adamw": AdamW(weight_decay=0.1),
    "adamw_bf16": AdamW16(weight_decay=0.1),
    "adamw_8bit": AdamW8(weight_decay=0.1),
    "sgd": Sgd(weight_decay=0.1),
    "sgd_momentum": Sgd(momentum=0.9),
    "adafactor": Adafactor(weight_decay=0.1),
}


def updates(store: Any, host: HostOptimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name in sorted(store.trainable_names):
            gradient = store.gradient(name)
            gradient.copy_(torch.randn(gradient.shape, generator=generator) * 0.1)
        host.step(1e-3, 0.5)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(RULES))
def test_saved_and_loaded_state_goes_on_to_the_bit(name: str, dtype: torch.dtype) -> None:
    whole, first, second = (make_rig("llama", dtype=dtype) for _ in range(3))
    uncut, before = (HostOptimizer(rig.store, RULES[name]) for rig in (whole, first))
    updates(whole.store, uncut, range(6))
    updates(first.store, before, range(3))
    for parameter in second.store.trainable_names:
        second.store.set_parameter(parameter, first.store.master(parameter))
    second.store.set_version(first.store.newest)
    after = HostOptimizer(second.store, RULES[name])
    after.load({key: tensor.clone() for key, tensor in before.moments()}, before.num_updates)
    updates(second.store, after, range(3, 6))
    assert whole.store.trainable_names and bool([*uncut.moments()]) is (name != "sgd")
    for parameter in whole.store.trainable_names:
        assert torch.equal(second.store.master(parameter), whole.store.master(parameter)), parameter
        assert torch.equal(second.store.views[parameter], whole.store.views[parameter]), parameter
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(after.moments(), uncut.moments(), strict=True))


@pytest.mark.parametrize("name", sorted(RULES))
def test_updates_in_parts_are_those_of_whole_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of the tiny models is one part otherwise."""
    parts, whole = make_rig("llama", "full"), make_rig("llama", "full")
    updates(whole.store, HostOptimizer(whole.store, RULES[name]), range(2))
    monkeypatch.setattr(optimizer, "PART_ELEMENTS", optimizer.SCALE_ELEMENTS)
    if name != "adamw_bf16":  # its noise depends on the blocks of a sweep
        monkeypatch.setattr(optimizer, "BLOCK_ELEMENTS", 96)
    updates(parts.store, HostOptimizer(parts.store, RULES[name]), range(2))
    assert whole.store.trainable_names
    for parameter in whole.store.trainable_names:
        assert torch.equal(parts.store.master(parameter), whole.store.master(parameter)), parameter


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_plan_counts_what_is_kept(name: str, method: Any) -> None:
    """Within a fifth of all other state: the tiny model's norms keep more than their share in 8 bit and by rows."""
    rig = make_rig("llama", method, vocab_size=512, hidden_size=256, intermediate_size=512)
    trained = sum(place.num_elements for layout in rig.store.layouts for place in layout.trainable)
    kind: Any = "sgd" if name == "sgd_momentum" else name
    settings = TrainingSettings(128, method=method, lora_r=4, optimizer=kind, has_momentum=name == "sgd_momentum")
    planned = moment_bytes_per_param(settings, 256)
    kept = HostOptimizer(rig.store, RULES[name]).num_bytes / trained
    if name == "adamw_8bit" and method == "lora":
        planned = 8.0  # matrices this small are kept in float32, as bitsandbytes does
    assert kept == pytest.approx(planned, rel=0.25 if name == "adafactor" else 0.02, abs=0.01)


def test_moments_in_bfloat16_stay_near_those_in_float32() -> None:
    """A second moment that falls by a thousandth a step would stand still if it were rounded to the nearest."""
    elements = 2**16
    gradient = torch.ones(elements)
    values = {"float32": torch.zeros(elements), "bfloat16": torch.zeros(elements)}
    rules = {"float32": AdamW(), "bfloat16": AdamW16()}
    state = {
        key: {k: torch.zeros_like(v) for k, v in rule.make_state(gradient.shape).items()} for key, rule in rules.items()
    }
    for step in range(1, 201):
        for key, rule in rules.items():
            size = 1.0 if step <= 20 else 1e-3
            rule.update(values[key], gradient * size, state[key], 1e-3, number=step, salt=step % 3)
    theirs, ours = state["float32"]["exp_avg_sq"], state["bfloat16"]["exp_avg_sq"].float()
    assert float(ours.mean()) == pytest.approx(float(theirs.mean()), rel=0.01)
    torch.testing.assert_close(values["bfloat16"], values["float32"], rtol=0.05, atol=1e-4)


def test_evaluation_is_without_smoothing_and_noise(folder: Path) -> None:
    """The weights do not change between the two, so the losses may not either."""
    words, losses = ("val_set_size=3", "max_steps=1", "learning_rate=1e-12"), list[float]()
    for keys in ([], ["label_smoothing_factor=0.3", "neftune_noise_alpha=20"]):
        output = f"out{len(losses)}"
        train(setup_of(folder, *words, *keys, output=output), folder / output)
        text = (folder / output / "eval.jsonl").read_text()
        losses.append(json.loads(text.splitlines()[-1])["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert metrics(folder / "out0")[0]["loss"] != pytest.approx(metrics(folder / "out1")[0]["loss"], rel=1e-3)


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_tables_beside_an_adapter_must_be_the_base_s(model: str, tmp_path: Path, models: dict[str, Path]) -> None:
    """They are not trained, so the result would not hold them."""
    folder = make_workspace(tmp_path / "work", models[model])
    random_adapter(folder / "model", folder / "first", save_tables=True)
    setup_of(folder, *_start(folder))
    path = folder / "first" / "adapter_model.safetensors"
    save_file({key: 2 * value if "embed_tokens" in key else value for key, value in load_file(path).items()}, path)
    with pytest.raises(RefusedError, match="another than the base model's"):
        setup_of(folder, *_start(folder))


@pytest.mark.parametrize("model_type", ["qwen3_moe", pytest.param("qwen2_moe", marks=pytest.mark.sweep)])
def test_an_adapter_of_single_experts_is_trained_further(model_type: str, tmp_path: Path) -> None:
    """The first loss is that of the model with the adapter merged."""
    folder = make_workspace(tmp_path / "work", make_model(tmp_path / "tiny", model_type, num_hidden_layers=2))
    adapter_of_experts(folder / "model", folder / "first", ("q_proj", "gate_proj", "up_proj", "down_proj"))
    make_tokenizer().save_pretrained(folder / "reference")
    losses = []
    for words, output in ((_start(folder), "out"), ([f"model={folder / 'reference'}"], "merged")):
        train(setup_of(folder, *words, "max_steps=1", output=output), folder / output)
        losses.append(metrics(folder / output)[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
