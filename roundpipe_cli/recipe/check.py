"""Checks of a recipe: plain data against the annotations of `schema.py`, and keys that make no sense together."""

from __future__ import annotations

import math
import re
import shlex
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from roundpipe_cli.choices import LOADED_FORMATS, OBJECTIVES, OPTIMIZER_KEYS, OPTIMIZERS, SCHEDULE_KINDS, objectives_of
from roundpipe_cli.errors import Problem, num_edits
from roundpipe_cli.recipe.aliases import ALIASES
from roundpipe_cli.recipe.foreign import OF_ROWS, answer_of, answer_to, hint_for
from roundpipe_cli.recipe.schema import RATE_SCHEDULES, RATE_SETTINGS, DatasetConfig, Named, PipelineConfig, Recipe
from roundpipe_cli.recipe.strict_yaml import KeyPath, Place, dotted, format_key, parse_scalar, shown_value
from roundpipe_cli.units import either

MAX_SHOWN = 30
"""Problems shown one by one; the rest are counted."""

REFUSED: Any = object()
"""Stands for a refused value; its problem is among the findings."""
NAMED_KEYS = 6
"""Most keys of a mapping that an error names."""


class Findings:
    """Collects problems with their places, so that all can be shown at once in the order of the file."""

    def __init__(self, places: dict[KeyPath, Place], refused: Collection[KeyPath] = ()) -> None:
        self.places = places
        self.refused = set(refused)
        """Key paths that already have a problem, or depend on one: not looked at again."""
        self._found: list[tuple[int, Problem]] = []
        self.notices: list[str] = []
        """A line for each word that was read as another."""

    def add(
        self,
        path: KeyPath,
        what: str,
        *,
        found: str | None = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.refused.add(path)
        place = self.place(path)
        written = f" (written {place.written})" if place.written else ""
        where = f"{place.origin}: {format_key(path)}{written}" if path else place.origin
        self._found.append((place.line, Problem(what, where, found, expected, hint)))

    def note(self, path: KeyPath, text: str) -> None:
        self.notices.append(f"{self.place(path).origin}: {text}")

    def add_problem(self, problem: Problem, line: int) -> None:
        """A problem that already names its place; `line` is for sorting."""
        self._found.append((line, problem))

    def place(self, path: KeyPath) -> Place:
        """The place of `path`, or of the nearest section around it that was written."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place("recipe", 0))

    def forget(self, path: KeyPath, *, with_places: bool = True) -> None:
        """Forget that a value, or one in it, was refused, and where they were written: others take their place."""
        depth = len(path)
        self.refused = {known for known in self.refused if known[:depth] != path}
        if with_places:
            for inner in [known for known in self.places if known[:depth] == path]:
                del self.places[inner]

    def trial(self) -> Findings:
        """Empty findings about the same data, for trying one type of a value."""
        return Findings(self.places, self.refused)

    def take(self, other: Findings) -> None:
        self._found += other._found
        self.notices += other.notices
        self.refused |= other.refused

    @property
    def num_found(self) -> int:
        return len(self._found)

    @property
    def problems(self) -> list[Problem]:
        """In the order of the file, the overrides last, at most MAX_SHOWN and a line about the rest."""
        problems = [problem for _, problem in sorted(self._found, key=lambda entry: entry[0])]
        if len(problems) > MAX_SHOWN:
            problems[MAX_SHOWN:] = [Problem(f"and {len(problems) - MAX_SHOWN} more mistakes", hint="fix these first")]
        return problems


@cache
def hints_of(schema: type) -> dict[str, Any]:
    """Key -> annotation of a schema dataclass, constraints included."""
    return get_type_hints(schema, include_extras=True)


@cache
def defaults_of(schema: type) -> dict[str, Any]:
    """Key -> default of a schema dataclass; keys that must be given are not in it."""
    made = {field.name: field.default_factory for field in fields(schema) if field.default_factory is not MISSING}
    plain = {field.name: field.default for field in fields(schema) if field.default is not MISSING}
    return {key: made[key]() if key in made else plain[key] for key in hints_of(schema) if key in made or key in plain}


@cache
def known_keys(schema: type, prefix: str = "") -> tuple[str, ...]:
    """Every key path of a schema with dots, list items as `[]`: `lora.r`, `datasets[].path`."""
    paths: list[str] = []
    for key, hint in hints_of(schema).items():
        paths.append(prefix + key)
        section, is_list = section_of(hint)
        if section is not None:
            paths += known_keys(section, f"{prefix}{key}{'[]' if is_list else ''}.")
    return tuple(paths)


def section_of(hint: Any) -> tuple[type | None, bool]:
    """(the schema dataclass that a key holds, whether in a list), or (None, False)."""
    if get_origin(hint) is Annotated:
        return section_of(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return section_of(get_args(hint)[0])[0], True
    return (hint, False) if isinstance(hint, type) and is_dataclass(hint) else (None, False)


def remove_unknown_keys(data: dict[str, Any], schema: type, findings: Findings, path: KeyPath = ()) -> None:
    """Delete the keys that `schema` does not have from `data`, each with a problem and the nearest known key."""
    hints = hints_of(schema)
    for key in [key for key in data if key not in hints]:
        if (*path, key) not in findings.refused:
            _report_unknown(key, path, schema, findings)
        del data[key]
    for key, value in data.items():
        section, is_list = section_of(hints[key])
        if section is None:
            continue
        items = enumerate(value) if is_list and isinstance(value, list) else [(None, value)]
        for index, item in items:
            if isinstance(item, dict):
                inner = (*path, key) if index is None else (*path, key, index)
                remove_unknown_keys(item, section, findings, inner)


def check(value: Any, hint: Any, path: KeyPath, findings: Findings) -> Any:
    """The value as the annotation wants it (tuples for lists, dataclasses for sections), or REFUSED with findings."""
    if path in findings.refused:
        return REFUSED
    origin = get_origin(hint)
    if origin is Annotated:
        base, *constraints = get_args(hint)
        is_list = get_origin(base) is tuple and isinstance(value, list)
        result = check(value, base, path, findings) if is_list else _scalar(value, base)
        if result is REFUSED and is_list:
            return REFUSED  # an item is wrong and was reported
        if result is REFUSED or not all(constraint.accepts(result) for constraint in constraints):
            return _refuse(value, hint, path, findings)
        return result
    if origin in (Union, types.UnionType):
        return _check_union(value, hint, path, findings)
    if origin is tuple and isinstance(value, list):
        items = [check(item, get_args(hint)[0], (*path, i), findings) for i, item in enumerate(value)]
        return REFUSED if REFUSED in items else tuple(items)
    if origin is Mapping and isinstance(value, dict):
        return _check_mapping(value, hint, path, findings)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        return _check_section(value, hint, path, findings)
    result = _scalar(value, hint)
    return _refuse(value, hint, path, findings) if result is REFUSED else result


def describe_type(hint: Any) -> str:
    """The type that a key expects, in words: `an integer of at least 1`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        text = describe_type(arguments[0])
        for constraint in arguments[1:]:
            text = constraint.describe(text)
        return text
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(member) for member in arguments)
    if origin is Literal:
        words = [str(choice) for choice in arguments]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if origin is tuple:
        return f"a list (each item {describe_type(arguments[0])})"
    if origin is Mapping:
        known = _choices(arguments[0])
        keys = f"keys among {', '.join(known)}" if known else f"keys that are {describe_type(arguments[0])}"
        return f"a mapping with {keys}"
    if is_dataclass(hint):
        named = list(hints_of(hint))[:NAMED_KEYS] if isinstance(hint, type) else []
        return f"a mapping with keys such as {', '.join(named)}"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", types.NoneType: "null"}
    return names[hint]


