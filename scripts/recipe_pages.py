"""The generated tables of recipes/README.md (shipped recipes by their headers, recipe keys, types of rows) and of
recipes/GUIDE.md (machines, by `plan`).

python scripts/recipe_pages.py           # compare; exit 1 if a page is out of date
python scripts/recipe_pages.py --write   # write the tables between their markers
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from roundpipe_cli.choices import PACKED_FORMATS, ROW_KINDS
from roundpipe_cli.cli.init_choice import choose_settings
from roundpipe_cli.costs.find_model import shipped_architecture
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.recipe.keys import as_markdown, recipe_keys
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.shipped import ShippedRecipe, shipped_recipes
from roundpipe_cli.units import GIB, format_seconds

PAGE = Path(__file__).resolve().parents[1] / "recipes" / "README.md"
GUIDE = PAGE.with_name("GUIDE.md")
MACHINE = re.compile(r"(?P<gpus>.+),host_memory_gib=(?P<host>\d+)")


def shipped_table() -> Iterator[str]:
    """One row for each shipped recipe; all figures are the predictions in its header."""
    yield "| recipe | short name | model | method | machine | s a step | tokens/s | GPU | host | disk |"
    yield "|---|---|---|---|---|---:|---:|---:|---:|---:|"
    for shipped in shipped_recipes():
        yield shipped_row(shipped)


def shipped_row(shipped: ShippedRecipe) -> str:
    """The row of one shipped recipe."""
    recipe, verdict = load_recipe(shipped.path).recipe, shipped.verdict
    assert verdict is not None and verdict.fits, f"{shipped.name} needs a header that says it fits"
    machine = MACHINE.fullmatch(verdict.hardware)
    assert machine is not None, verdict.hardware
    architecture = shipped_architecture(recipe.model)
    packed_as = recipe.packed_from(architecture.stored_as if architecture is not None else None)
    method = recipe.method + (f", {PACKED_FORMATS[packed_as].label}" if packed_as else "")
    cells = [
        f"[`{shipped.name}`]({shipped.name}.yaml)",
        f"`{shipped.short_name}`" if shipped.short_name else "",
        recipe.model.rpartition("/")[2],
        method + (f", {recipe.objective}" if recipe.scores_answers else ""),
        f"{machine['gpus']}, {machine['host']} GiB",
        f"{verdict.step_s:.3g}",
        f"{verdict.tokens_per_s:,.0f}",
        *(f"{value / GIB:.1f} GiB" for value in (verdict.device_bytes, verdict.host_bytes, verdict.disk_bytes)),
    ]
    return f"| {' | '.join(cells)} |"


def row_types() -> Iterator[str]:
    """One row for each type of rows."""
    yield "| `type` | columns | may also have |"
    yield "|---|---|---|"
    for name, kind in ROW_KINDS.items():
        yield f"| `{name}` | {', '.join(kind.fields)} | {', '.join(kind.optional)} |"


MACHINES = (
    ("1x4060,host_memory_gib=16", "qwen3/1.7b_lora_1x16gb"),
    ("1x3070,host_memory_gib=32", "qwen3/4b_lora_1x16gb"),
    ("1x4060,host_memory_gib=32", "qwen3/8b_lora_1x16gb"),
    ("1x3060,host_memory_gib=16", "qwen3/4b_lora_1x16gb"),
    ("1x3060,host_memory_gib=32", "llama3.1/8b_lora_1x16gb"),
    ("1x4070,host_memory_gib=32", "qwen3/14b_lora_1x24gb"),
    ("1x4070,host_memory_gib=64", "gemma3/12b_lora_2x24gb"),
    ("2x3060,host_memory_gib=64", "qwen3/14b_lora_2x24gb"),
    ("1x4060ti-16gb,host_memory_gib=16", "smollm2/1.7b_lora_1x16gb"),
    ("1x4060ti-16gb,host_memory_gib=32", "gpt-oss/20b_lora_1x16gb"),
    ("1x5060ti-16gb,host_memory_gib=64", "qwen3/14b_lora_1x24gb"),
    ("2x4060ti-16gb,host_memory_gib=64", "qwen3/32b_lora_2x24gb"),
    ("1x3090,host_memory_gib=32", "qwen3/8b_lora_1x24gb"),
    ("1x3090,host_memory_gib=64", "qwen3/30b-a3b-fp8_lora_1x24gb"),
    ("1x3090,host_memory_gib=96", "gpt-oss/120b_lora_1x24gb"),
    ("1x4090,host_memory_gib=128", "qwen3/30b-a3b_lora_2x24gb"),
    ("2x3090,host_memory_gib=64", "qwen3/32b_lora_2x24gb"),
    ("2x3090,host_memory_gib=96", "gpt-oss/120b_lora_2x24gb"),
    ("2x3090,host_memory_gib=128", "gemma3/27b_lora_2x24gb"),
    ("4x3090,host_memory_gib=128", "qwen3/32b_lora_4x24gb"),
    ("4x4090,host_memory_gib=128", "llama3.3/70b_lora_4x24gb"),
)
"""(Machine, shipped recipe) of the guide, from the smallest card on."""
TOKENS = 1_000_000


def machine_table(machines: Iterable[tuple[str, str]] = MACHINES) -> Iterator[str]:
    """One row for each machine of the guide."""
    yield f"| machine | model | frozen weights | change by | command | tokens/s | {TOKENS:,} tokens |"
    yield "|---|---|---|---:|---|---:|---:|"
    for hardware, recipe in machines:
        yield machine_row(hardware, recipe)


def machine_row(hardware: str, recipe: str) -> str:
    """The row of one machine, with the changes that `init` takes for its model, as `plan` predicts it now."""
    changes = choose_settings(load_recipe(recipe).recipe.model, hardware, PAGE).overrides
    plan = make_plan(load_recipe(recipe, changes), hardware)
    assert plan.verdict.fits, (hardware, recipe, changes, plan.verdict.reasons)
    loaded, machine = plan.question.loaded.recipe, MACHINE.fullmatch(hardware)
    assert machine is not None, hardware
    packed_as = plan.question.settings.packed_as
    packed = PACKED_FORMATS[packed_as] if packed_as else None
    cells = [
        f"{machine['gpus']}, {machine['host']} GiB",
        loaded.model.rpartition("/")[2],
        packed.label if packed else "16 bit",
        f"{100 * packed.weight_change:.2g} %" if packed and packed.weight_change else "0",
        f"`roundpipe finetune {' '.join([recipe, *changes])}`",
        f"{plan.tokens_per_s:,.3g}" if plan.tokens_per_s < 1000 else f"{float(f'{plan.tokens_per_s:.3g}'):,.0f}",
        format_seconds(TOKENS / plan.tokens_per_s),
    ]
    return f"| {' | '.join(cells)} |"


KEPT_FOR: Mapping[str, str] = {
    "axolotl, LLaMA-Factory, TRL and transformers name it so": """
        adam_beta1 adam_beta2 adam_epsilon weight_decay neftune_noise_alpha logging_steps eval_steps lr_scheduler_kwargs
        load_best_model_at_end""",
    "LLaMA-Factory, TRL and transformers name it so": "optim label_smoothing_factor report_to",
    "axolotl names it so": "val_set_size train_on_inputs early_stopping_patience eval_max_new_tokens",
    "axolotl and TRL name it so": "chat_template_kwargs",
    "torchtune names it so": "shuffle",
    "PEFT and Unsloth name it so": "revision lora.modules_to_save",
    "PEFT and TRL name it so": "lora.use_rslora lora.use_dora",
    "axolotl and LLaMA-Factory name it so": "lora.loraplus_lr_ratio",
    "TRL names it so": "dpo.label_smoothing simpo.label_smoothing simpo.simpo_gamma simpo.cpo_alpha",
    "axolotl, LLaMA-Factory and TRL name the loss so": "ipo",
    "LLaMA-Factory's loss differs from TRL's by it": "orpo.nll_on_prompt",
    "axolotl's lora_model_dir, LLaMA-Factory's adapter_name_or_path": "lora.start_from",
    "axolotl's unfrozen_parameters, turned round": "frozen_parameters",
    "axolotl's test_datasets, LLaMA-Factory's eval_dataset": "eval_datasets",
    "axolotl's datasets have it": "datasets[].roles_to_train datasets[].train_on_eos",
    "LLaMA-Factory's mask_history": "datasets[].turns_to_train",
    "rows as TRL, axolotl or LLaMA-Factory join them": "datasets[].as_chat datasets[].alpaca_join",
    "what becomes of thoughts and plain texts is a choice about rows that nothing else makes": """
        datasets[].thoughts datasets[].txt_rows long_rows_overlap""",
    "answers beside the loss of an evaluation": "eval_samples",
    "says that a rate above the peak is meant": "lr_above_peak",
    "torch's SGD has it": "sgd_momentum",
    "memory of long sequences or large vocabularies": "head_chunk_tokens mlp_chunk_tokens",
    "data sheets; no GeForce card was measured": "float16_accumulation",
    "a run without fused operators, to compare with": "kernels",
    "simulated for Llama-3.1-8B and Qwen3-32B: a step is 5.3 to 9.8 % faster": "pipeline.dispatch",
    "simulated so: 1.7 to 2.5 % faster": "pipeline.head_workers",
    "simulated so: 5.2 to 5.8 % faster": "pipeline.skip_last_projection",
    "simulated so: 0.9 to 1.8 % faster at most": "pipeline.keep_activations",
    "a cut by hand, to compare with the planner's": "pipeline.forward_stages pipeline.backward_stages",
    "runs the schedules that papers compare with; `bench RECIPE --run` sets it": "pipeline.schedule",
    "one worker's share of a machine that others use too": "pipeline.threads_per_worker",
    "takes a decision of the planner back, to compare with it": "pipeline.weight_cache nodes.shard_optimizer",
}
"""Why a key stays that stands in no shipped recipe, on the main page or in the guide -> keys."""


def rare_keys() -> set[str]:
    """Keys that stand in no shipped recipe, on the main page or in the guide."""
    pages = "".join((GUIDE.parents[level] / name).read_text() for level, name in ((1, "README.md"), (0, "GUIDE.md")))
    files = "".join(one.path.read_text(encoding="utf-8") for one in shipped_recipes())
    keys = [key.name for key in recipe_keys() if not key.name.startswith("eval_datasets[]")]
    return {key for key in keys if not re.search(rf"\b{key.rpartition('.')[2]}\b", pages + files)}


def reasons() -> Iterator[str]:
    """One row for each reason for which rare keys stay."""
    yield "| keys | why |"
    yield "|---|---|"
    rare = rare_keys()
    for why, names in KEPT_FOR.items():
        if shown := [f"`{name}`" for name in names.split() if name in rare]:
            yield f"| {', '.join(shown)} | {why} |"


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "shipped recipes": shipped_table,
    "recipe keys": lambda: as_markdown(recipe_keys()),
    "types of rows": row_types,
    "why rare keys stay": reasons,
}
"""Name in the markers of recipes/README.md -> lines of the table."""
GUIDE_TABLES: dict[str, Callable[[], Iterable[str]]] = {"machines": machine_table}


def updated(page: str, tables: Mapping[str, Callable[[], Iterable[str]]] = TABLES) -> str:
    """`page` with every table replaced by what recipes, schema and `plan` say now."""
    for name, table in tables.items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        assert found and ended, f"a page lacks the markers of {name}"
        page = f"{before}{begin}\n{chr(10).join(table())}\n\n{end}{after}"
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    options = parser.parse_args()
    code = 0
    for path, tables in ((PAGE, TABLES), (GUIDE, GUIDE_TABLES)):
        page = path.read_text(encoding="utf-8")
        new = updated(page, tables)
        if options.write:
            path.write_text(new, encoding="utf-8")
        elif new != page:
            print(f"{path} is out of date: python scripts/recipe_pages.py --write")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
