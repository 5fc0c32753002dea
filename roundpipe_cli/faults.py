"""Fault points: named places where a test can make the program fail, hang, slow down or go bad.

They do nothing unless the environment variable `ROUNDPIPE_FAULT` is set when the first fault point is passed. Its form:

    POINT:ACTION[:TRIGGER=N]...[,POINT:ACTION...]

    ckpt_writer:slow=0.2             every passage of the checkpoint writer takes 0.2 s longer
    compute:raise:step=3             every compute of step 3 raises
    work:slow=0.1:worker=1           worker 1 takes 0.1 s longer for every layer, as a slower device would
    compute:nan:step=3:nth=2         the second compute of step 3 yields NaN
    upload:raise=MemoryError:nth=1   the first upload raises a MemoryError
    upload:raise=DeviceFault:nth=1   the first upload fails as on a device that is lost

Actions: `raise` (a `FaultError`, or the exception named), `hang`, `nan`, `inf`, `kill` (SIGKILL to this process),
`stop` (SIGSTOP: the process waits for SIGCONT, so that a tracer can be put to it), `slow=SECONDS`. Triggers: `nth=N`
(from 1, counted over the passages that the other triggers match) and any number that the point passes on (`step=`,
`microbatch=`, `worker=` ...), as the code counts it: the engine's first step is 0. All triggers must match.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from dataclasses import dataclass, field

from roundpipe_cli.errors import RefusedError

ENVIRONMENT_VARIABLE = "ROUNDPIPE_FAULT"
POINTS = (
    *("tokenize", "load"),
    *("prefetch", "upload", "compute", "work", "download", "answer", "optimizer", "update"),
    *("eval", "ckpt_writer", "export"),
)
"""Fault points, in the order in which a run passes them."""
ACTIONS = ("raise", "hang", "nan", "inf", "kill", "stop", "slow")


class FaultError(RuntimeError):
    """The failure that a fault point was asked to produce."""


class DeviceFault(RuntimeError):  # noqa: N818 - named as the trigger is
    """The failure of a device, as its driver reports it."""


class FaultExit(BaseException):
    """A failure that `except Exception` does not catch."""


_RAISED: dict[str, type[BaseException]] = {
    kind.__name__: kind for kind in (FaultError, DeviceFault, FaultExit, MemoryError, OSError, KeyboardInterrupt)
}


@dataclass
class _Rule:
    """One `POINT:ACTION:TRIGGER...` with its count of matching passages."""

    text: str
    point: str
    action: str
    argument: str | None
    triggers: dict[str, int]
    nth: int | None
    num_matched: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fires(self, ids: dict[str, int]) -> bool:
        """Whether this passage is the one asked for; counts it."""
        if any(ids.get(key) != value for key, value in self.triggers.items()):
            return False
        with self.lock:
            self.num_matched += 1
            return self.nth is None or self.num_matched == self.nth


_rules_of: dict[str, list[_Rule]] | None = None
"""Rules by fault point; None until the environment has been read, empty when the variable is unset."""


def fault(point: str, **ids: int) -> float | None:
    """Pass the fault point `point`. Returns None, or the number (NaN or infinity) that is to take the result's place.

    Raises:
        FaultError: asked for by `raise` (or the exception that `raise=NAME` names).
        RefusedError: the environment variable cannot be understood.
    """
    rules_of = _rules_of if _rules_of is not None else load_faults()
    if not rules_of:
        return None
    poison: float | None = None
    for rule in rules_of.get(point, ()):
        if rule.fires(ids):
            poison = _act(rule, point, ids)
    return poison


def load_faults() -> dict[str, list[_Rule]]:
    """Read the environment variable (again). `fault` calls this once; tests call it after changing the variable."""
    global _rules_of
    rules_of: dict[str, list[_Rule]] = {}
    for text in os.environ.get(ENVIRONMENT_VARIABLE, "").split(","):
        if text.strip():
            rule = _parse(text.strip())
            rules_of.setdefault(rule.point, []).append(rule)
    _rules_of = rules_of
    return rules_of


def _act(rule: _Rule, point: str, ids: dict[str, int]) -> float | None:
    if rule.action == "slow":
        time.sleep(float(rule.argument or 0))
    elif rule.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif rule.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rule.action == "hang":
        threading.Event().wait()
    elif rule.action == "raise":
        passage = ", ".join(f"{key} {value}" for key, value in ids.items())
        raise _RAISED[rule.argument or "FaultError"](f"fault asked for by {rule.text!r} at {point} ({passage})")
    else:
        return math.nan if rule.action == "nan" else math.inf
    return None


def _parse(text: str) -> _Rule:
    point, _, rest = text.partition(":")
    action_text, *trigger_texts = rest.split(":")
    action, _, argument = action_text.partition("=")
    triggers: dict[str, int] = {}
    try:
        if point not in POINTS:
            raise ValueError(f"no fault point {point!r} (there are {', '.join(POINTS)})")
        if action not in ACTIONS:
            raise ValueError(f"no action {action!r} (there are {', '.join(ACTIONS)})")
        if action == "slow":
            float(argument)
        elif argument and not (action == "raise" and argument in _RAISED):
            raise ValueError(f"{action!r} does not take {argument!r}")
        for trigger in trigger_texts:
            key, _, value = trigger.partition("=")
            triggers[key] = int(value)
    except ValueError as error:
        raise RefusedError(
            f"{ENVIRONMENT_VARIABLE} cannot be understood: {error}",
            found=repr(text),
            expected="POINT:ACTION[:TRIGGER=N]..., for instance compute:raise:step=3",
            hint=f"unset {ENVIRONMENT_VARIABLE}: it serves tests only",
        ) from error
    return _Rule(text, point, action, argument or None, triggers, triggers.pop("nth", None))
