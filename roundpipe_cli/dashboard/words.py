"""The content of a screen beside the step's line, in plain lines: for screen readers, logs and pipes. No glyphs."""

from __future__ import annotations

from roundpipe_cli.dashboard.state import DashboardState, WorkerView
from roundpipe_cli.dashboard.waiting import CAUSES, longest_waiting
from roundpipe_cli.units import GIB, format_seconds


def details(state: DashboardState) -> list[str]:
    """A line for the last step, one for the host, one for each worker, and why the one that waited most did so."""
    if state.step is None:
        return []
    workers = [f"worker {index}: {_worker_words(worker)}" for index, worker in enumerate(state.workers)]
    return [_step_words(state), *_host_words(state), *workers, *_waiting_words(state)]


def _step_words(state: DashboardState) -> str:
    step = state.step
    assert step is not None
    parts = [
        f"step {step.step} took {format_seconds(step.step_s)}",
        f"{step.tokens:,} tokens",
        f"bubble {100 * step.bubble_ratio:.1f} %, median {100 * state.median_bubble.value:.1f} %",
        f"gradient norm {step.grad_norm:.3g}",
        f"learning rate {step.learning_rate:.2e}",
    ]
    rewards = step.preference or {}
    if "reward_margin" in rewards:
        parts.append(f"reward margin {rewards['reward_margin']:.3g}")
    if "reward_accuracy" in rewards:
        parts.append(f"reward accuracy {100 * rewards['reward_accuracy']:.0f} %")
    if step.upload_bytes:
        parts.append(f"uploads {step.upload_bytes / step.step_s / 1e9:.1f} GB/s")
    if step.device_peak_bytes:
        parts.append(f"device peak {step.device_peak_bytes / GIB:.2f} GiB")
    return ", ".join(parts)


def _host_words(state: DashboardState) -> list[str]:
    sample = state.sample
    if sample is None:
        return []
    text = (
        f"host memory: {sample.host_used_bytes / GIB:.1f} of {sample.host_total_bytes / GIB:.3g} GiB used, "
        f"this program {sample.process_bytes / GIB:.1f} GiB"
    )
    waiting = ", ".join(f"{name} {count}" for name, count in sample.queues)
    return [f"{text}; transfers that wait: {waiting}" if waiting else text]


def _worker_words(worker: WorkerView) -> str:
    sample, parts = worker.sample, [worker.device]
    if worker.utilization is not None:
        parts.append(f"busy {100 * worker.utilization:.0f} %, mean {100 * worker.mean_utilization.value:.0f} %")
    if sample.used_bytes is not None and sample.total_bytes:
        parts.append(f"{sample.used_bytes / GIB:.1f} of {sample.total_bytes / GIB:.0f} GiB")
    if sample.upload_bytes_per_s is not None:
        parts.append(f"upload {sample.upload_bytes_per_s / 1e9:.1f} GB/s")
    if sample.download_bytes_per_s is not None:
        parts.append(f"download {sample.download_bytes_per_s / 1e9:.1f} GB/s")
    if sample.temperature_c is not None:
        parts.append(f"{sample.temperature_c:.0f} degrees Celsius")
    if sample.power_w is not None:
        parts.append(f"{sample.power_w:.0f} W")
    return ", ".join(parts)


def _waiting_words(state: DashboardState) -> list[str]:
    found = longest_waiting(state)
    if found is None:
        return []
    causes = sorted(found.by_cause_s, key=lambda cause: -found.by_cause_s[cause])
    return [found.text(), *(f"  {cause}: {CAUSES[cause]}" for cause in causes)]
