"""`roundpipe data`: shows a recipe's rows as training sees them, token by token. No weights are loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundpipe_cli.cli.options import OfflineOption
from roundpipe_cli.cli.output import go_offline, has_colour, quiet_libraries, say, say_data, say_json
from roundpipe_cli.units import counted, escape_controls

if TYPE_CHECKING:
    from roundpipe_cli.data.describe import Fill, RowSample
    from roundpipe_cli.data.tokenized import PackingChoice, TokenizedDataset
    from roundpipe_cli.recipe.load import LoadedRecipe

BAR_COLUMNS = 40
MAX_SAMPLE_CHARACTERS = 6000
"""Characters of a sample on a terminal; --json has it whole."""


def data(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Recipe file, or the name of a shipped one.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="key=value in place of the recipe's, such as max_seq_length=1024."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    offline: OfflineOption = False,
) -> None:
    """Show what training would see: rows kept and lost, lengths, packing, and samples with trained tokens marked.

    Example: roundpipe data recipes/quickstart.yaml
    """
    say(f"reading {recipe} ...")
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.train.signals import StopSignals
    from roundpipe_cli.watchdog import watching

    with StopSignals(what_is_left=""):
        loaded = load_recipe(recipe, overrides or ())
        for text in loaded.notices:
            say(f"note: {text}")
        if offline:
            go_offline()
        say("loading the tokenizer ...")
        quiet_libraries()
        with watching(loaded.recipe.watchdog_s):
            look = _look(loaded, offline)
    if json_:
        from roundpipe_cli.data.describe import data_document

        say_json(data_document(look.dataset, look.fill, look.samples, look.row_tokens), indent=None)
        return
    for line in report_lines(look):
        say_data(line)
    _show_samples(look.samples)


@dataclass(frozen=True)
class DataView:
    """The data to show."""

    dataset: TokenizedDataset
    fill: Fill | None
    """None for rows that are not packed."""
    samples: list[RowSample]
    row_tokens: int
    """The recipe's `max_seq_length`."""
    is_unpacked: bool = False
    """The recipe says `packing: false`."""


def _look(loaded: LoadedRecipe, offline: bool) -> DataView:
    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.data.describe import fill_with_packing, samples
    from roundpipe_cli.model.files.source import resolve_model
    from roundpipe_cli.model.new_tokens import load_with_tokens
    from roundpipe_cli.train.prepare.rows import read_rows, read_teacher, with_row_length
    from roundpipe_cli.train.prepare.steps import mix_of

    recipe = loaded.recipe
    ways: dict[str, Any] = {"offline": offline, "weights": False, "tell": LinePrinter(1)}
    source = resolve_model(recipe.model, revision=recipe.revision, recipe_folder=loaded.folder, **ways)
    loaded = with_row_length(loaded, source, offline=offline, tell=ways["tell"])
    recipe = loaded.recipe
    tokenizer, new = load_with_tokens(source, recipe.add_tokens)
    dataset = read_rows(loaded, tokenizer, offline, say)
    teacher = read_teacher(loaded, dataset, tokenizer)
    of_teacher = () if teacher is None else teacher.describe()
    dataset = replace(dataset, notices=(*dataset.notices, *of_teacher, *new.describe(dataset.rows)))
    shown = samples(dataset, tokenizer, recipe.seed, recipe.objective_kind.rows.sides)
    if recipe.scores_answers:
        return DataView(dataset, None, shown, recipe.row_tokens)
    mix = mix_of(recipe, dataset.rows_by_spec)
    fill = fill_with_packing(mix, dataset.rows.lengths, recipe.row_tokens, recipe.seed, shuffle=recipe.shuffle)
    if recipe.packing == "auto":
        fill = replace(fill, choice=packing_choice(loaded, dataset))
    return DataView(dataset, fill, shown, recipe.row_tokens, recipe.packing is False)


def packing_choice(loaded: LoadedRecipe, dataset: TokenizedDataset) -> PackingChoice:
    """The answer of `packing: auto` for the rows of `dataset` that are trained."""
    from roundpipe_cli.costs.find_model import find_config
    from roundpipe_cli.data.tokenized import choose_packing, hold_out
    from roundpipe_cli.planning.admission import packing_obstacle
    from roundpipe_cli.recipe.load import resolve_path
    from roundpipe_cli.train.prepare.steps import mix_of

    recipe = loaded.recipe
    found = find_config(recipe.model, resolve_path(recipe.model, loaded.folder), recipe.revision)
    trained = hold_out(dataset, recipe.val_set_size, recipe.seed)[0] if recipe.val_set_size else dataset
    obstacle = packing_obstacle(found, recipe)
    return choose_packing(mix_of(recipe, trained.rows_by_spec), trained.rows.lengths, recipe, obstacle)