def _scalar(value: Any, hint: Any) -> Any:
    if get_origin(hint) is Literal:
        same = [choice for choice in get_args(hint) if type(choice) is type(value) and choice == value]
        return same[0] if same else REFUSED
    if hint is types.NoneType:
        return None if value is None else REFUSED
    if hint is bool:
        return value if isinstance(value, bool) else REFUSED
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            return REFUSED
        return number if math.isfinite(number) else REFUSED
    if hint is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else REFUSED
    return value if hint is str and isinstance(value, str) else REFUSED


def _check_union(value: Any, hint: Any, path: KeyPath, findings: Findings) -> Any:
    """The first member that accepts the value; a list or mapping is reported by the member of its own kind."""
    for member in get_args(hint):
        trial = findings.trial()
        result = check(value, member, path, trial)
        if result is not REFUSED:
            return result
        if isinstance(value, list) and _is_list(member):
            findings.take(trial)
            return REFUSED
    return _refuse(value, hint, path, findings)


def _is_list(hint: Any) -> bool:
    return _is_list(get_args(hint)[0]) if get_origin(hint) is Annotated else get_origin(hint) is tuple


def _check_mapping(value: dict[str, Any], hint: Any, path: KeyPath, findings: Findings) -> Any:
    key_hint, value_hint = get_args(hint)
    known = _choices(key_hint)
    result: dict[str, Any] = {}
    for key, item in value.items():
        here = (*path, key)
        if key in known if known else check(key, key_hint, here, findings.trial()) is not REFUSED:
            result[key] = check(item, value_hint, here, findings)
        else:
            findings.add(
                here, f"unknown key {format_key(here)}", expected=describe_type(key_hint), hint=_mean(key, known)
            )
    return REFUSED if len(result) < len(value) or REFUSED in result.values() else result


