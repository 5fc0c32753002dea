"""The figures of a run at the side of its curve, the most important first."""

from __future__ import annotations

from rich.text import Text

from roundpipe_cli.dashboard.state import DashboardState
from roundpipe_cli.dashboard.theme import Theme
from roundpipe_cli.units import GIB, format_loss, format_seconds


def figure_lines(state: DashboardState, height: int, width: int, theme: Theme, *, has_loss: bool = False) -> list[Text]:
    """At most `height` lines of `width` columns: a name and a value each.

    Args:
        has_loss: the loss first; elsewhere the curve's title has it.
    """
    rows = [*_step_rows(state, has_loss), *_machine_rows(state)]
    return [_row(name, value, note, width, theme) for name, value, note in rows[:height]]


def _row(name: str, value: str, note: str, width: int, theme: Theme) -> Text:
    if len(name) + len(value) + len(note) + 1 > width:  # a note adds to the value; the unit is in the value
        note = ""
    gap = max(1, width - len(name) - len(value) - len(note))
    return Text.assemble((name, theme.faint), " " * gap, (value, "bold"), (note, theme.faint))


def _step_rows(state: DashboardState, has_loss: bool) -> list[tuple[str, str, str]]:
    step = state.step
    if step is None:
        return [("tokens/s", "-", ""), ("step", "-", ""), ("bubble", "-", "")]
    median = f"{100 * state.median_bubble.value:.1f} %"
    rows = [
        ("tokens/s", _grouped(step.tokens_per_s), ""),
        ("step", format_seconds(step.step_s), ""),
        ("bubble", f"{100 * step.bubble_ratio:.1f} %", "" if state.is_simulated else f" median {median}"),
    ]
    if has_loss and state.is_over and not state.is_simulated:  # the end of a run shows the median below
        rows = [(f"{name}, last", value, "") for name, value, _ in rows[:2]] + [("bubble, median", median, "")]
    if state.is_simulated:
        return rows
    if has_loss or (state.run is not None and state.run.goal != "loss"):
        rows.insert(0 if has_loss else len(rows), ("loss", format_loss(step.loss), ""))
    rewards = step.preference or {}
    if "reward_margin" in rewards:  # of preference pairs: what training is to make larger
        rows.append(("reward margin", f"{rewards['reward_margin']:.3g}", ""))
    if "reward_accuracy" in rewards:
        rows.append(("reward accuracy", f"{100 * rewards['reward_accuracy']:.0f} %", ""))
    if state.run is None or state.run.goal == "loss":
        rows += [("learning rate", f"{step.learning_rate:.2e}", ""), ("gradient norm", f"{step.grad_norm:.3g}", "")]
    return rows


def _machine_rows(state: DashboardState) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    sample, step = state.sample, state.step
    if sample is not None:
        total = f" of {sample.host_total_bytes / GIB:.3g} GiB"
        rows.append(("host memory", f"{sample.host_used_bytes / GIB:.1f} GiB", total))
        rows.append(("this program", f"{sample.process_bytes / GIB:.1f} GiB", ""))
    rates = [worker.sample.upload_bytes_per_s for worker in state.workers]
    if step is not None and step.upload_bytes and all(rate is None for rate in rates):
        rows.append(("upload", f"{step.upload_bytes / step.step_s / 1e9:.1f} GB/s", ""))
    if step is not None and step.device_peak_bytes and all(w.sample.used_bytes is None for w in state.workers):
        rows.append(("device peak", f"{step.device_peak_bytes / GIB:.2f} GiB", ""))
    if step is not None:
        rows.append(("tokens", _grouped(step.tokens), " this step"))
    if sample is not None:
        rows += [(f"queue of {name}", str(count), "") for name, count in sample.queues]
    return rows


def _grouped(value: float) -> str:
    """Thousands apart, as `plan` writes them: `12,345`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
