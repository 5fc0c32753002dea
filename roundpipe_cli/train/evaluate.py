"""Evaluation between two steps: loss and perplexity of rows that are never trained on, by the same engine.

Forward only, without dropout, with the newest weights. Adds a row to `eval.jsonl`, remembers the best evaluation (and,
if asked, keeps its weights in `best-STEP/` as a result in the usual format), and says when to stop early:

    OUTPUT_DIR/
      eval.jsonl         {"step", "loss", "loss_hex", "perplexity", "tokens", "seconds", "best", "samples"}; of pairs
                         the rewards in place of the perplexity; with a teacher "kl" beside it
      best-00000012/     adapter or model of the best evaluation so far, with best.json: SHA-256 of each file
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.data.collate import pad_token_id
from roundpipe_cli.data.tokenized import Row
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.errors import NotFiniteError, RoundpipeError
from roundpipe_cli.events import EVAL_NAME, EvaluationFinished, Notice, Phase, Tell
from roundpipe_cli.faults import fault
from roundpipe_cli.files import append_line, remove_tree
from roundpipe_cli.train.batches import collate_rows, taught
from roundpipe_cli.train.checkpoint.manifest import DamagedError
from roundpipe_cli.train.checkpoint.output_dir import best_folder, list_best, list_checkpoints
from roundpipe_cli.train.checkpoint.reading import kept_step_of
from roundpipe_cli.train.checkpoint.resume import SavedEvaluation
from roundpipe_cli.train.checkpoint.rewind import RowDigest
from roundpipe_cli.train.finite import LOWER_RATE
from roundpipe_cli.train.intervals import is_due
from roundpipe_cli.train.preference import score_answers
from roundpipe_cli.train.prepare.base_files import end_tokens
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.steps import grouped_in_windows
from roundpipe_cli.train.result.finish import save_result, verify_best, write_best
from roundpipe_cli.train.result.generate import continued
from roundpipe_cli.train.scoring import InterruptedScoring, Scorer
from roundpipe_cli.train.streamed import answering


class Evaluator:
    """Decides when to evaluate, and keeps the results so far."""

    def __init__(
        self,
        setup: Setup,
        scorer: Scorer,
        output_dir: Path,
        num_steps: int,
        *,
        seen: SavedEvaluation,
        tell: Tell,
        agree: Callable[[float], float],
        ends_epoch: Callable[[], bool],
    ) -> None:
        """
        Args:
            seen: the evaluations before.
            agree: makes one of the losses of all machines of the run, each of which computes its own, equal to the last
                bits.
            ends_epoch: whether the last finished step was an epoch's last.
        """
        self._setup, self._scorer, self._output_dir, self._tell = setup, scorer, output_dir, tell
        self._num_steps = num_steps
        self._compares = setup.teacher is not None and not setup.teacher.lacking(setup.eval_rows)
        self.rows = RowDigest(output_dir / EVAL_NAME)
        self._agree, self._ends_epoch, self._seen = agree, ends_epoch, seen
        if seen.best_step is not None and setup.recipe.load_best_model_at_end and not agree(self._is_whole()):
            seen.kept_step = seen.kept_loss = None
        self._stated_best = seen.kept_step
        """The step of the kept weights in the newest checkpoint, which may not be written yet."""
        self.prune()

    @property
    def exhausted(self) -> bool:
        """Whether early stopping ends the run now."""
        patience = self._setup.recipe.early_stopping_patience
        return patience is not None and self._seen.num_worse >= patience

    @property
    def best_folder(self) -> Path | None:
        """The kept weights, if there are any."""
        step = self._seen.kept_step if self._setup.recipe.load_best_model_at_end else None
        return None if step is None else best_folder(self._output_dir, step)

    def is_owed(self, done: int) -> bool:
        """Whether an evaluation after `done` updates is due and has not been made."""
        if not self._setup.eval_rows or self._seen.last_step == done:
            return False
        every = self._setup.recipe.eval_steps
        is_end = done == self._num_steps
        return is_end or is_due(every, done, self._num_steps, ends_epoch=self._ends_epoch())

    def evaluate(self, done: int) -> None:
        """Evaluate after `done` updates, write the row, keep the weights if they are the best.

        If the run is asked to stop meanwhile, the evaluation is made after the resume.

        Raises:
            NotFiniteError: the loss is not a number.
            ResourceError: disk full or failing.
        """
        started_s = time.monotonic()
        self._tell(Phase(f"evaluating: the weights after step {done}"))
        poison = fault("eval", step=done)
        try:
            loss, tokens, preference = self._loss(done)
            samples = tuple(self._samples(done))
        except InterruptedScoring:
            return
        loss = self._agree(loss if poison is None else poison)
        if not math.isfinite(loss):
            raise NotFiniteError(
                "the loss of the evaluation is not finite",
                where=f"after step {done}",
                found=f"loss {loss}",
                hint=f"the last checkpoint is good; {LOWER_RATE}",
            )
        seen = self._seen
        best = seen.best_loss is None or loss < seen.best_loss
        seen.last_step, seen.last_loss = done, loss
        if best:
            seen.best_step, seen.best_loss, seen.num_worse = done, loss, 0
        else:
            seen.num_worse += 1
        if self._setup.recipe.load_best_model_at_end and (seen.kept_loss is None or loss < seen.kept_loss):
            seen.kept_step, seen.kept_loss = done, loss
            target = best_folder(self._output_dir, done)
            if target.exists():
                remove_tree(target)
            write_best(self._setup, target, {"step": done, "loss": loss})
            self.prune()
        seconds = time.monotonic() - started_s
        event = EvaluationFinished(
            done, self._num_steps, loss, perplexity(loss), tokens, seconds, best, samples, preference
        )
        self.rows.add(append_line(self._output_dir / EVAL_NAME, json.dumps(eval_row(event))))
        self._tell(event)
        if self.exhausted and done < self._num_steps:
            self._tell(Notice(f"stopping early: the best evaluation was that of step {seen.best_step}"))

    def _loss(self, done: int) -> tuple[float, int, dict[str, float] | None]:
        """Mean loss over all target tokens, and their number; of pairs over pairs, with what their rewards show; with a
        teacher cross entropy, and the divergence beside it."""
        rows = self._setup.eval_rows
        if self._setup.recipe.scores_answers:
            return score_answers(self._setup, self._scorer, done)
        pad = pad_token_id(self._setup.tokenizer)
        lengths = np.array([len(row.input_ids) for row in rows])
        batches = chain.from_iterable(grouped_in_windows(self._setup.recipe, lengths))
        parts = [[rows[index] for (index,) in batch] for batch in batches]
        microbatches = [collate_rows(part, pad) for part in parts]
        if self._compares:
            microbatches = [taught(self._setup, *pair) for pair in zip(microbatches, parts, strict=True)]
        loss_sum, tokens, kl_sum = 0.0, 0, 0.0
        for scores in self._scorer.scores(microbatches, step=done):
            loss_sum += float(scores.loss_sum)
            tokens += len(scores.log_probabilities)
            kl_sum += 0.0 if scores.kl_sum is None else float(scores.kl_sum)
        units = sum(one.num_units for one in microbatches)
        loss = loss_sum / units
        return loss, tokens, {"perplexity": perplexity(loss), "kl": kl_sum / units} if self._compares else None

    def _samples(self, done: int) -> Iterator[tuple[str, str]]:
        recipe, tokenizer = self._setup.recipe, self._setup.tokenizer
        prompts = [prompt_ids(row) for row in self._setup.eval_rows[: recipe.eval_samples]]
        if not prompts:
            return
        ends = end_tokens(self._setup.base_files.generation)  # those of training among them
        answers = None
        try:
            answers = self._streamed(prompts, ends)
        except (InterruptedScoring, RoundpipeError):
            raise
        except Exception as error:  # no room, a lost device, a type whose `generate` fails
            why = f"{type(error).__name__}: {error}".partition("\n")[0][:160]
            self._tell(Notice(f"the answers are not streamed ({why}): a whole forward for each token"))
        if answers is None:  # behind the error, which holds the device's memory
            most = recipe.eval_max_new_tokens
            answers = greedy_answers(self._scorer, prompts, step=done, max_new_tokens=most, end_ids=frozenset(ends))
        for prompt, answer in zip(prompts, answers, strict=True):
            yield tokenizer.decode(prompt), tokenizer.decode(answer, skip_special_tokens=True)

    def _streamed(self, prompts: Sequence[list[int]], ends: Sequence[int]) -> list[list[int]]:
        """The most probable tokens behind each prompt, up to one of `ends`: so many answers at once that their keys and
        values are those of a microbatch's tokens."""
        recipe, pad, answers = self._setup.recipe, pad_token_id(self._setup.tokenizer), list[list[int]]()
        longest = max(map(len, prompts)) + recipe.eval_max_new_tokens
        size = max(1, recipe.rows_per_microbatch * recipe.row_tokens // longest)
        how = {"max_new_tokens": recipe.eval_max_new_tokens, "do_sample": False, "eos_token_id": list(ends) or None}
        devices = [self._setup.devices[lane] for lane in self._scorer.lanes]
        with answering(self._setup, devices=devices) as model:
            model.generation_config = GenerationConfig()
            for start in range(0, len(prompts), size):
                some = prompts[start : start + size]
                answers += continued(model, some, pad, stopping_criteria=[self._scorer.heed_stop], **how)
        lengths = [next((at for at, token in enumerate(row) if token in ends), len(row)) for row in answers]
        return [row[:length] for row, length in zip(answers, lengths, strict=True)]

    # -- best weights and state ----------------------------------------------------------------------------------

    def prune(self) -> None:
        """Remove best weights that no durable checkpoint needs any more: the run may have to go back to each."""
        keep = {self._seen.kept_step, self._stated_best}
        for _, folder in list_checkpoints(self._output_dir):
            keep.add(kept_step_of(folder))
        for step, folder in list_best(self._output_dir):
            if step not in keep:
                remove_tree(folder)

    def save_result(self) -> list[str]:
        """Write the result of the run, from the best weights where they are kept; the names of its files.

        Raises:
            ResourceError: disk full or failing.
        """
        best = self.best_folder
        try:
            names = save_result(self._setup, self._output_dir, best)
        except DamagedError as damage:
            text = f"the best weights, of step {self._seen.kept_step}, are damaged ({damage})"
            self._tell(Notice(f"{text}: the result is the weights after the last step"))
            self._seen.kept_step = self._seen.kept_loss = None
            return save_result(self._setup, self._output_dir)
        for step, folder in list_best(self._output_dir):
            if step != self._seen.kept_step:  # from here the run goes back to no checkpoint
                remove_tree(folder)
        return names

    def report(self) -> dict[str, Any] | None:
        """For report.json; None without evaluation rows."""
        if not self._setup.eval_rows:
            return None
        seen = self._seen
        result_step = seen.last_step if self.best_folder is None else seen.kept_step
        return {
            "rows": len(self._setup.eval_rows) // len(self._setup.dataset.sides),
            "last_loss": seen.last_loss,
            "best_loss": seen.best_loss,
            "best_step": seen.best_step,
            "result_is_best": result_step is not None and result_step == seen.best_step,
            "stopped_early": self.exhausted,
            "leaves_out_teacher": self._setup.teacher is not None,
        }

    def state(self) -> dict[str, Any]:
        """For a checkpoint; plain JSON values."""
        self._stated_best = self._seen.kept_step
        return asdict(self._seen)

    def _is_whole(self) -> bool:
        """Whether the kept weights are as they were written; reports if they are not, or cannot be compared."""
        folder = self.best_folder
        if folder is None:
            text = f"{self._seen.best_step}, were not kept: the result is the best of the evaluations from here on"
        elif not folder.is_dir():
            text = f"{self._seen.kept_step}, are gone; the search begins anew"
        else:
            try:
                verify_best(folder)
                return True
            except (DamagedError, OSError) as damage:
                text = f"{self._seen.kept_step}, are damaged: {damage}; the search begins anew"
        self._tell(Notice(f"the best weights so far, of step {text}"))
        return False


def perplexity(loss: float) -> float:
    """exp(loss), or the largest float there is."""
    return math.exp(min(loss, 700.0))


def eval_row(event: EvaluationFinished) -> dict[str, Any]:
    """The row of eval.jsonl."""
    row: dict[str, Any] = {
        "step": event.step,
        "loss": event.loss,
        "loss_hex": event.loss.hex(),
        **({"perplexity": event.perplexity} if event.preference is None else event.preference),
        "tokens": event.tokens,
        "seconds": event.seconds,
        "best": event.best,
    }
    if event.samples:
        row["samples"] = [{"prompt": prompt, "answer": answer} for prompt, answer in event.samples]
    return row


def prompt_ids(row: Row) -> list[int]:
    """The tokens of a row before the first trained one; of a row that is trained from the start, its first token."""
    trained = (row.labels != IGNORED_LABEL).nonzero()[0]
    return [int(token) for token in row.input_ids[: max(int(trained[0]), 1)]]


def greedy_answers(
    scorer: Scorer, prompts: Sequence[Sequence[int]], *, step: int, max_new_tokens: int, end_ids: frozenset[int]
) -> list[list[int]]:
    """The most probable continuation of each prompt, token by token, a whole forward for each."""
    texts = [list(prompt) for prompt in prompts]
    open_texts = list(range(len(texts)))
    for _ in range(max_new_tokens):
        if not open_texts:
            break
        microbatches = [_last_token(texts[index]) for index in open_texts]
        still_open = []
        for index, scores in zip(open_texts, scorer.scores(microbatches, step=step, top_k=1), strict=True):
            assert scores.top_ids is not None
            token = int(scores.top_ids[0, 0])
            texts[index].append(token)
            if token not in end_ids:
                still_open.append(index)
        open_texts = still_open
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _last_token(text: Sequence[int]) -> Microbatch:
    """A row whose only target comes after its last token; which token that is does not matter."""
    ids = torch.tensor([[*text, 0]])
    labels = torch.full_like(ids, IGNORED_LABEL)
    labels[0, -1] = 0
    return Microbatch(ids, labels)