def _check_section(value: dict[str, Any], schema: type, path: KeyPath, findings: Findings) -> Any:
    """A schema dataclass from a mapping; unknown keys are left out, and reported elsewhere."""
    hints = hints_of(schema)
    arguments = {key: check(item, hints[key], (*path, key), findings) for key, item in value.items() if key in hints}
    missing = [key for key in hints if key not in value and key not in defaults_of(schema)]
    for key in missing:
        here = (*path, key)
        example = {"model": "model: Qwen/Qwen3-32B", "datasets": "datasets: [{path: data/train.jsonl}]"}.get(key)
        findings.add(
            here,
            f"the key {format_key(here)} is missing",
            expected=describe_type(hints[key]),
            hint=f"add a line such as `{example or 'path: data/train.jsonl'}`",
        )
    return REFUSED if missing or any(item is REFUSED for item in arguments.values()) else schema(**arguments)


def _refuse(value: Any, hint: Any, path: KeyPath, findings: Findings) -> Any:
    told = f"`roundpipe recipes keys {path[0]}` says what it means and its default" if path else None
    answer = answer_to(dotted(path).removesuffix("[]"), value)
    findings.add(
        path,
        f"{format_key(path) or 'the recipe'} has a value that is not accepted",
        found=shown_value(value),
        expected=describe_type(hint),
        hint=answer or _advice(value, hint, findings.place(path).origin) or told,
    )
    return REFUSED


def _advice(value: Any, hint: Any, origin: str) -> str | None:
    """A hint for the traps of YAML and of the field."""
    wanted = describe_type(hint)
    section, is_list = section_of(hint)
    if value is None:
        return "delete the line to get the default"
    if section is not None and is_list:
        path = value.get("path") if isinstance(value, dict) else value
        item = path if isinstance(path, str) else "data/train.jsonl"
        return f"write a list of mappings: [{{path: {shown_value(item).strip(chr(39))}}}]"
    if section is not None and "path" in hints_of(section):
        return f"write {{path: {shown_value(value).strip(chr(39))}}}"
    if isinstance(value, str):
        if "true or false" in wanted and value.lower() in ("yes", "no", "on", "off", "y", "n", "true", "false"):
            return f"write {'true' if value.lower() in ('yes', 'on', 'y', 'true') else 'false'}, without quotes"
        is_short = len(value) <= 20
        if is_short and "number" in wanted and re.fullmatch(r"-?\d+,\d+(e[-+]?\d+)?", value):
            return f"write {value.replace(',', '.')}: a point, not a comma, stands before decimals"
        if (
            is_short
            and ("integer" in wanted or "number" in wanted)
            and value.replace("_", "").replace(".", "", 1).isdigit()
        ):
            return f"write {value.replace('_', '')}, without quotes or underscores"
        choices = [choice for choice in _choices(hint) if isinstance(choice, str)]
        if "cuda:N" in wanted and not choices:  # an item of `devices`
            choices = ["cpu", *(f"cuda:{index}" for index in range(8))]
        items = [item.strip() for item in value.split(",")]
        is_a_list_without_brackets = check(items, hint, (), Findings({})) is not REFUSED
        return _mean(value, choices) or (f"write [{value}]" if is_a_list_without_brackets else None)
    if isinstance(value, float) and "integer" in wanted and math.isfinite(value) and value == int(value) < 2**31:
        return f"write {int(value)}"
    if isinstance(value, (bool, int, float)) and "text" in wanted:
        key, _, written = origin.removeprefix("override ").partition("=")
        if written and parse_scalar(written) == value:  # the shell takes one pair of quotes away
            quoted = shlex.quote(f'{key}="{written}"')
            return f"write {quoted} if it is meant as text"
        return "put it in quotes if it is meant as text"
    return None


