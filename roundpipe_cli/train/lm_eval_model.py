"""Tasks of lm-eval asked of a recipe's model: likelihoods by the engine's forward, answers by its streamed model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval import evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.models.utils_hf import stop_sequences_criteria
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.data.collate import pad_token_id
from roundpipe_cli.data.tokenized import Row
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.events import Event, Notice, Phase, Tell
from roundpipe_cli.model.padding import each_as_alone
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.recipe.schema import DatasetConfig, with_rows_alone
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.result.generate import continued, rendered
from roundpipe_cli.train.score import batches_of, scored_batches
from roundpipe_cli.train.streamed import answering
from roundpipe_cli.units import counted

Request = tuple[Any, list[int], list[int]]
"""Name in lm-eval, the tokens of its context, and those whose likelihood is asked for."""
Tasks = dict[str, dict[str, Any]]
"""`tasks`, `groups` and `group_map` of lm-eval, by name."""


def found_tasks(names: Sequence[str], include: Path | None) -> Tasks:
    """Tasks with their data, as lm-eval finds them, also in the folder `include`.

    Raises:
        RefusedError: there is no such task, or its data are missing.
    """
    where, found = str(include), Tasks(tasks={}, groups={}, group_map={})
    random.seed(0)  # as lm-eval does
    np.random.seed(1234)  # noqa: NPY002
    try:
        manager = TaskManager(include_path=include)
        for where in names:
            if where not in manager.all_tasks:
                near = closest(where, manager.all_tasks)
                raise RefusedError("lm-eval has no such task", found=where, expected=near, hint="lm-eval ls tasks")
            for key, one in manager.load([where]).items():
                found[key] |= one
    except RefusedError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:300]}"
        hint = "data come from the hub; with --offline from what datasets fetched before"
        raise RefusedError("a task or its data cannot be read", where=where, found=why, hint=hint) from error
    return found


def task_results(model: RoundpipeLM, tasks: Tasks, *, limit: int | None) -> dict[str, dict[str, float]]:
    """Figures of each task and group, under lm-eval's names.

    Args:
        tasks: of `found_tasks`.
        limit: documents of each task at most.
    """
    for one in tasks["tasks"].values():  # as `simple_evaluate`, which also asks git, pip and the machine for a report
        if one.get_config("num_fewshot") is None:
            one.set_config(key="num_fewshot", value=0)
        one.set_fewshot_seed(seed=1234)
    found = evaluate(model, tasks, limit=limit, log_samples=False)["results"].items()
    return {task: {key: one for key, one in of.items() if isinstance(one, (int, float))} for task, of in found}


class RoundpipeLM(TemplateLM):  # type: ignore[misc]
    """A recipe's model as lm-eval asks it, with rows of at most `max_seq_length` tokens."""

    def __init__(self, setup: Setup, tell: Tell, batch_size: int = 16) -> None:
        """
        Args:
            setup: of `prepare_to_score`, for a recipe of `with_longest_row`.
            batch_size: prompts that are answered at once.
        """
        super().__init__()
        self.batch_size = batch_size
        self._setup, self._tell, self.tokenizer = setup, tell, setup.tokenizer
        self._longest = setup.recipe.row_tokens

    @property
    def eot_token_id(self) -> int:
        """The token behind a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def max_gen_toks(self) -> int:
        """Tokens of an answer at most, where a task does not say: as of lm-eval's class for transformers."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm-eval keeps what depends on the chat template."""
        return self._setup.source.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; as of lm-eval's class for transformers."""
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return rendered(self.tokenizer, chat_history, **how)

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text without context: as of lm-eval's class for transformers."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text; as of lm-eval's class for transformers."""
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        how = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **how))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihood of each answer behind its context; without a bar, as ours are."""
        return list(super().loglikelihood(requests, disable_tqdm=True))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows where it is longer than a row."""
        parts = list[list[Request]]()
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._longest - 1, 1)
            parts.append([(None, *make_disjoint_window(pair)) for pair in pairs])
        answers = iter(self._loglikelihood_tokens(list(chain.from_iterable(parts))))
        return [sum(next(answers)[0] for _ in of_text) for of_text in parts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each context, up to what the task says ends one; those of equal settings side by side."""
        answers, kinds = [""] * len(requests), dict[str, list[int]]()
        ids = [self.tok_encode(context) for context, _ in (request.args for request in requests)]
        for index in sorted(range(len(ids)), key=lambda index: -len(ids[index])):
            kinds.setdefault(json.dumps(requests[index].args[1], sort_keys=True), []).append(index)
        with answering(self._setup, self.batch_size * self._longest) as model:
            for kind, members in kinds.items():
                for start in range(0, len(members), self.batch_size):
                    some = members[start : start + self.batch_size]
                    for index, text in zip(some, self._answers(model, kind, [ids[one] for one in some]), strict=True):
                        answers[index] = text
                    self._tell(Phase(f"answered {start + len(some)} of {counted(len(members), 'prompt')}"))
        return answers

    def _answers(self, model: Any, kind: str, ids: list[list[int]]) -> list[str]:
        """Answers of one batch, stopped and cut as lm-eval's class for transformers does it."""
        how: dict[str, Any] = dict(normalize_gen_kwargs(json.loads(kind), self.max_gen_toks))
        until, new = (
            handle_stop_sequences(how.pop("until"), self.tokenizer.decode(self.eot_token_id)),
            how["max_gen_toks"],
        )
        how["max_new_tokens"] = how.pop("max_gen_toks")
        if not how["do_sample"]:
            how.pop("temperature")
        if (most := self._longest - new) <= 0:
            found, hint = f"{new} tokens", f"max_seq_length={2 * new}"
            raise RefusedError(
                "answers of a task leave no room for a prompt", found=found, expected=f"< {self._longest}", hint=hint
            )
        if cut := sum(len(one) > most for one in ids):
            self._tell(Notice(f"{counted(cut, 'prompt')} cut on the left: longer than max_seq_length - {new}: {most}"))

        def answer(some: Sequence[list[int]]) -> list[list[int]]:
            stops = stop_sequences_criteria(self.tokenizer, until, max(map(len, some)), len(some))
            return continued(model, some, pad_token_id(self.tokenizer), stopping_criteria=stops, **how)

        rows = each_as_alone(model, [one[-most:] for one in ids], answer)
        texts = (self.tokenizer.decode(row, skip_special_tokens=True) for row in rows)
        return [postprocess_generated_text(text, until, None) for text in texts]

    def _loglikelihood_tokens(self, requests: Sequence[Request], **kwargs: Any) -> list[tuple[float, bool]]:
        rows, most = list[Row](), self._longest
        if (longest := max((len(asked) for _, _, asked in requests), default=0)) >= most:
            found, hint = f"{longest} tokens", f"max_seq_length={longest + 1}"
            raise RefusedError("an answer of a task is longer than a row", found=found, expected=f"< {most}", hint=hint)
        for index, (_, context, asked) in enumerate(requests):
            ids = np.array([*context, *asked][-most:], dtype=np.int32)
            is_asked = np.arange(len(ids)) >= len(ids) - len(asked)
            rows.append(Row(index, ids, np.where(is_asked, ids, np.int32(IGNORED_LABEL))))
        if cut := sum(len(context) + len(asked) > most for _, context, asked in requests):
            self._tell(Notice(f"{counted(cut, 'request')} cut on the left: longer than max_seq_length: {most}"))
        answers = dict[int, tuple[float, bool]]()
        windows = batches_of(self._setup.recipe, np.array([len(row.input_ids) for row in rows]))
        batches = list(chain.from_iterable(windows))
        for index, one in chain.from_iterable(
            scored_batches(self._setup, rows, batches, top_k=1, tell=self._tell) if rows else ()
        ):
            is_greedy = bool((one["top_ids"][:, 0] == one["tokens"]).all())
            answers[index] = float(one["log_probabilities"].sum(dtype=np.float64)), is_greedy
        return [answers[index] for index in range(len(rows))]


LONGEST = "longest.jsonl"


def with_longest_row(loaded: LoadedRecipe, folder: Path) -> LoadedRecipe:
    """The recipe with one row, in a file in `folder`, as long as rows of tasks may be."""
    recipe, file = loaded.recipe, folder / LONGEST
    file.write_text(json.dumps({"text": "a " * recipe.row_tokens}) + "\n", encoding="utf-8")
    alone = with_rows_alone(recipe, DatasetConfig(path=str(file), type="text"))
    return replace(loaded, recipe=replace(alone, long_rows="truncate", max_seq_length=recipe.row_tokens))


def without_longest_row(tell: Tell) -> Tell:
    """`tell`, without what is said of the row of `with_longest_row`, which nobody gave."""

    def passed(event: Event) -> None:
        if not (isinstance(event, Notice) and (LONGEST in event.text or event.text.startswith("data: "))):
            tell(event)

    return passed
