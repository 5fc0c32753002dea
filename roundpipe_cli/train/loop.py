"""The training loop: batches in, steps through the engine, updates on the host, metrics, checkpoints, result."""

from __future__ import annotations

import gc
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from roundpipe_cli.data.batching import BatchSampler, Grouping, Position, RowBatch
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import GradientOptions
from roundpipe_cli.engine.prepared import in_order_of_need
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.engine.weights import UnusedHeap
from roundpipe_cli.errors import OutOfDeviceMemoryError, StoppedError, redact_values
from roundpipe_cli.events import DeviceLost, Event, Notice, Paused, Phase, RunFinished, StepFinished, Tell, run_clock
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.planning.question import ENOUGH_PER_WORKER
from roundpipe_cli.recipe.schema import Recipe, plain_data
from roundpipe_cli.train.adapt import FiniteGuard, Fit, LostDevices, resumed_fit
from roundpipe_cli.train.auto_cache import make_auto_cache
from roundpipe_cli.train.batches import describe_order, log_rows, make_microbatches, make_sampler
from roundpipe_cli.train.build import PageLocks, make_engine, make_planner
from roundpipe_cli.train.checkpoint.output_dir import EVAL_NAME, METRICS_NAME
from roundpipe_cli.train.checkpoint.reading import Checkpoint
from roundpipe_cli.train.checkpoint.resume import SavedEvaluation, check_state, check_tensors, run_state
from roundpipe_cli.train.checkpoint.rewind import RECORDS_KEY, RowDigest, copy_records, rewind
from roundpipe_cli.train.checkpoint.writing import Saver, Snapshot, State
from roundpipe_cli.train.evaluate import Evaluator, is_due
from roundpipe_cli.train.machines import Machines
from roundpipe_cli.train.monitor.telemetry import (
    EventRecorder,
    Telemetry,
    append_row,
    in_lanes,
    metrics_row,
    run_started,
    step_figures,
    step_timeline,
    sync_rows,
)
from roundpipe_cli.train.monitor.trackers import Trackers
from roundpipe_cli.train.nodes.group import Nodes
from roundpipe_cli.train.optim.optimizer import make_optimizer
from roundpipe_cli.train.optim.updater import Updater
from roundpipe_cli.train.preference import Scorer, add_references, make_pairs, pair_metrics
from roundpipe_cli.train.prepare.devices import updater_threads
from roundpipe_cli.train.prepare.learning_rate import describe_change, describe_schedule, num_steps_of, rate_schedule_of
from roundpipe_cli.train.prepare.setup import Setup
from roundpipe_cli.train.result.export import write_run_card
from roundpipe_cli.train.result.finish import RunLog, make_report, write_report, write_trace
from roundpipe_cli.train.signals import EXIT_CODES, Reporting, StopSignals
from roundpipe_cli.units import counted, shown_step

RunStep = Callable[[Engine, int, list[Microbatch]], StepResult]


def longest_batches(grouping: Grouping, num_rows: int) -> list[RowBatch]:
    """Microbatches of at most `num_rows` rows (or pairs), the longest of all, grouped as those of a step are."""
    order: list[int] = np.argsort(-grouping.lengths, kind="stable")[:num_rows].tolist()
    return grouping.group([(index,) for index in order])


NAMED_BUBBLE = 0.15
"""Predicted share of waiting above which a run names it before its first step."""


