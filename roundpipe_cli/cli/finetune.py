"""`roundpipe finetune`: train what a recipe says."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundpipe_cli import torchrun
from roundpipe_cli.cli.options import OfflineOption
from roundpipe_cli.cli.output import go_offline, quiet_libraries, say, show_error
from roundpipe_cli.cli.training import PAGE_NAME, train_recipe, upload, write_page
from roundpipe_cli.errors import DeviceLostError, RefusedError
from roundpipe_cli.events import DeviceLost, Notice
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.regular_files import named_path
from roundpipe_cli.units import counted, format_loss, format_seconds, shown_step

if TYPE_CHECKING:
    from roundpipe_cli.events import Event, Tell


# The end of a run: its figures, predicted against measured, and what to do with the result.


def show_end(output_dir: Path, tell: Tell) -> None:
    """Say how a finished run went and which commands come next, and write its page."""
    from roundpipe_cli.dashboard.html import comparison_lines, read_report

    page = output_dir / PAGE_NAME
    finished = output_dir / "report.json"
    if page.exists() and finished.exists() and page.stat().st_mtime >= finished.stat().st_mtime:
        return  # the run was finished already
    report = read_report(output_dir)
    for text in filter(None, [summary(report), "\n".join(comparison_lines(report))]):
        say(text)
    write_page(output_dir, tell)
    if report:
        say(next_commands(output_dir, report))


def summary(report: Mapping[str, Any]) -> str:
    """`loss 3.8712 -> 3.6952, 33 tokens/s, bubble 2.0 %, 2m29s of training`; what is not known is left out.

    Speeds are of the steps since the last resume, and say so; the rest is of the whole run.
    """
    from roundpipe_cli.dashboard.html import since_resume

    loss, measured = report.get("loss") or {}, report.get("measured") or {}
    evaluation = report.get("evaluation") or {}
    parts = []
    if loss.get("first") is not None:
        parts.append(f"loss {format_loss(loss['first'])} -> {format_loss(loss['last'])}")
    elif loss.get("last") is not None:
        parts.append(f"last loss {format_loss(loss['last'])}")
    if isinstance(best := evaluation.get("best_loss"), (int, float)):
        alone = " (cross entropy alone)" if evaluation.get("leaves_out_teacher") else ""
        parts.append(f"best evaluation {format_loss(best)}{alone}")
    speeds = []
    if measured.get("tokens_per_s"):
        speeds.append(f"{measured['tokens_per_s']:,.0f} tokens/s")
    if measured.get("bubble_ratio") is not None:
        speeds.append(f"bubble {100 * measured['bubble_ratio']:.1f} %")
    if speeds and since_resume(report):
        speeds[-1] += f" ({since_resume(report)})"
    parts += speeds
    if parts and report.get("seconds"):
        parts.append(f"{format_seconds(report['seconds'])} of training")
    return ", ".join(parts)


def few_updates(recipe: Recipe, output_dir: Path, words: str) -> str | None:
    """Advice for a run of few updates, and what the learning rate will then do; None where it had enough.

    Args:
        words: recipe and overrides of the command.
    """
    from roundpipe_cli.dashboard.html import read_report
    from roundpipe_cli.train.checkpoint.output_dir import again
    from roundpipe_cli.train.prepare.learning_rate import rate_schedule_of
    from roundpipe_cli.train.prepare.steps import LEAST_UPDATES, enough_epochs

    report = read_report(output_dir)
    steps, has_stopped = report.get("num_steps") or LEAST_UPDATES, (report.get("evaluation") or {}).get("stopped_early")
    per_epoch = steps / recipe.num_train_epochs
    epochs = enough_epochs(round(per_epoch))
    if has_stopped or recipe.max_steps is not None or steps >= LEAST_UPDATES or epochs <= recipe.num_train_epochs:
        return None
    schedule = rate_schedule_of(recipe, longer := round(epochs * per_epoch))
    peak = max(range(steps, longer), key=schedule)
    highest = f", at its highest, {schedule(peak):.2g}, at step {shown_step(peak)}"
    rates = f"at step {shown_step(steps)} it is {schedule(steps):.2g} again"
    rates += highest * (schedule(peak) > schedule(steps))
    return (
        f"only {counted(steps, 'update')}, which hardly change the answers: "
        f"roundpipe finetune {words} num_train_epochs={epochs} {again(recipe)}\n"
        f"  the learning rate then follows the schedule of {longer} updates: {rates}, and falls to "
        f"{schedule(longer - 1):.2g}"
    )


def next_commands(output_dir: Path, report: Mapping[str, Any]) -> str:
    """Commands to copy: ask the result, export it, see its page."""
    folder = shlex.quote(str(output_dir))
    merged = shlex.quote(f"{output_dir}-merged")
    export = f"export {folder} --to {shlex.quote(f'{output_dir}-exported')}"
    if report.get("method") == "lora":
        export = f"export {folder} --merge --to {merged}"
    page = shlex.quote(str(output_dir / PAGE_NAME))
    rows = (f'roundpipe generate {folder} "your question"', f"roundpipe {export}", f"xdg-open {page}")
    return "\n".join(["next:", *(f"  {row}" for row in rows)])


def finetune(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe file, or the name of a shipped one.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="key=value, e.g. lora.r=32 learning_rate=1e-4.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest valid checkpoint.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="One line of JSON per step on stdout, as of watch; no dashboard.")
    ] = False,
    no_dashboard: Annotated[bool, typer.Option("--no-dashboard", help="Plain lines instead of a dashboard.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="In plain lines, what each worker did and waited for.")
    ] = False,
    allow_changed: Annotated[
        list[str] | None, typer.Option("--allow-changed", metavar="KEY", help="Resume although KEY changed.")
    ] = None,
    allow_other_base: Annotated[
        bool, typer.Option("--allow-other-base", help="Start from an adapter (lora.start_from) of another base model.")
    ] = False,
    offline: OfflineOption = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write the last steps' work to trace.json, for ui.perfetto.dev.")
    ] = False,
    restarts: Annotated[
        int, typer.Option("--restarts", metavar="N", min=0, help="Start again so often without devices that are lost.")
    ] = 0,
) -> None:
    """Fine-tune a model as a recipe says.

    Example: roundpipe finetune recipes/quickstart.yaml
    """
    if os.environ.get("RANK", "0") in ("", "0"):  # of several machines the first one speaks
        say(f"reading {recipe} ...")
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.train.signals import StopSignals

    with restarting(recipe, overrides or (), restarts), StopSignals() as signals, contextlib.ExitStack() as stack:
        if offline:
            go_offline()
        process, nodes = torchrun.this_process(), None
        if process.count > 1:  # from here on a refusal of one machine ends all
            torchrun.require_address()
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a lost store shows C++ stacks; our error says it
            quiet_libraries()
            from roundpipe_cli.train.nodes.group import Nodes

            nodes = stack.enter_context(Nodes(process.rank, process.count, say))
        loaded = load_recipe(recipe, overrides or ())
        is_first = process.is_first
        """Whether this is the first of the machines that torchrun started: the others only say what stops them."""
        for text in loaded.notices if is_first else ():
            say(f"note: {text}")
        from roundpipe_cli.cli.display import Display, training_keys
        from roundpipe_cli.cli.lines import LinePrinter
        from roundpipe_cli.train.signals import Start

        lost_at = os.environ.get(LOST_AT_VARIABLE, "")
        start = Start(resume, offline, allow_changed or (), allow_other_base, lost_at)
        plain = LinePrinter(loaded.recipe.logging_steps, as_json=json_, is_verbose=verbose) if is_first else _silent

        def screen(output_dir: Path) -> Display:
            has_screen = is_first and not (no_dashboard or json_)
            display = Display(plain, dashboard=has_screen, keys=training_keys(signals), output_dir=output_dir)
            signals.announce = display.announce
            if nodes is not None and is_first:
                nodes.say = lambda text: display(Notice(text))
            return display

        output_dir = train_recipe(loaded, start, signals, plain, screen=screen, trace=trace, nodes=nodes)
        if is_first:
            show_end(output_dir, plain)
            others = [word for word in overrides or () if not word.startswith("num_train_epochs=")]
            if (few := few_updates(loaded.recipe, output_dir, shlex.join([recipe, *others]))) is not None:
                say(few)
            upload(loaded.recipe, plain)


LOST_AT_VARIABLE = "ROUNDPIPE_LOST_AT"
"""Where a device was lost for which this run was started again."""


@contextlib.contextmanager
def restarting(recipe: str, overrides: Sequence[str], restarts: int) -> Iterator[None]:
    """Where a lost device ends the run, and others are left, this command starts again, up to `restarts` times.

    Raises:
        RefusedError: several machines, whose processes torchrun starts again.
    """
    if restarts and torchrun.this_process().count > 1:
        raise RefusedError("--restarts: not with several machines", hint="torchrun --max-restarts does so")
    try:
        yield
    except DeviceLostError as error:
        if restarts and error.rest:
            from roundpipe_cli.recipe.load import load_recipe

            show_error(error)
            _start_again(load_recipe(recipe, overrides).recipe, error, restarts - 1)
        raise


def _start_again(own: Recipe, error: DeviceLostError, restarts: int) -> None:
    """Become the same command on the devices that are left, from the newest checkpoint: another program, since the
    driver may serve this process no device any more. Of a word that is there twice the last one counts."""
    from roundpipe_cli.engine.backends import cuda
    from roundpipe_cli.train.checkpoint.output_dir import list_checkpoints
    from roundpipe_cli.train.prepare.devices import choose_devices, gpu_index, threads_per_worker

    devices, options, changes = list(error.rest), [f"--restarts={restarts}"], list[str]()
    if devices[0] == "cpu":  # the number of threads changes bits
        every, _ = choose_devices(own.pipeline.devices)
        changes.append(f"pipeline.threads_per_worker={threads_per_worker(own.pipeline.threads_per_worker, len(every))}")
    else:  # by names that stay when a card is gone
        names = list(dict.fromkeys(devices))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cuda.uuid(gpu_index(name)) for name in names)
        devices = [f"cuda:{names.index(name)}" for name in devices]
    changes.append(f"pipeline.devices=[{','.join(devices)}]")
    if list_checkpoints(named_path(own.output_dir)):  # its own, wherever it began
        options.append("--resume")
        changes += ["resume_from_checkpoint=auto"] if own.resume_from_checkpoint else []
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)  # behind it no word is an option
    words = [*given[:end], *options, *given[end:], *changes]
    say(f"starting again on {', '.join(error.rest)}; {counted(restarts, 'more restart')} would be made")
    os.environ[LOST_AT_VARIABLE] = error.at
    os.execv(sys.executable, [sys.executable, "-m", "roundpipe_cli", *words])


def _silent(event: Event) -> None:
    """The events of other machines than the first one: a lost device is each one's own affair."""
    if isinstance(event, DeviceLost):
        say(f"machine {torchrun.this_process().rank + 1}: {event.text}")
