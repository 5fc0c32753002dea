"""The generated tables of recipes/README.md: shipped recipes by their headers, recipe keys and types of rows.

python scripts/recipe_pages.py           # compare; exit 1 if the page is out of date
python scripts/recipe_pages.py --write   # write the tables between their markers
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from roundpipe_cli.choices import PACKED_FORMATS, ROW_KINDS
from roundpipe_cli.recipe.keys import as_markdown, recipe_keys
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.shipped import ShippedRecipe, shipped_recipes
from roundpipe_cli.units import GIB

PAGE = Path(__file__).resolve().parents[1] / "recipes" / "README.md"
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
    method = recipe.method + (f", {PACKED_FORMATS[recipe.packed_as].label}" if recipe.packed_as else "")
    cells = [
        f"[`{shipped.name}`]({shipped.name}.yaml)",
        f"`{shipped.short_name}`" if shipped.short_name else "",
        recipe.model.rpartition("/")[2],
        method + (f", {recipe.objective}" if recipe.trains_pairs else ""),
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


TABLES = {
    "shipped recipes": shipped_table,
    "recipe keys": lambda: as_markdown(recipe_keys()),
    "types of rows": row_types,
}
"""Name in the markers -> lines of the table."""


def updated(page: str) -> str:
    """`page` with every table replaced by what recipes and schema say now."""
    for name, table in TABLES.items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        assert found and ended, f"{PAGE} lacks the markers of {name}"
        page = f"{before}{begin}\n{chr(10).join(table())}\n\n{end}{after}"
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    new = updated(page)
    if options.write:
        PAGE.write_text(new, encoding="utf-8")
    elif new != page:
        print(f"{PAGE} is out of date: python scripts/recipe_pages.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
