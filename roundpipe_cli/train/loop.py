"""The training loop: batches in, steps through the engine, updates on the host, metrics, checkpoints, result."""

from __future__ import annotations

import shlex
import signal
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from roundpipe_cli.errors import StoppedError, redact_values
from roundpipe_cli.events import (
    EVAL_NAME,
    METRICS_NAME,
    DeviceLost,
    Event,
    Notice,
    Paused,
    Phase,
    RunFinished,
    StepFinished,
    Tell,
    run_clock,
)
from roundpipe_cli.files import write_atomically
from roundpipe_cli.heap import UnusedHeap
from roundpipe_cli.recipe.load import resolved_yaml
from roundpipe_cli.recipe.schema import Recipe, plain_data
from roundpipe_cli.train.batches import describe_order, log_rows, make_sampler
from roundpipe_cli.train.build import make_engine
from roundpipe_cli.train.checkpoint.output_dir import again, named_checkpoint
from roundpipe_cli.train.checkpoint.reading import Checkpoint
from roundpipe_cli.train.checkpoint.remaining import remaining
from roundpipe_cli.train.checkpoint.resume import SavedEvaluation, check_state, check_tensors, run_state
from roundpipe_cli.train.checkpoint.rewind import RECORDS_KEY, copy_records, rewind
from roundpipe_cli.train.checkpoint.writing import Saver, Snapshot, State
from roundpipe_cli.train.evaluate import Evaluator
from roundpipe_cli.train.intervals import is_due
from roundpipe_cli.train.lost_devices import LostDevices
from roundpipe_cli.train.machines import Machines
from roundpipe_cli.train.monitor.metrics_file import MetricsFile, metrics_row
from roundpipe_cli.train.monitor.telemetry import (
    Arithmetic,
    EventRecorder,
    Telemetry,
    in_lanes,
    run_started,
    step_figures,
    step_timeline,
)
from roundpipe_cli.train.monitor.trackers import Trackers
from roundpipe_cli.train.nodes.group import Nodes
from roundpipe_cli.train.page_locks import PageLocks
from roundpipe_cli.train.preference import metrics_of
from roundpipe_cli.train.prepare.learning_rate import describe_change, describe_schedule, rate_schedule_of
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.result.model_card import write_run_card
from roundpipe_cli.train.result.report import RunLog, make_report, write_report, write_trace
from roundpipe_cli.train.signals import EXIT_CODES, Reporting, StopSignals
from roundpipe_cli.train.step_runner import StepRunner
from roundpipe_cli.units import shown_step

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
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """
        Args:
            recorder: passes events on to `reporting.tell`, and knows what was said before; None: a new one.
            checkpoint: to continue from; None: the run begins.
        """
        recipe = setup.recipe
        self._recorder = recorder or EventRecorder(output_dir, run_clock(), reporting.tell)
        self._listener: Tell = self._recorder
        self._machines = machines or Machines(Nodes())
        self.setup = setup
        self.output_dir = output_dir
        self._signals = signals
        self._reporting = reporting
        self._checkpoint = checkpoint
        self._log = RunLog(trace=reporting.trace)
        self._arithmetic = Arithmetic.of(setup, self._machines.nodes.count)
        self._saved_step = 0
        self._heap = UnusedHeap()
        self.sampler = make_sampler(setup)
        self._say(*describe_order(setup, self.sampler))
        self._rest = remaining(checkpoint, setup, self.sampler)
        self._learning_rate = rate_schedule_of(recipe, self.num_steps)
        self._say(*describe_schedule(self._learning_rate, recipe, self.num_steps))
        self.steps = StepRunner(setup, self.sampler.grouping, self._machines, self._tell)

    @property
    def recipe(self) -> Recipe:
        return self.setup.recipe

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self._rest.num_steps

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

    def run(self, lost_at: str = "") -> None:
        """Train from the start or from the checkpoint to the end, or to the next signal; `lost_at`: see `Start`."""
        checkpoint, first_step = self._checkpoint, self._rest.step
        seen = self._restore(checkpoint) if checkpoint else SavedEvaluation()
        if self._machines.nodes.is_first:
            say = self._say
            if checkpoint is not None and not checkpoint.folder.parent.samefile(self.output_dir):
                copy_records(checkpoint.folder, checkpoint.meta, self.output_dir, say)
            self._log.earlier_losses = rewind(self.output_dir, first_step, num_steps=self.num_steps, say=say)
        write_atomically(self.output_dir / "recipe.yaml", resolved_yaml(self.recipe).encode(), mode=0o644)
        told = self.recipe if self._machines.nodes.is_first else replace(self.recipe, report_to=())
        with (
            self._recorder.opened(first_step) as recorder,
            Trackers(told, self.output_dir, first_step, recorder) as trackers,
        ):
            self._listener = trackers
            self._train(seen, lost_at)

    def _train(self, seen: SavedEvaluation, lost_at: str) -> None:
        setup, first_step = self.setup, self._rest.step
        self._tell(Phase("starting the workers"))
        engine = make_engine(setup)
        locks = PageLocks(setup.store, setup.devices, self.recipe.weights, self._tell)
        lost = LostDevices(
            engine,
            self.steps.planner,
            self.steps.auto_cache,
            setup.devices,
            locks=locks,
            stops=self.recipe.on_device_loss == "stop",
            lost_at=lost_at,
            refused=self._reporting.refused,
            tell=self._tell_lost,
            clock=self._recorder.clock,
        )
        self.steps.begin(engine, lost)
        alone = self._machines.is_only
        stopping = lambda: alone and self._signals.requested is not None  # noqa: E731
        evaluator = self.evaluator = Evaluator(
            setup,
            self.steps.scorer(stopping),
            self.output_dir,
            self.num_steps,
            seen=seen,
            tell=self._tell,
            agree=self._machines.nodes.from_first,
            ends_epoch=lambda: self.sampler.position.starts_epoch,
        )
        self._log.start()
        keep, saved = self.recipe.save_total_limit, lambda _: evaluator.prune()  # noqa: E731
        self._saver = Saver(self.output_dir, keep, self._tell, saved, failed=self._machines.nodes.fail)
        self.steps.updater.before_layer = self._saver.before_layer
        with (
            locks,
            engine,
            self.steps.updater,
            self._saver,
            MetricsFile(self.output_dir / METRICS_NAME) as self._rows,
            self._machines.sharing(engine) as self.steps.sharing,
        ):
            self._machines.check_weights(setup.store)
            self._machines.nodes.heed(lambda: self._signals.requested)
            self._signals.guard()
            self._tell(run_started(setup, self._recorder.clock(), first_step, self.num_steps))
            with Telemetry(engine, setup.devices, self._tell, self._recorder.clock, live=self._reporting.live):
                done = first_step
                if not self._is_last(done):
                    self.steps.try_longest(done)
                if done and evaluator.is_owed(done):  # a signal came first
                    evaluator.evaluate(done)
                    self._at_border(done)
                while not self._is_last(done):
                    self._one_step(done)
                    done += 1
                    if evaluator.is_owed(done):
                        evaluator.evaluate(done)
                    self._at_border(done)
        self._machines.nodes.finish()
        self._write_result(done)

    def _write_result(self, done: int) -> None:
        predicted = self._predicted()
        self._signals.answer = "training is over, the result is written first", "the result"
        self._tell(Phase("writing the result"))
        if self._log.timelines:
            write_trace(self.output_dir / TRACE_NAME, list(self._log.timelines))
        files = self.evaluator.save_result() if self._machines.nodes.is_first else []
        for rank, (before, values) in self._machines.nodes.lost:
            event = DeviceLost(**values | {"device": f"{values['device']} of machine {rank + 1}"})
            self._log.lost.append((before, event))
        report = make_report(
            self.setup, self._log, predicted, num_steps=done, moments_bytes=self.steps.updater.optimizer.num_bytes
        )
        report |= {"files": files, **{key: self.steps.state()[key] for key in ("skipped_steps", "fit")}}
        write_report(self.output_dir, report | {"evaluation": self.evaluator.report()})
        if self._machines.nodes.is_first:
            write_run_card(self.output_dir)
        self._tell(RunFinished(str(self.output_dir), done, report["seconds"]))

    def _predicted(self) -> dict[str, float]:
        """Prediction of a full step, made before it was measured."""
        num_microbatches = self._log.num_microbatches or self.recipe.microbatches_per_step
        figures = dict(self.steps.planner.predicted(num_microbatches) or {})
        if figures and (tokens := self._log.tokens) is not None:
            figures["tokens_per_s"] = tokens / figures["step_s"]
        planned, holds_all = self._reporting.planned, self.steps.auto_cache.holds_all
        longest, schedules = self._log.longest_row, self.steps.planner.schedules
        recipe = replace(self.steps.recipe_now, max_seq_length=min(longest or 0, self.recipe.row_tokens))
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
            hint = f"the same command with {again(self.recipe)} continues"
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

    def _one_step(self, step: int) -> None:
        started_s = time.monotonic()
        learning_rate = self._learning_rate(step)
        batches = self.sampler.next_step()
        log_rows(self.setup.dataset.rows, shown_step(step), batches)
        result, microbatches, num_tokens = self.steps.compute(step, batches, learning_rate)
        self._log.computed(result, microbatches)
        self._say(*result.notices)
        self._tell(step_timeline(result, shown_step(step), self._recorder.clock))
        result = self.steps.update(step, batches, result, learning_rate)
        if not self.steps.may_overlap or self._is_last(step + 1) or self.evaluator.is_owed(step + 1):
            self.steps.updater.wait()
        step_s = time.monotonic() - started_s
        event = StepFinished(
            step=shown_step(step),
            num_steps=self.num_steps,
            learning_rate=learning_rate,
            utilization=in_lanes(result, len(self.setup.devices)),
            eta_s=self._log.eta_s(step_s, self.num_steps - step - 1),
            epoch=round(self.sampler.epochs_done, 4),
            preference=metrics_of(result.part_sums, microbatches) if result.part_sums else None,
            **step_figures(result, num_tokens, step_s, self._arithmetic),
        )
        self._log.rows.append(event)
        self._rows.add({**metrics_row(event), **self.steps.marks(event.step)})
        self._tell(event)

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
        self._rows.sync()
        meta = {
            **run_state(self.setup),
            **self.steps.state(),
            "training_s": self._log.seconds,
            "num_steps": self.num_steps,
            "data_position": self.sampler.position.to_json(),
            "evaluation": self.evaluator.state(),
            RECORDS_KEY: {METRICS_NAME: self._rows.state(), EVAL_NAME: self.evaluator.rows.state()},
        }
        layers = self.steps.updater.optimizer.layers[:: -1 if self.steps.updates_early else 1]
        ready = partial(self.setup.store.wait_for, version=step)
        self._saver.begin(self._machines.own_part(Snapshot(step, layers, self._layer_state, ready, meta)), started_s)

    def _layer_state(self, layer: int) -> State:
        store = self.setup.store
        state = [("masters", place.name, store.master(place.name)) for place in store.layouts[layer].trainable]
        return state + [("moments", name, tensor) for name, tensor in self.steps.updater.optimizer.moments_of(layer)]

    def _restore(self, checkpoint: Checkpoint) -> SavedEvaluation:
        """Take up the run where the checkpoint was made; returns the evaluations until then."""
        meta, state, store = checkpoint.meta, check_state(checkpoint), self.setup.store
        optimizer = self.steps.updater.optimizer
        own = {name: store.master(name) for name in sorted(store.trainable_names)}
        check_tensors(checkpoint, {"masters": own, "moments": dict(optimizer.moments())})
        for name in own:
            store.set_parameter(name, checkpoint.tensors["masters"][name])
        store.set_version(checkpoint.step)
        optimizer.load(checkpoint.tensors.get("moments", {}), state.num_updates)  # sgd keeps none
        checkpoint.tensors.clear()
        self._log.earlier_s = state.training_s
        seen = state.evaluation
        now = {"eval_hash": self.setup.eval_hash, "eval_datasets": plain_data(self.recipe)["eval_datasets"]}
        key, saved = ("eval_hash", meta) if "eval_hash" in meta else ("eval_datasets", meta["recipe"])  # older ones
        if seen.best_step is not None and self.setup.eval_rows and saved.get(key) != now[key]:
            self._say("evaluation: other rows than before: the search for the best evaluation begins anew")
            seen = SavedEvaluation(last_step=seen.last_step, last_loss=seen.last_loss)
        self.steps.restore(state, meta["fit"])
        self.sampler.seek(self._rest.position)
        epochs = f"epoch {self.sampler.epochs_done:.2f}"
        self._say(f"resuming after step {checkpoint.step}, {epochs}, from {checkpoint.folder}", self._rest.other_rows)
        if named_checkpoint(self.recipe) is not None:
            self._say(f"after its next checkpoint, {again(self.recipe)} continues from there")
        old_steps = state.num_steps
        if old_steps != self.num_steps:
            old, new = rate_schedule_of(self.recipe, old_steps), self._learning_rate
            steps = {"step": checkpoint.step, "old_steps": old_steps, "num_steps": self.num_steps}
            self._say(describe_change(old, new, **steps, same_rows=self._rest.other_rows is None))
        return seen
