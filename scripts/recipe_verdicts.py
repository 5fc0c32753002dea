"""Compare the verdicts in the shipped recipes' headers with what `plan` says now; `--write` puts the new ones there.

python scripts/recipe_verdicts.py                 # all recipes, about 3 s of one core each; exit 1 if one is off
python scripts/recipe_verdicts.py --write qwen3   # those whose name contains qwen3
"""

from __future__ import annotations

import argparse
import sys

from roundpipe_cli.planning.predict import Plan, make_plan
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.shipped import VERDICT, HeaderVerdict, ShippedRecipe, shipped_recipes
from roundpipe_cli.units import GIB

TOLERANCE = 0.02
"""Relative; the header is rounded to three figures."""


def with_verdict(text: str, recipe: str, verdict: HeaderVerdict) -> str:
    """`text` with the header's verdict replaced.

    Raises:
        ValueError: the text has no verdict to replace.
    """
    if VERDICT.search(text) is None:
        raise ValueError(f"{recipe} has no verdict in its header")
    return VERDICT.sub(lambda _: verdict.text(recipe), text, count=1)


def verdict_now(recipe: ShippedRecipe, hardware: str) -> HeaderVerdict:
    """What `plan` says of a shipped recipe on this hardware."""
    return verdict_of_plan(make_plan(load_recipe(recipe.path), hardware), hardware)


def verdict_of_plan(plan: Plan, hardware: str) -> HeaderVerdict:
    """The part of a plan that a header shows; of GPU memory what is needed, not what a weight cache fills beside it."""
    settings, verdict = plan.question.settings, plan.verdict
    return HeaderVerdict(
        hardware=hardware,
        fits=verdict.fits,
        step_s=plan.step_s,
        step_range_s=plan.band.around(plan.step_s),
        tokens_per_step=int(settings.num_microbatches * settings.tokens_per_microbatch),
        tokens_per_s=plan.tokens_per_s,
        device_bytes=verdict.device.total_bytes - settings.weight_cache_bytes,
        host_bytes=verdict.host.total_bytes,
        disk_bytes=verdict.disk.total_bytes,
    )


def differences(
    header: HeaderVerdict, now: HeaderVerdict, *, tolerance: float = TOLERANCE, device_tolerance: float = TOLERANCE
) -> list[str]:
    """The figures that are not those of the header any more; among cuts that take the same time the device's bytes
    differ, hence a tolerance of their own."""
    found = [] if header.fits == now.fits else [f"fits: {header.fits} in the header, {now.fits} now"]
    for name in ("step_s", "tokens_per_step", "tokens_per_s", "device_bytes", "host_bytes", "disk_bytes"):
        old, new = float(getattr(header, name)), float(getattr(now, name))
        relative = device_tolerance if name == "device_bytes" else tolerance
        if abs(old - new) > max(relative * new, 0.06 * GIB if name.endswith("bytes") else 0.0):
            found.append(f"{name}: {old:.4g} in the header, {new:.4g} now")
    for old, new in zip(header.step_range_s, now.step_range_s, strict=True):
        if abs(old - new) > tolerance * new:
            found.append(f"range of step_s: {old:.4g} in the header, {new:.4g} now")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts of recipe names; none: all recipes")
    parser.add_argument("--write", action="store_true", help="write the new verdicts into the recipes")
    options = parser.parse_args()
    num_off = 0
    for recipe in shipped_recipes():
        if options.parts and not any(part in recipe.name for part in options.parts):
            continue
        if recipe.verdict is None:
            print(f"{recipe.name}: no verdict in its header")
            num_off += 1
            continue
        now = verdict_now(recipe, recipe.verdict.hardware)
        off = differences(recipe.verdict, now)
        print(f"{recipe.name}: {'; '.join(off) or 'as in the header'}", flush=True)
        num_off += bool(off)
        if options.write:
            path = recipe.path.resolve()
            path.write_text(with_verdict(path.read_text(encoding="utf-8"), recipe.command_name, now), encoding="utf-8")
    return 1 if num_off and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