def _choices(hint: Any) -> list[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return list(arguments)
    if origin is Annotated:
        tables = [list(one.table) for one in arguments if isinstance(one, Named)]
        return tables[0] if tables else _choices(arguments[0])
    if origin in (Union, types.UnionType):
        return [choice for member in arguments for choice in _choices(member)]
    return []


def _mean(word: str, candidates: list[str]) -> str | None:
    near = near_spelling(word, candidates)
    return f"did you mean {near}?" if near else None


NO_SUCH_KEY = "not offered by this name; `roundpipe recipes keys WORD` finds keys by words, of other trainers too"
MAX_WORD, LETTERS_AN_EDIT, SHORT_WORD = 100, 7, 5
"""Letters of a misspelt word that are compared at most, and for how many one edit is allowed, the first aside. A
shorter word begins like the one that it stands for (not mora, lora); one of less than four letters has no others."""


def near_spelling(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate of which `word` is another spelling: a few letters off for its length, or the same words in another
    order or with other separators. Never one that only shares some words or letters with it."""
    lowered = word[:MAX_WORD].lower()
    plain, words = _plain(lowered), sorted(filter(None, re.split(r"[^a-z0-9]+", lowered)))

    def edits(candidate: str) -> int | None:
        other = _plain(candidate)
        least = min(len(plain), len(other))
        if least < SHORT_WORD and (plain[:1] != other[:1] or (least < 4 and not set(plain) <= set(other))):
            return None
        most = max(1, least // LETTERS_AN_EDIT)
        num = num_edits(plain, other, most)
        if num > 1 and len(words) > 1 and words == sorted(re.split(r"[^a-z0-9]+", candidate.lower())):
            return 1
        return num if num <= most else None

    found = [(num, candidate) for candidate in candidates if (num := edits(candidate)) is not None]
    return min(found, key=lambda one: one[0])[1] if found else None


def _plain(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def _report_unknown(key: str, path: KeyPath, schema: type, findings: Findings) -> None:
    here = (*path, key)
    hint: str | None = None
    name, colon, value = key.partition(":")
    if key == "<<":
        hint = "merge keys are refused: write the values out"
    elif colon and name in hints_of(schema):
        hint = f"write a space after the colon: {name}: {value}"
    elif findings.num_found < MAX_SHOWN:  # a suggestion takes about a millisecond
        answer = answer_of(key, OF_ROWS, begins=True) if schema is DatasetConfig else None
        near = None if answer else suggest(key, path, list(hints_of(schema)))
        hint = f"did you mean {near}?" if near else answer.hint if answer else hint_for(key)
    findings.add(here, f"unknown key {format_key(here)}", hint=hint or NO_SUCH_KEY)


def suggest(key: str, path: KeyPath, siblings: list[str]) -> str | None:
    """The known key that was probably meant, of another tool's spellings too: another spelling of one in this section,
    the same name in another section, or another spelling of a key anywhere, which comes with its path."""
    prefix = f"{dotted(path)}." if path else ""
    word = key.strip().lower().replace("-", "_").replace(" ", "_")[:MAX_WORD]
    shown = format_key(path) + "." if path else ""
    spellings = [alias.removeprefix(prefix) for alias in ALIASES if alias.startswith(prefix)]
    here = [*siblings, *(name for name in spellings if "." not in name)]
    everywhere = known_keys(Recipe)
    if len(word) >= SHORT_WORD and (near := near_spelling(word, here)):
        return shown + near
    if same := next((full for full in everywhere if full.rpartition(".")[2] == word.rpartition(".")[2]), None):
        return same
    if near := near_spelling(word, here):
        return shown + near
    by_last = {full.rpartition(".")[2]: full for full in reversed([*everywhere, *ALIASES])}
    near = near_spelling(word, by_last)
    if near is None or (min(len(word), len(near)) < SHORT_WORD and not set(_plain(word)) <= set(near)):
        return None  # a short word with other letters, such as nvme, is no slip of a key in another section
    return by_last[near]


# Settings of learning-rate schedules that keep the learning rate in bounds.
#
# No schedule may give a learning rate that is negative, or above `learning_rate` unless `lr_above_peak` asks for it.
# The bounds here do not depend on the number of steps; `train/prepare/learning_rate.py` looks at every step before
# training.

NEEDED_SCHEDULE_KEYS = {"cosine_with_min_lr": ("min_lr", "min_lr_rate"), "warmup_stable_decay": ("num_decay_steps",)}
"""Exactly one of these is required."""

DEFAULT_LR_END = 1e-7
"""transformers' `lr_end` of the polynomial schedule."""


def find_schedule_problems(recipe: Recipe, findings: Findings) -> None:
    """Add a problem for each setting that the schedule does not take, that it lacks, or that leads out of bounds."""
    name, given = recipe.lr_scheduler_type, recipe.lr_scheduler_kwargs
    good: dict[str, Any] = {}
    for key, value in given.items():
        path = ("lr_scheduler_kwargs", key)
        if key not in RATE_SCHEDULES[name]:
            known = ", ".join(RATE_SCHEDULES[name]) or "no settings"
            findings.add(path, f"the schedule {name} has no setting {key}", expected=known)
        elif (checked := check(value, RATE_SETTINGS[key], path, findings)) is not REFUSED:
            good[key] = checked
    needed = NEEDED_SCHEDULE_KEYS.get(name, ())
    if needed and sum(key in given for key in needed) != 1:
        findings.add(
            ("lr_scheduler_kwargs",),
            f"the schedule {name} needs {' or '.join(needed)}",
            hint=f"add a line such as `lr_scheduler_kwargs: {{{needed[-1]}: {0.1 if len(needed) > 1 else 100}}}`",
        )
    _find_above_peak(recipe, good, findings)


def _find_above_peak(recipe: Recipe, given: dict[str, Any], findings: Findings) -> None:
    peak = recipe.learning_rate
    for key, most in {"min_lr": peak, "min_lr_rate": 1.0, "min_lr_ratio": 1.0}.items():
        if given.get(key, 0.0) > most and not recipe.lr_above_peak:
            findings.add(
                ("lr_scheduler_kwargs", key),
                "the learning rate would rise above its peak",
                found=f"{key}: {given[key]:g}, which is {given[key] * peak / most:g} at the end of the schedule",
                expected=f"at most {most:g}: learning_rate is {peak:g}",
                hint="lr_above_peak: true, if it is meant to",
            )
    if recipe.lr_scheduler_type == "polynomial" and given.get("lr_end", DEFAULT_LR_END) >= peak:
        findings.add(
            ("lr_scheduler_kwargs", "lr_end") if "lr_end" in given else ("lr_scheduler_kwargs",),
            "the polynomial schedule has to fall",
            found=f"lr_end: {given.get('lr_end', DEFAULT_LR_END):g}",
            expected=f"below learning_rate, which is {peak:g}",
        )


# Checks for keys that make no sense together; one problem names both.

NEEDS_EVALUATION = ("eval_steps", "eval_samples", "load_best_model_at_end", "early_stopping_patience")
"""Keys without effect where there are no rows to evaluate on."""
SPLIT_HINT = "`long_rows: truncate` or drop, or a larger max_seq_length"
IN_TURN = {"head_workers": ("auto", 1), "dispatch": ("auto", "round_robin")}
"""Values with which stages are dealt out in turn, as schedules need that bind their stages to workers."""

MIN_CHUNK_TOKENS = 8
"""Tokens of a chunk at least, where a row is as long as it may be. A chunk's way through the stages costs some tens of
milliseconds of Python, whatever it holds."""


def contradictions(recipe: Recipe) -> list[Problem]:
    """Problems of a recipe whose values do not go together."""
    findings = Findings({})
    find_contradictions(recipe, findings)
    return findings.problems


def find_contradictions(recipe: Recipe, findings: Findings) -> None:
    """Add a problem for each key that another one makes meaningless."""
    _find_objective_problems(recipe, findings)
    find_schedule_problems(recipe, findings)
    _find_chunk_problems(recipe, findings)
    _find_stage_problems(recipe.pipeline, findings)
    for key, why, hint in _unread(recipe):
        if getattr(recipe, key) != defaults_of(Recipe)[key]:
            findings.add((key,), f"{key} {why}", hint=hint or f"delete the line {key}")
    packed = [kind for kind in LOADED_FORMATS if getattr(recipe, kind.key)]
    for other in packed[1:]:
        what = f"the base weights cannot be in {packed[0].label} and in {other.label}"
        findings.add((other.key,), what, hint=f"delete {packed[0].key} or {other.key}")
    if packed and recipe.load_in_16bit:
        what = f"the base weights cannot be in 16 bit and in {packed[0].label}"
        findings.add(("load_in_16bit",), what, hint=f"delete load_in_16bit or {packed[0].key}")
    for key in [*(kind.key for kind in packed), *(["weights"] if recipe.weights == "mmap" else [])]:
        if recipe.method == "full":
            what = "such weights are frozen, and full fine-tuning trains them"
            findings.add((key,), what, found="method: full", expected="method: lora")
    if recipe.float16_accumulation and recipe.dtype != "float16":
        what, found = "only products of float16 can add up in float16", f"dtype: {recipe.dtype}"
        findings.add(("float16_accumulation",), what, found=found, hint="`dtype: float16`, or delete the line")
    _find_split_problems(recipe, findings)
    _find_budget_problems(recipe, findings)
    _find_rule_problems(recipe, findings)
    for index, word in enumerate(recipe.add_tokens):
        if word in recipe.add_tokens[:index]:
            findings.add(("add_tokens", index), f"the token {word} is named twice", hint="delete one of them")
    if recipe.nodes.shard_optimizer is True and recipe.method == "lora":
        hint = "the state of adapters is small: delete the line"
        findings.add(("nodes", "shard_optimizer"), "only full fine-tuning shares its state out", hint=hint)


def _unread(recipe: Recipe) -> Iterator[tuple[str, str, str | None]]:
    """(key, why nothing reads it here, what to do); at its default a key asks for nothing."""
    for key in OPTIMIZER_KEYS:
        if key not in OPTIMIZERS[recipe.optim].keys:
            yield key, f"is not used by optim {recipe.optim}", None
    if recipe.method == "lora":
        why = "is not used with method lora: the base weights are frozen anyway"
        yield "frozen_parameters", why, "choose what is adapted with lora.target_modules"
    if not recipe.val_set_size and not recipe.eval_datasets:
        for key in NEEDS_EVALUATION:
            yield key, "needs rows to evaluate on", "add a line such as `val_set_size: 0.05`, or eval_datasets"
    if recipe.scores_answers:
        kind = recipe.objective_kind
        # of means that are compared, a prompt's log-probability would be a part
        for key in ("label_smoothing_factor", *(["train_on_inputs"] if kind.averages or kind.estimates_kl else [])):
            yield key, f"is not offered with objective {recipe.objective}", None
    elif recipe.objective_kind.needs_teacher:
        yield "label_smoothing_factor", f"is not offered with objective {recipe.objective}: the teacher smooths", None


def _find_budget_problems(recipe: Recipe, findings: Findings) -> None:
    path, row = ("micro_batch_tokens",), recipe.tokens_of_full_row
    if recipe.max_seq_length != "auto" and recipe.token_budget is not None and recipe.token_budget < row:
        what = "a row of max_seq_length tokens does not fit into a microbatch"
        each = f"{recipe.row_tokens} tokens"
        each += " for each answer of a pair" if row > recipe.row_tokens else ""
        hint = f"micro_batch_tokens={row}, or a smaller max_seq_length"
        findings.add(path, what, found=str(recipe.token_budget), expected=f"at least {row}: {each}", hint=hint)


def _find_split_problems(recipe: Recipe, findings: Findings) -> None:
    splits, overlap = recipe.long_rows == "split", recipe.long_rows_overlap
    if overlap and not splits:
        findings.add(("long_rows_overlap",), "only sequences of a split row can overlap", hint="`long_rows: split`")
    elif recipe.max_seq_length != "auto" and overlap >= recipe.row_tokens:
        findings.add(
            ("long_rows_overlap",),
            "sequences that overlap in all their tokens have none to train",
            found=str(overlap),
            expected=f"less than max_seq_length, {recipe.row_tokens}",
        )
    for path, dataset in _datasets_of(recipe):
        if splits and dataset.type not in ("auto", "text"):
            what = "only rows of type text can be split"
            findings.add((*path, "type"), what, found=dataset.type, hint=SPLIT_HINT)


def _datasets_of(recipe: Recipe) -> Iterator[tuple[KeyPath, DatasetConfig]]:
    """Each data set to train or to evaluate on, behind its place in the recipe."""
    for key in ("datasets", "eval_datasets"):
        yield from (((key, index), dataset) for index, dataset in enumerate(getattr(recipe, key)))


def _find_rule_problems(recipe: Recipe, findings: Findings) -> None:
    """Rules for what is trained of a conversation, where all of it is, or where an answer is compared."""
    every = recipe.train_on_inputs
    why = "train_on_inputs trains every token" if every else f"objective {recipe.objective} compares whole answers"
    keys = ["roles_to_train", "turns_to_train"] if every or recipe.scores_answers else []
    for path, dataset in _datasets_of(recipe):
        for key in [*keys, *(["train_on_eos"] if every else [])]:
            if getattr(dataset, key) != defaults_of(DatasetConfig)[key]:
                findings.add((*path, key), f"{why}: {key} changes nothing", hint=f"delete {key}")
        if every and dataset.thoughts == "mask":
            findings.add((*path, "thoughts"), f"{why}, thoughts too", found="mask", expected="train or drop")


def _find_objective_problems(recipe: Recipe, findings: Findings) -> None:
    objective, rows = recipe.objective, recipe.objective_kind.rows
    for path, dataset in _datasets_of(recipe):
        if dataset.type != "auto" and dataset.type not in rows.row_types:
            kinds = ((name, kind) for name, kind in OBJECTIVES.items() if not kind.needs_teacher)
            fitting = [name for name, kind in kinds if dataset.type in kind.rows.row_types]
            what, hint = f"objective {objective} needs {rows.noun}", f"add the line `objective: {either(fitting)}`"
            findings.add((*path, "type"), what, found=dataset.type, expected=either(rows.row_types), hint=hint)
    if recipe.objective_kind.needs_teacher and recipe.distill.teacher is None:
        what, hint = f"objective {objective} needs a teacher's scores", "distill.teacher=FOLDER, of `roundpipe score`"
        findings.add(("distill", "teacher"), what, expected="a folder", hint=hint)
    if recipe.scores_answers and recipe.long_rows == "split":
        findings.add(("long_rows",), f"{rows.noun} cannot be split", hint=SPLIT_HINT)
    if recipe.scores_answers and recipe.packs:  # `auto` is off with them
        findings.add(("packing",), f"packing is not offered with objective {objective}", hint="delete the line packing")
    if recipe.objective_kind.estimates_kl and recipe.rows_per_step == 1:
        what = f"objective {objective} compares each prompt with another row's answer, and a step has one row"
        hint = "gradient_accumulation_steps=16, or any number of rows above 1"
        findings.add(("gradient_accumulation_steps",), what, found="1 row a step", expected="2 or more", hint=hint)
    if recipe.objective_kind.needs_reference and recipe.method != "lora":
        fitting = [
            name for name in objectives_of(recipe.objective_kind.example) if not OBJECTIVES[name].needs_reference
        ]
        why = "the reference leaves the trained adapter out, or has its start"
        why += f"; objective {either(fitting)} needs none" if fitting else ""
        findings.add(("method",), f"objective {objective} needs method lora", found=recipe.method, hint=why)


def chunk_clashes(recipe: Recipe) -> list[tuple[str, str]]:
    """(key, why) of what the recipe asks for and sequences in chunks cannot have, whatever their number."""
    kept, pipeline = "activations of chunks are always recomputed", recipe.pipeline
    bound = "all chunks go forward before one goes backward"
    clashes = (
        (recipe.token_budget is not None, "micro_batch_tokens", "chunked sequences are not counted by tokens"),
        (recipe.scores_answers, "objective", "answers are compared as a whole"),
        (recipe.neftune_noise_alpha > 0, "neftune_noise_alpha", "its noise is scaled by the length of the sequence"),
        (not SCHEDULE_KINDS[pipeline.schedule].takes_chunks, "pipeline.schedule", bound),
        (pipeline.recompute == "none", "pipeline.recompute", kept),
        (pipeline.keep_activations not in ("auto", 0), "pipeline.keep_activations", kept),
    )
    return [(key, why) for clash, key, why in clashes if clash]


def _find_chunk_problems(recipe: Recipe, findings: Findings) -> None:
    pipeline = recipe.pipeline
    if pipeline.num_chunks == 1:
        return
    for key, why in chunk_clashes(recipe):
        what = f"pipeline.sequence_chunks: {pipeline.sequence_chunks} does not go with {key}: {why}"
        findings.add(tuple(key.split(".")), what, hint=f"change {key}, or pipeline.sequence_chunks=1")
    most = max(1, recipe.row_tokens // MIN_CHUNK_TOKENS)
    if recipe.max_seq_length != "auto" and pipeline.num_chunks > most:
        findings.add(
            ("pipeline", "sequence_chunks"),
            f"chunks of fewer than {MIN_CHUNK_TOKENS} tokens: passing all stages takes longer than computing them",
            found=f"{pipeline.num_chunks} chunks of max_seq_length {recipe.row_tokens}",
            expected=f"at most {most}",
            hint=f"pipeline.sequence_chunks={most}, or a larger max_seq_length",
        )


def _find_stage_problems(pipeline: PipelineConfig, findings: Findings) -> None:
    forward_auto, backward_auto = pipeline.forward_stages == "auto", pipeline.backward_stages == "auto"
    is_bound = pipeline.binds_stages
    if not is_bound and forward_auto != backward_auto:
        what, expected = "forward_stages and backward_stages go together", "both given or both auto"
        findings.add(("pipeline",), what, found="one of them is auto", expected=expected)
    if is_bound and not backward_auto:
        what = f"{pipeline.schedule} takes no backward_stages: they mirror forward_stages"
        findings.add(("pipeline", "backward_stages"), what, expected="auto")
    for key, plain in IN_TURN.items():
        if is_bound and getattr(pipeline, key) not in plain:
            what = f"{pipeline.schedule} binds its stages to workers"
            expected = "schedule: roundpipe, or neither head_workers nor dispatch"
            findings.add(("pipeline", key), what, found=f"schedule: {pipeline.schedule}", expected=expected)
    devices = pipeline.devices
    if not isinstance(devices, str) and len({device == "cpu" for device in devices}) > 1:
        what, found = "processors and GPUs cannot work in one pool", ", ".join(devices)
        findings.add(("pipeline", "devices"), what, found=found, expected="either cpu or cuda devices")