def report_lines(look: DataView) -> Iterator[str]:
    """The lines of the report, without its samples."""
    from roundpipe_cli.data.describe import histogram, sequence_lengths
    from roundpipe_cli.data.rows import listed

    dataset, report = look.dataset, look.dataset.report
    lengths = sequence_lengths(dataset)
    yield f"rows    {report.filter_counts()}"
    for source, filtered in zip(dataset.sources, report.sources, strict=True):
        kept = "{1} rows in {0} sequences" if report.long_rows == "split" else "{0} of {1} rows kept"
        yield f"  {filtered.name}: type {filtered.type}, " + kept.format(filtered.rows_kept, filtered.rows_read)
        cut = {"truncate": "cut", "split": "split"}.get(report.long_rows, "too long, dropped")
        bad = [number for number, _ in filtered.bad_rows]
        for what, numbers in (
            ("bad", bad),
            (cut, filtered.too_long_rows),
            ("dropped, no trained token", filtered.untrained_rows),
        ):
            if numbers:
                yield f"    {what}: {len(numbers)}: {listed([source.where(number) for number in numbers])}"
    share = 100 * report.trained_tokens / report.total_tokens
    lost = f"; {report.lost_tokens} lost to cuts and dropped rows" if report.lost_tokens else ""
    yield f"tokens  {report.total_tokens}, {report.trained_tokens} of them trained ({share:.1f} %){lost}"
    if look.fill is None:
        answers = counted(len(dataset.sides), "answer")
        yield f"packing none: {counted(len(dataset.rows), 'row')} of {answers} each, which are scored as wholes"
    else:
        packed = f"{counted(len(lengths), 'row')} in {counted(look.fill.num_sequences, 'sequence')}"
        off = "off: it would put " * look.is_unpacked
        yield f"packing {off}{packed} of {look.row_tokens} tokens, {100 * look.fill.ratio:.1f} % full"
        if look.fill.choice is not None:
            yield look.fill.choice.describe()
    yield f"lengths shortest {lengths.min()}, mean {lengths.mean():.0f}, longest {lengths.max()} tokens"
    bins = histogram(lengths)
    most = max(rows for _, _, rows in bins)
    width = len(str(bins[-1][1]))
    for low, high, rows in bins:
        bar = "#" * (-(-BAR_COLUMNS * rows // most))
        yield f"  {low:>{width}} to {high - 1:>{width}}  {bar:<{BAR_COLUMNS}} {rows}"
    for notice in dataset.notices:
        yield f"note: {notice}"


def _show_samples(shown: Sequence[RowSample]) -> None:
    """Trained tokens in green on a terminal, otherwise (and with NO_COLOR) between [[ and ]]."""
    is_painted = sys.stdout is not None and has_colour(sys.stdout)
    marks = "trained in green" if is_painted else "trained between [[ and ]]"
    for sample in shown:
        num_trained = sum(piece.num_tokens for piece in sample.pieces if piece.trained)
        kind = f"{sample.kind} row" + ("" if sample.answer is None else f", {sample.answer}")
        weights = {abs(piece.weight) for piece in sample.pieces if piece.trained}
        kind += "" if weights <= {1.0} else f", weight {' and '.join(f'{weight:g}' for weight in sorted(weights))}"
        say_data(f"\n{kind}: {sample.where}, {len(sample.input_ids)} tokens, {num_trained} {marks}")
        text, left = "", MAX_SAMPLE_CHARACTERS
        for piece in sample.pieces:
            part = escape_controls(piece.text[:left], kept="\n")
            left -= len(piece.text[:left])
            if is_painted:
                text += f"\x1b[{32 if piece.trained else 2}m{part}\x1b[0m"
            else:
                text += f"[[{part}]]" if piece.trained else part
        hidden = sum(len(piece.text) for piece in sample.pieces) - MAX_SAMPLE_CHARACTERS
        text += f" ... and {hidden} more characters" if hidden > 0 else ""
        if is_painted:
            say(text, stream=sys.stdout, painted=True)
        else:
            say_data(text)
