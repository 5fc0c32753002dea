"""Gradients between machines: when each layer's are there in a step, and how long the step waits for their sums.

    compute     | forward | backward: layer N ... 1 |                       update | next step
    network     |              | N | N-1 |  ...  | 1 | tied, embedding |

A run sums one layer after the other (`train/machines.py`), as soon as it is complete: after its last microbatch, which
is in the step's last round. Updates wait for all sums, the next step for all updates. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roundpipe_cli.costs.analytic import Case, trainable_params
from roundpipe_cli.planning.compare import StageCut
from roundpipe_cli.schedule.timeline import DOWN, Timeline, makespan_s


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes and seconds of one machine's exchange with the others in a step."""

    num_bytes: int = 0
    """Bytes that it sends, and receives: gradients, and new weights where the optimizer's state is shared out."""
    network_s: float = 0.0
    """Seconds in which the network carries them."""
    waiting_s: float = 0.0
    """Part of them in which nothing is computed or updated."""
    update_s: float = 0.0
    """Seconds of the updates, which run beside nothing but the sending of new weights."""


def exchange_of(case: Case, cut: StageCut, timeline: Timeline) -> Exchange:
    """The exchange of a step on several machines.

    Args:
        timeline: of a step without updates, or of its last rounds.
    """
    settings, machine, count = case.settings, case.hardware, case.hardware.machines
    assert machine.network_bytes_per_s is not None
    params, last = trainable_params(case.architecture, settings), len(case.costs.layers) - 1
    trainable = sum(params)
    ends_s, end_s = [0.0] * len(cut.backward_stages), makespan_s(timeline)
    for one in timeline.intervals:
        if one.lane == DOWN and one.microbatch < 0:  # gradients; boundary tensors have a microbatch
            ends_s[one.stage] = max(ends_s[one.stage], one.end_s)
    late = {0, last} if case.architecture.tied else {0}
    complete_s = dict.fromkeys(late, end_s)
    for (first, end), stage_s in zip(cut.backward_stages, ends_s, strict=True):
        complete_s |= {layer: stage_s for layer in range(first, end + 1) if layer not in late}
    if settings.method == "full" and not case.architecture.tied:  # of the table rows of the step's tokens
        tokens = count * settings.num_microbatches * settings.tokens_per_microbatch
        share = tokens / case.architecture.vocab_size
        params[0] = int(share * params[0]) if share <= 0.5 else params[0]
    around = 2 * (count - 1) / count  # parts of the sum go round once, and the sums once more
    now_s = sent = 0.0
    for layer in [*(layer for layer in range(last, -1, -1) if layer not in late), *sorted(late)]:
        size = around * 4 * params[layer]
        now_s = max(now_s, complete_s[layer]) + size / machine.network_bytes_per_s if size else now_s
        sent += size
    update_s = sum(layer.optimizer_s for layer in case.costs.layers) / settings.num_shards
    turns = math.ceil(math.log2(settings.num_shards))  # from each owner by way of others, twice as many after each
    weights = settings.dtype_bytes * trainable * turns
    waiting_s = max(0.0, now_s - end_s) + max(0.0, weights / machine.network_bytes_per_s - update_s)
    return Exchange(int(sent + weights), (sent + weights) / machine.network_bytes_per_s, waiting_s, update_s)