def describe_waiting(setup: Setup, planner: AdaptivePlanner, sampler: BatchSampler) -> str | None:
    """Words about workers that will wait since a step has few microbatches, and what gives them more."""
    recipe, workers = setup.recipe, len(setup.devices)
    position, enough = sampler.position, ENOUGH_PER_WORKER * len(setup.devices)
    count = len(sampler.next_step())
    sampler.seek(position)
    if workers == 1 or recipe.pipeline.num_chunks > 1 or count >= enough:
        return None
    bubble = planner.expected_bubble(count)
    if bubble <= NAMED_BUBBLE:
        return None
    size = max(1, recipe.rows_per_step // enough) if recipe.token_budget is not None else recipe.micro_batch_size
    steps = max(enough, recipe.rows_per_step // size)
    rows = size * steps
    words = [f"gradient_accumulation_steps={steps}"]
    if recipe.token_budget is not None:
        words = ["micro_batch_tokens=null", f"micro_batch_size={size}", *words]
    remedy = f"{' '.join(words)} makes them wait less"
    if rows > recipe.rows_per_step:
        remedy += f", with {counted(rows, 'row')} a step in place of {recipe.rows_per_step}"
    if rows > sampler.num_sequences(0):
        remedy = "the data have too few rows for more"
    few = f"{counted(count, 'microbatch')} for {counted(workers, 'worker')}"
    return f"a step has {few}, which will wait {bubble:.0%} of the time (predicted): {remedy}"


CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""
PAUSE_LOOK_S = 0.1
TRACE_NAME = "trace.json"


class Trainer:
    """One run over one setup."""

    def __init__(
        self,
        setup: Setup,
        output_dir: Path,
        signals: StopSignals,
        reporting: Reporting,
        *,
        machines: Machines | None = None,
        recorder: EventRecorder | None = None,
        lost_at: str = "",
    ) -> None:
        """
        Args:
            recorder: passes events on to `reporting.tell`, and knows what was said before; None: a new one.
            lost_at: see `Start`.
        """
        recipe = setup.recipe
        self._clock = recorder.clock if recorder else run_clock()
        self._recorder = recorder or EventRecorder(output_dir, self._clock, reporting.tell)
        self._listener: Tell = self._recorder
        self._machines = machines or Machines(Nodes())
        self.setup = setup
        self.output_dir = output_dir
        self._signals = signals
        self._reporting, self._lost_at = reporting, lost_at
        self._log = RunLog(trace=reporting.trace)
        self._saved_step = 0
        self._seen = SavedEvaluation()
        self._heap = UnusedHeap()
        self.sampler = make_sampler(setup)
        self._say(*describe_order(setup, self.sampler))
        self.num_steps = num_steps_of(recipe, self.sampler)
        self._learning_rate = rate_schedule_of(recipe, self.num_steps)
        self._say(*describe_schedule(self._learning_rate, recipe, self.num_steps))
        self.optimizer = make_optimizer(setup.store, recipe, setup.model, self._machines.elsewhere)
        num_threads = updater_threads(setup.devices)
        order = in_order_of_need(setup.store, setup.split)
        shards = self._machines.shards
        self._updater = Updater(setup.store, self.optimizer, num_threads=num_threads, shards=shards, order=order)
        self._fit = Fit.of(recipe)
        self._guard = FiniteGuard(recipe, setup.dataset)
        self._planner = make_planner(setup)
        self._say(self._planner.notice)
        self._auto_cache = make_auto_cache(setup, self._planner, self._tell)
        needs_norm = recipe.max_grad_norm > 0 or recipe.dtype == "float16"
        may_compute_again = recipe.on_oom == "adapt" or recipe.on_nonfinite == "skip" or self._auto_cache.is_open
        self._updates_early = self._machines.is_only and not (needs_norm or may_compute_again)
        """Whether a layer is updated as soon as its gradient is complete."""
        self._planner.schedule(recipe.microbatches_per_step)  # impossible stages are refused now
        if self._machines.is_only:
            self._say(describe_waiting(setup, self._planner, self.sampler))

    @property
    def recipe(self) -> Recipe:
        return self.setup.recipe

    def _tell(self, event: Event) -> None:
        """Report an event: to the screen, to events.jsonl, and to the trackers once they are open."""
        self._listener(event)

    def _say(self, *texts: str | None) -> None:
        for text in filter(None, texts):
            self._tell(Notice(text))

    def _tell_lost(self, event: DeviceLost | Notice) -> None:
        if isinstance(event, DeviceLost) and event.left:
            self._log.lost.append((len(self._log.rows), event))
            self._machines.nodes.lines.say("lost", redact_values([len(self._log.rows), asdict(event)]))
            self._signals.ask_to_save()
        self._tell(event)

    # -- run -----------------------------------------------------------------------------------------------------

    def run(self, checkpoint: Checkpoint | None) -> None:
        """Train from the start or from `checkpoint` to the end, or to the next signal."""
        first_step = self._restore(checkpoint) if checkpoint else 0
        metrics_path = self.output_dir / METRICS_NAME
        if self._machines.nodes.is_first:
            say = self._say
            if checkpoint is not None and not checkpoint.folder.parent.samefile(self.output_dir):
                copy_records(checkpoint.folder, checkpoint.meta, self.output_dir, say)
            self._log.earlier_losses = rewind(self.output_dir, first_step, num_steps=self.num_steps, say=say)
        told = self.recipe if self._machines.nodes.is_first else replace(self.recipe, report_to=())
        with (
            self._recorder.opened(first_step) as recorder,
            Trackers(told, self.output_dir, first_step, recorder) as trackers,
        ):
            self._listener = trackers
            self._train(first_step, metrics_path)

    def _train(self, first_step: int, metrics_path: Path) -> None:
        setup = self.setup
        self._tell(Phase("starting the workers"))
        engine = make_engine(setup)
        if self._fit.recompute != self.recipe.pipeline.recompute:
            engine.use_less_memory()
        size = self.recipe.microbatches_per_step
        locks = PageLocks(setup.store, setup.devices, self.recipe.weights, self._tell)
        self._lost = LostDevices(
            engine,
            self._planner,
            self._auto_cache,
            setup.devices,
            locks=locks,
            stops=self.recipe.on_device_loss == "stop",
            lost_at=self._lost_at,
            refused=self._reporting.refused,
            tell=self._tell_lost,
            clock=self._clock,
        )
        self._references = Scorer(engine, self._planner, size, lambda: False, lost=self._lost)
        alone = self._machines.is_only
        stopping = lambda: alone and self._signals.requested is not None  # noqa: E731
        scorer = Scorer(engine, self._planner, size, stopping, lost=self._lost)
        evaluator = self.evaluator = Evaluator(
            setup,
            scorer,
            self.output_dir,
            self.num_steps,
            seen=self._seen,
            tell=self._tell,
            agree=self._machines.nodes.from_first,
            ends_epoch=lambda: self.sampler.position.starts_epoch,
        )
        self._rows = RowDigest(metrics_path)
        self._log.start()
        keep, saved = self.recipe.save_total_limit, lambda _: evaluator.prune()  # noqa: E731
        self._saver = Saver(self.output_dir, keep, self._tell, saved, failed=self._machines.nodes.fail)
        self._updater.before_layer = self._saver.before_layer
        with (
            locks,
            engine,
            self._updater,
            self._saver,
            metrics_path.open("ab", buffering=0) as self._metrics,
            self._machines.sharing(engine) as self._sharing,
        ):
            self._machines.check_weights(setup.store)
            self._machines.nodes.heed(lambda: self._signals.requested)
            self._signals.guard()
            self._tell(run_started(setup, self._clock(), first_step, self.num_steps))
            with Telemetry(engine, setup.devices, self._tell, self._clock, live=self._reporting.live):
                done = first_step
                if not self._is_last(done):
                    self._try_longest(engine, done)
                if done and evaluator.is_owed(done):  # a signal came first
                    evaluator.evaluate(done)
                    self._at_border(done)
                while not self._is_last(done):
                    self._one_step(engine, done)
                    done += 1
                    if evaluator.is_owed(done):
                        evaluator.evaluate(done)
                    self._at_border(done)
        self._machines.nodes.finish()
        self._write_result(done)

    def _write_result(self, done: int) -> None:
        predicted = self._predicted()
        self._tell(Phase("writing the result"))
        if self._log.timelines:
            write_trace(self.output_dir / TRACE_NAME, list(self._log.timelines))
        files = self.evaluator.save_result() if self._machines.nodes.is_first else []
        for rank, (before, values) in self._machines.nodes.lost:
            event = DeviceLost(**values | {"device": f"{values['device']} of machine {rank + 1}"})
            self._log.lost.append((before, event))
        report = make_report(self.setup, self._log, predicted, num_steps=done, moments_bytes=self.optimizer.num_bytes)
        report |= {"files": files, "skipped_steps": self._guard.num_skipped, "fit": self._fit.to_json(self.recipe)}
        write_report(self.output_dir, report | {"evaluation": self.evaluator.report()})
        if self._machines.nodes.is_first:
            write_run_card(self.output_dir)
        self._tell(RunFinished(str(self.output_dir), done, report["seconds"]))

    def _predicted(self) -> dict[str, float]:
        """Prediction of a full step, made before it was measured."""
        num_microbatches = self._log.num_microbatches or self.recipe.microbatches_per_step
        figures = dict(self._planner.predicted(num_microbatches) or {})
        if figures and (tokens := self._log.tokens) is not None:
            figures["tokens_per_s"] = tokens / figures["step_s"]
        planned, holds_all = self._reporting.planned, self._auto_cache.holds_all
        longest, schedules = self._log.longest_row, self._planner.schedules
        recipe = replace(self.recipe, max_seq_length=min(longest or 0, self.recipe.max_seq_length))
        needs = planned(recipe, schedules, holds_all) if planned and longest else []
        for need in needs:  # the longest step needs most: a short step has other stages
            figures |= {name: max(num_bytes, figures.get(name, 0.0)) for name, num_bytes in need.items()}
        return figures

    def _at_border(self, done: int) -> None:
        """Between two steps: save where it is due or asked for, wait while paused, stop if asked (StoppedError)."""
        last, ends_epoch = self._is_last(done), self.sampler.position.starts_epoch
        due = last or is_due(self.recipe.save_steps, done, self.num_steps, ends_epoch=ends_epoch)
        held = False
        self._heap.give_back()
        self._saver.poll()
        if due:
            self._save(done)
        while True:
            stop, paused, asked = self._asked()
            if asked or stop:
                self._save(done)
            if not paused or stop or last:
                break
            if not held:
                self._tell(Paused(done, True))
            held = True
            time.sleep(PAUSE_LOOK_S)
        if held:
            self._tell(Paused(done, False))
        if last or stop:
            self._saver.wait()
        if stop and not last:
            self._machines.nodes.leave()
            how = "stopped" if self._signals.asked_by_key else f"stopped by {stop.name}"
            hint = "the same command with --resume continues"
            if self._machines.nodes.is_first:  # elsewhere nothing is kept
                folder = shlex.quote(str(self.output_dir))
                hint += f"; `roundpipe generate {folder}` tries it as it is, `export` takes it"
            where = f"{how} after step {done} of {self.num_steps}, with a checkpoint"
            raise StoppedError(where, exit_code=EXIT_CODES[stop], hint=hint)

    def _asked(self) -> tuple[signal.Signals | None, bool, bool]:
        """The signal that asks for a stop, whether the run is held, and whether a checkpoint is asked for: what one
        machine is told holds for all."""
        asked = [self._signals.requested or 0, self._signals.paused, self._signals.take_save()]
        number, paused, save = self._machines.nodes.most(asked)
        return signal.Signals(number) if number else None, bool(paused), bool(save)

    def _is_last(self, done: int) -> bool:
        return (done >= self.num_steps or self.evaluator.exhausted) and not self.evaluator.is_owed(done)

    # -- one step ------------------------------------------------------------------------------------------------

    def _try_longest(self, engine: Engine, done: int) -> None:
        """Compute a step of the longest rows with the stages of later steps, where the recipe says so, and discard it:
        a device that is too small shows at once, not hours later, and every bit of the run is as without it."""
        asked, recipe, grouping = self.recipe.check_longest_rows, self.recipe, self.sampler.grouping
        if asked is False or (asked == "auto" and self.setup.devices[0] == "cpu"):
            return
        if recipe.packs or not self._machines.is_only:
            if asked is True:
                why = "packed sequences are about as long" if recipe.packs else "there are several machines"
                self._say(f"check_longest_rows: no step is tried before the first one, since {why}")
            return
        assert grouping is not None
        self._tell(Phase("computing a step of the longest rows"))
        self._compute(engine, done, longest_batches(grouping, recipe.rows_per_step), self._run_discarded)
        text = f"the longest rows ({grouping.lengths.max()} tokens) fit: a step of them was computed and discarded"
        self._say(f"{text}; check_longest_rows=false begins without it")

    def _run_discarded(self, engine: Engine, step: int, microbatches: list[Microbatch]) -> StepResult:
        def run() -> StepResult:
            return engine.run_step(microbatches, self._planner.expected(len(microbatches)), step=step, version=step)

        return self._lost.again(run, "the step of the longest rows")

    def _one_step(self, engine: Engine, step: int) -> None:
        started_s = time.monotonic()
        learning_rate = self._learning_rate(step)
        batches = self.sampler.next_step()
        log_rows(self.setup.dataset.rows, shown_step(step), batches)
        if self._updates_early:
            self._updater.begin_early(step, learning_rate)
        result, microbatches, num_tokens = self._compute(engine, step, batches)
        if not self._machines.is_only:
            self._updater.wait()
        self._auto_cache.observe(engine, result)
        if not self._planner.is_settled:
            self._planner.observe(result.timeline)
        self._log.computed(result, microbatches)
        self._say(*result.notices)
        self._tell(step_timeline(result, shown_step(step), self._clock))
        if (poison := self._updater.poison(step)) is not None:  # a fault point's
            result = replace(result, gradient_norm=poison)
        if self._guard.is_finite(result):
            self._update(step, result.gradient_norm, learning_rate)
        else:
            self._guard.skip(step, batches, result, self._tell)
            self._updater.skip(step)
        # An update beside a step whose layers are timed would be in their times.
        may_overlap = self._machines.is_only and self._planner.is_settled
        if not may_overlap or self._is_last(step + 1) or self.evaluator.is_owed(step + 1):
            self._updater.wait()
        step_s = time.monotonic() - started_s
        event = StepFinished(
            step=shown_step(step),
            num_steps=self.num_steps,
            learning_rate=learning_rate,
            utilization=in_lanes(result, len(self.setup.devices)),
            eta_s=self._log.eta_s(step_s, self.num_steps - step - 1),
            epoch=round(self.sampler.epochs_done, 4),
            preference=pair_metrics(result.rewards, microbatches) if result.rewards else None,
            **step_figures(result, num_tokens, step_s),
        )
        self._log.rows.append(event)
        self._write_row(event)
        self._tell(event)

    def _compute(
        self, engine: Engine, step: int, batches: list[RowBatch], run: RunStep | None = None
    ) -> tuple[StepResult, list[Microbatch], int]:
        """One step's forward and backward, with its microbatches and tokens; again with less, where it adapts."""
        run = run or self._run_step
        while True:
            try:
                microbatches, num_tokens = self._microbatches(step, batches)
                return run(engine, step, microbatches), microbatches, num_tokens
            except OutOfDeviceMemoryError as error:
                spare = self._auto_cache.spare if self._machines.is_only and not self._updates_early else None
                smaller = self._fit.smaller(shown_step(step)) if self.recipe.on_oom == "adapt" else None
                if spare is None and smaller is None:
                    raise
                problem = error.problems[0]
                cause = f"{problem.what} ({problem.where}: {problem.found})"
                error.__cause__ = None  # its frames hold tensors of the step
            gc.collect()
            self._auto_cache.give_up(engine)
            if spare is not None or smaller is None:  # an optional use of memory must not end a run
                self._say(f"step {shown_step(step)}: {cause}; computing it again without {spare}")
                continue
            self._fit = smaller
            engine.use_less_memory()
            lines = ", ".join(f"{key}: {value}" for key, value in smaller.recipe_lines(self.recipe).items())
            text = "and all that follows, with less; to have it so from the start, write"
            self._say(f"step {shown_step(step)}: {cause}; computing it again, {text} {lines}")

    def _run_step(self, engine: Engine, step: int, microbatches: list[Microbatch]) -> StepResult:
        scale = self._guard.loss_scale
        own, part = self._sharing.share_of(microbatches)
        on_gradient = self._sharing.begin(self._updater.gradient_complete if self._updates_early else None)

        def run() -> StepResult:
            return engine.run_step(
                own,
                self._planner.schedule(len(own)),
                step=step,
                version=step,
                part=part,
                gradients=GradientOptions(scale, on_gradient, frozenset(self._sharing.given)),
            )

        result = self._lost.again(run, f"step {shown_step(step)}", lasting=self._lasting)
        return self._sharing.finish(result, scale)

    def _lasting(self, hangs: bool) -> str | None:
        """Why a step that a device was lost in cannot be computed again: what it did to weights or other machines."""
        if self._updates_early and self._updater.has_begun:
            return "max_grad_norm: 0 updates layers before a step ends, and some of this step have been"
        if self._updates_early and hangs:
            return "max_grad_norm: 0 updates layers before a step ends, which the device that hangs may still begin"
        if hangs and self._sharing.given:
            return "other machines have gradients of this step that the device may still write"
        return None

    def _microbatches(self, step: int, batches: list[RowBatch]) -> tuple[list[Microbatch], int]:
        """A step's microbatches, DPO's pairs with what the reference says of them, and the number of tokens."""
        batches = self._fit.divide(batches, self.sampler.grouping)
        if self.setup.rejected is None:
            return make_microbatches(self.setup, batches)
        microbatches, num_tokens = make_pairs(self.setup, batches)
        if self.recipe.objective == "dpo":
            self._updater.wait()
            microbatches = add_references(self._references, microbatches, step)
        return microbatches, num_tokens

    def _write_row(self, event: StepFinished) -> None:
        row = metrics_row(event)
        if self._fit.first_step == event.step and (segment := self._fit.to_json(self.recipe)):
            row["segment"] = segment  # from here the loss curve has other microbatches
        if self._guard.num_in_a_row:
            row["skipped"] = True
        self._rows.add(append_row(self._metrics, self.output_dir / METRICS_NAME, row))

    def _update(self, step: int, gradient_norm: float, learning_rate: float) -> None:
        if self._updates_early:
            return
        factor = 1.0 / self._guard.loss_scale
        if self.recipe.max_grad_norm > 0:
            factor *= min(1.0, self.recipe.max_grad_norm / (gradient_norm + CLIP_EPSILON))
        self._updater.begin(step, learning_rate, factor)
        self._guard.updated()

    # -- state ---------------------------------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        """Begin a checkpoint after `step` steps, once."""
        if self._saved_step == step:
            return
        self._saved_step = step
        self._machines.check_weights(self.setup.store)
        if not self._machines.saves:
            return
        started_s = time.monotonic()
        sync_rows(self._metrics, self.output_dir / METRICS_NAME)
        meta = {
            **run_state(self.setup),
            "loss_scale": self._guard.loss_scale,
            "training_s": self._log.seconds,
            "num_steps": self.num_steps,
            "num_updates": self.optimizer.num_updates,
            "steps_since_overflow": self._guard.num_updates,
            "data_position": self.sampler.position.to_json(),
            "evaluation": self.evaluator.state(),
            "fit": self._fit.to_json(self.recipe),
            "skipped_steps": self._guard.num_skipped,
            RECORDS_KEY: {METRICS_NAME: self._rows.state(), EVAL_NAME: self.evaluator.rows.state()},
        }
        layers = self.optimizer.layers[:: -1 if self._updates_early else 1]
        ready = partial(self.setup.store.wait_for, version=step)
        self._saver.begin(self._machines.own_part(Snapshot(step, layers, self._layer_state, ready, meta)), started_s)

    def _layer_state(self, layer: int) -> State:
        store = self.setup.store
        state = [("masters", place.name, store.master(place.name)) for place in store.layouts[layer].trainable]
        return state + [("moments", name, tensor) for name, tensor in self.optimizer.moments_of(layer)]

    def _restore(self, checkpoint: Checkpoint) -> int:
        """Take up the run where the checkpoint was made; returns its step."""
        meta, state, store = checkpoint.meta, check_state(checkpoint), self.setup.store
        own = {name: store.master(name) for name in sorted(store.trainable_names)}
        check_tensors(checkpoint, {"masters": own, "moments": dict(self.optimizer.moments())})
        for name in own:
            store.set_parameter(name, checkpoint.tensors["masters"][name])
        store.set_version(checkpoint.step)
        self.optimizer.load(checkpoint.tensors.get("moments", {}), state.num_updates)  # sgd keeps none
        checkpoint.tensors.clear()
        guard = self._guard
        guard.loss_scale, guard.num_updates = state.loss_scale, state.steps_since_overflow
        guard.num_skipped, self._log.earlier_s = state.skipped_steps, state.training_s
        self._seen = state.evaluation
        others = meta["recipe"].get("eval_datasets") != plain_data(self.recipe)["eval_datasets"]
        if self._seen.best_step is not None and others:
            self._say("eval_datasets are others than before: the search for the best evaluation begins anew")
            self._seen = SavedEvaluation(last_step=self._seen.last_step, last_loss=self._seen.last_loss)
        self._fit = resumed_fit(meta["fit"], self.recipe)
        if self._fit.recipe_lines(self.recipe):
            self._auto_cache.keep_usual_stages()
        self.sampler.seek(Position(**asdict(state.data_position)))
        self._say(f"resuming after step {checkpoint.step} from {checkpoint.folder}")
        old_steps = state.num_steps
        if old_steps != self.num_steps:
            old, new = rate_schedule_of(self.recipe, old_steps), self._learning_rate
            self._say(describe_change(old, new, step=checkpoint.step, old_steps=old_steps, num_steps=self.num_steps))
        return checkpoint.step
