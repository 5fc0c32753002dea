"""Tasks of lm-eval asked of a recipe's model: log-likelihoods of texts by the engine's forward, streamed."""

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
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.data.tokenized import Row
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.events import Event, Notice, Tell
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.recipe.schema import DatasetConfig, Recipe
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.score import batches_of, scored_batches
from roundpipe_cli.units import counted

Request = tuple[Any, list[int], list[int]]
"""Name in lm-eval, the tokens of its context, and those whose likelihood is asked for."""
Tasks = dict[str, dict[str, Any]]
"""`tasks`, `groups` and `group_map` of lm-eval, by name."""


def found_tasks(names: Sequence[str], include: Path | None) -> Tasks:
    """Tasks with their data, as lm-eval finds them, also in the folder `include`.

    Raises:
        RefusedError: there is no such task, its data are missing, or its answers are generated.
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
    if generated := [name for name, task in found["tasks"].items() if task.OUTPUT_TYPE == "generate_until"]:
        hint = "roundpipe export --merge, then lm_eval --model hf --model_args pretrained=FOLDER"
        raise RefusedError("a task's answers are generated", where=generated[0], found="generate_until", hint=hint)
    return found


def task_results(setup: Setup, tasks: Tasks, *, limit: int | None, tell: Tell) -> dict[str, dict[str, float]]:
    """Figures of each task and group, under lm-eval's names.

    Args:
        setup: of `prepare_to_score`, for a recipe of `with_longest_row`.
        tasks: of `found_tasks`.
        limit: documents of each task at most.
    """
    for one in tasks["tasks"].values():  # as `simple_evaluate`, which also asks git, pip and the machine for a report
        if one.get_config("num_fewshot") is None:
            one.set_config(key="num_fewshot", value=0)
        one.set_fewshot_seed(seed=1234)
    found = evaluate(RoundpipeLM(setup, tell), tasks, limit=limit, log_samples=False)["results"].items()
    return {task: {key: one for key, one in of.items() if isinstance(one, (int, float))} for task, of in found}


class RoundpipeLM(TemplateLM):  # type: ignore[misc]
    """A recipe's model as lm-eval asks it, with rows of at most `max_seq_length` tokens."""

    def __init__(self, setup: Setup, tell: Tell) -> None:
        super().__init__()
        self._setup, self._tell, self.tokenizer = setup, tell, setup.tokenizer
        self._longest = setup.recipe.max_seq_length

    @property
    def eot_token_id(self) -> int:
        """The token behind a text."""
        return int(self.tokenizer.eos_token_id)

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
        """Not reached: `found_tasks` refuses tasks that generate."""
        raise NotImplementedError

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
    file.write_text(json.dumps({"text": "a " * recipe.max_seq_length}) + "\n", encoding="utf-8")
    alone: dict[str, Any] = {"eval_datasets": (), "val_set_size": 0.0, "eval_samples": 0, "packing": False}
    alone |= {"datasets": (DatasetConfig(path=str(file), type="text"),), "long_rows": "truncate"}
    return replace(loaded, recipe=replace(recipe, objective=Recipe.objective, **alone))


def without_longest_row(tell: Tell) -> Tell:
    """`tell`, without what is said of the row of `with_longest_row`, which nobody gave."""

    def passed(event: Event) -> None:
        if not (isinstance(event, Notice) and (LONGEST in event.text or event.text.startswith("data: "))):
            tell(event)

    return passed
