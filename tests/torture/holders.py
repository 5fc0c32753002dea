"""Two runs and one output directory."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import time

from tests.torture.arena import Arena, Seen, assert_identical, died, go_on, saved, start

REFUSED_WITHIN_S = 2.0
SLOW = {"ROUNDPIPE_FAULT": "optimizer:slow=0.05"}


def two_at_once(arena: Arena, count: int) -> Seen:
    """Two starts at the same moment, a third beside the winner; then the winner is killed and a fourth goes on."""
    reference, within_s = arena.reference(), REFUSED_WITHIN_S * arena.patience
    seconds = [0.0]

    def attempt(index: int, draw: random.Random) -> None:
        work = arena.workspace()
        both = [start(work, environment=SLOW), start(work, environment=SLOW)]
        while all(running.process.is_alive() for running in both):
            time.sleep(0.005)
        ended = 0 if not both[0].process.is_alive() else 1
        loser, winner = both[ended], both[1 - ended]
        refusals = [(loser.finish(), winner)]
        winner.wait_until(lambda: bool(saved(work)))
        winner.kill(signal.SIGSTOP)  # so that it cannot end before the third has asked
        refusals.append((start(work, "--resume").finish(), winner))
        for refused, holder in refusals:
            refused.expect(3)
            assert f"process {holder.process.pid} on host {socket.gethostname()}" in refused.err, refused.err
            assert refused.seconds < within_s, f"refused after {refused.seconds:.2f} s"
            seconds.append(refused.seconds)
        if index % 2:
            winner.kill(signal.SIGKILL)
            died(winner)
            go_on(work)
        else:
            winner.kill(signal.SIGCONT)
            winner.finish().expect(0)
        assert_identical(work, reference)
        shutil.rmtree(work)

    failures = arena.each(count, attempt)
    return Seen(count, failures, f"refused within {max(seconds):.2f} s")
