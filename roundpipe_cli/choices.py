"""Tables of what a recipe chooses by name.

An entry says what planner, checks and documentation need to know. How it is done is elsewhere: rows of a schedule in
`schedule/builders.py`, the arithmetic of an optimizer in `train/optim/optimizer.py`, the losses of answers in
`model/sequence_loss.py`, the codes of packed weights in `model/stored/packed_weights.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

RowType = Literal["chat", "sharegpt", "alpaca", "prompt_completion", "text", "preference"]
RowRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class RowKind:
    """Columns of a type of rows, and its answers."""

    fields: tuple[str, ...]
    """Fields that every row has."""
    optional: tuple[str, ...] = ()
    """Fields that it may have."""
    num_answers: int = 1
    """Answers of a row. Each column of another answer, or with a verdict on one, is refused where it is not read."""
    needs_template: bool = False
    """Rows are conversations, which only a chat template turns into text."""


ROW_KINDS: Mapping[RowType, RowKind] = {
    "chat": RowKind(("messages",), ("system", "tools"), needs_template=True),
    "sharegpt": RowKind(("conversations",), ("system", "tools"), needs_template=True),
    "alpaca": RowKind(("instruction", "output"), ("input", "system", "tools", "history")),
    "prompt_completion": RowKind(("prompt", "completion"), ("system", "tools", "history")),
    "text": RowKind(("text",), num_answers=0),
    "preference": RowKind(
        ("chosen", "rejected"),
        ("prompt", "instruction", "input", "messages", "conversations", "system", "tools", "history"),
        num_answers=2,
    ),
}
"""All types of rows; `auto` takes the first, in this order, whose fields are all there."""

CHAT_ROLES: Mapping[str, RowRole | Literal["developer"]] = {
    **{"system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "tool": "tool"},
    **{"function": "tool", "observation": "tool", "function_call": "assistant"},
}
SHAREGPT_ROLES: Mapping[str, RowRole] = {
    **{"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"tool": "tool", "observation": "tool", "function_response": "tool", "function_call": "assistant"},
}
"""Names of roles in messages, of `chat` and of `sharegpt`, with their meaning."""

FigureName = Literal["weight", "label"]
FIGURES: tuple[FigureName, ...] = get_args(FigureName)
ExampleName = Literal["answer", "pair", "labelled"]


@dataclass(frozen=True, slots=True)
class ExampleKind:
    """Content of an objective's rows, and what follows for its microbatches."""

    noun: str
    """Rows, in words."""
    row_types: tuple[RowType, ...]
    """Types that its rows have; `auto` takes the first whose fields are all there."""
    sides: tuple[str | None, ...] = (None,)
    """Names of a row's sequences. A microbatch has all first ones, then all second ones."""
    figure: FigureName | None = None
    """Column with a figure of the whole row: `weight` (may be missing), or `label` (true or false, which all have)."""
    metrics: tuple[str, ...] = ()
    """Keys that a step has in metrics.jsonl beside the usual ones, and an evaluation in place of the perplexity."""


SINGLE_TYPES = tuple(name for name, kind in ROW_KINDS.items() if kind.num_answers < 2)
"""Types of rows without a second answer."""
ANSWER_TYPES = tuple(name for name in SINGLE_TYPES if ROW_KINDS[name].num_answers)
"""Types of rows with one answer to train."""

EXAMPLES: Mapping[ExampleName, ExampleKind] = {
    "answer": ExampleKind("rows", SINGLE_TYPES, figure="weight"),
    "pair": ExampleKind(
        "preference pairs",
        ("preference",),
        sides=("chosen", "rejected"),
        metrics=("rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy", "nll_loss"),
    ),
    "labelled": ExampleKind(
        "labelled answers",
        ANSWER_TYPES,
        figure="label",
        metrics=("rewards_chosen", "rewards_rejected", "reward_margin", "kl"),
    ),
}
"""All kinds of rows that an objective trains on."""

Objective = Literal["sft", "dpo", "orpo", "simpo", "ipo", "kto", "distill"]
LossName = Literal["sigmoid", "odds_ratio", "squared", "kto"]


@dataclass(frozen=True, slots=True)
class ObjectiveKind:
    """Rows that an objective trains on, and what it computes of their answers."""

    example: ExampleName
    """Content of a row."""
    needs_reference: bool = False
    """The answers are scored by the reference model, too, before each step: the model without the trained adapter."""
    needs_teacher: bool = False
    """Beside the cross entropy of each token the loss has the divergence from a teacher's most probable tokens, which a
    folder of scores has; both are logged, as `nll_loss` and `kl`."""
    estimates_kl: bool = False
    """Beside that, model and reference score each of a step's prompts with the answer to another one."""
    averages: bool = False
    """An answer's log-probability is the mean over its tokens, not their sum; prompts would then change it."""
    loss: LossName | None = None
    """Function in `model/sequence_loss.py`, of whole answers: rows are neither packed, nor split, nor cut into chunks.
    None: a sum over tokens, in `model/head.py`."""
    section: str | None = None
    """Recipe key with the settings of the loss."""
    nll_factor: float | str = 0.0
    """Factor of the chosen answers' negative log-likelihood in the loss, or the key of the section that has it."""
    loss_type: str | None = None
    """The name of the loss in TRL's `loss_type` and LLaMA-Factory's `pref_loss`."""

    @property
    def rows(self) -> ExampleKind:
        """Content of a row, as the table has it."""
        return EXAMPLES[self.example]

    @property
    def num_passes(self) -> int:
        """Forward passes over as many tokens as a step's before each step."""
        return self.needs_reference + 2 * self.estimates_kl

    @property
    def meaning(self) -> str:
        """Rows and reference, for the table of recipe keys."""
        with_teacher = ", with a teacher's scores" * self.needs_teacher
        return self.rows.noun + ", with a reference" * self.needs_reference + with_teacher


OBJECTIVES: Mapping[Objective, ObjectiveKind] = {
    "sft": ObjectiveKind("answer"),
    "dpo": ObjectiveKind("pair", needs_reference=True, loss="sigmoid", section="dpo", loss_type="sigmoid"),
    "orpo": ObjectiveKind("pair", averages=True, loss="odds_ratio", section="orpo", nll_factor=1.0, loss_type="orpo"),
    "simpo": ObjectiveKind(
        "pair", averages=True, loss="sigmoid", section="simpo", nll_factor="cpo_alpha", loss_type="simpo"
    ),
    "ipo": ObjectiveKind("pair", needs_reference=True, averages=True, loss="squared", section="ipo", loss_type="ipo"),
    "kto": ObjectiveKind(
        "labelled", needs_reference=True, estimates_kl=True, loss="kto", section="kto", loss_type="kto"
    ),
    "distill": ObjectiveKind("answer", needs_teacher=True, section="distill"),
}
"""All values of `objective`. The first is the default; `init` chooses the first that trains on the rows it finds."""

SCORING_OBJECTIVES = tuple(name for name, kind in OBJECTIVES.items() if kind.loss is not None)
"""Objectives whose loss is of whole answers."""


def objectives_of(example: ExampleName) -> tuple[Objective, ...]:
    """The objectives that train on such rows."""
    return tuple(name for name, kind in OBJECTIVES.items() if kind.example == example)


ScheduleName = Literal["roundpipe", "looped_bfs", "gpipe", "1f1b", "interleaved_1f1b"]


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """Properties that set a schedule apart from others."""

    label: str
    """The name in papers."""
    binds_stages: bool = True
    """Each stage belongs to one worker, and backward stages mirror the forward ones. Otherwise stages are dealt out."""
    one_stage_each: bool = False
    """As many stages as workers; other bound schedules take any multiple of the workers."""
    takes_chunks: bool = False
    """All chunks of a sequence go forward through all stages before one of them goes backward."""
    keeps_few: bool = False
    """Bound: as many microbatches as workers are between forward and backward at most, otherwise all of a step."""


SCHEDULE_KINDS: Mapping[str, ScheduleKind] = {
    "roundpipe": ScheduleKind("RoundPipe", binds_stages=False, takes_chunks=True),
    "looped_bfs": ScheduleKind("looped BFS", takes_chunks=True),
    "gpipe": ScheduleKind("GPipe", one_stage_each=True, takes_chunks=True),
    "1f1b": ScheduleKind("1F1B", one_stage_each=True, keeps_few=True),
    "interleaved_1f1b": ScheduleKind("interleaved 1F1B"),
}
"""All schedules, in the order in which `bench` lists them."""

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
BOUND_SCHEDULES = tuple(name for name in SCHEDULES if SCHEDULE_KINDS[name].binds_stages)
CHUNK_SCHEDULES = tuple(name for name in SCHEDULES if SCHEDULE_KINDS[name].takes_chunks)


OptimizerName = Literal["adamw", "adamw_bf16", "adamw_8bit", "sgd", "adafactor"]
ADAM_KEYS = ("adam_beta1", "adam_beta2", "adam_epsilon")


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """State that an optimizer keeps, and keys that it reads. Bytes are per trained parameter."""

    meaning: str
    """Bytes of state and what is particular, for the table of recipe keys."""
    moment_bytes: float = 0.0
    """State of every element."""
    momentum_bytes: float = 0.0
    """State of every element where `sgd_momentum` is not 0."""
    side_bytes: float = 0.0
    """State of every row and of every column of a matrix."""
    update_bytes: float = 30.0
    """Traffic of host memory that takes as long as the update of an element. AdamW reads gradient 4, master 4 and
    moments 8, and writes master 4, moments 8 and the 16-bit weight 2; others take more or less time than that, as
    measured (scripts/README.md)."""
    temporary_bytes: float = 0.0
    """Temporaries of an update for each element of the largest parameter, where it is updated as a whole."""
    keys: tuple[str, ...] = ()
    """Recipe keys that only some optimizers read, this one among them."""
    other_names: tuple[str, ...] = ()
    """Names that other trainers have for the same optimizer."""

    def state_bytes(self, narrow: int, wide: int, *, has_momentum: bool) -> float:
        """State of each parameter in matrices of `narrow` x `wide` elements."""
        element_bytes = self.moment_bytes + (self.momentum_bytes if has_momentum else 0.0)
        return element_bytes + self.side_bytes / narrow + self.side_bytes / wide


OPTIMIZERS: Mapping[OptimizerName, OptimizerKind] = {
    "adamw": OptimizerKind(
        "8",
        moment_bytes=8,
        keys=ADAM_KEYS,
        other_names=("adamw_torch", "adamw_torch_fused", "adamw_hf", "AdamW", "paged_adamw_32bit"),
    ),
    "adamw_bf16": OptimizerKind("4, the moments in bfloat16", moment_bytes=4, keys=ADAM_KEYS, update_bytes=60),
    "adamw_8bit": OptimizerKind(
        "2 (bitsandbytes; many times slower on the host)",
        moment_bytes=2 + 8 / 256,  # two codes, and two float32 scales for each 256
        keys=ADAM_KEYS,
        update_bytes=490,
        other_names=("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_8bit_bnb", "AdamW8bit"),
    ),
    "sgd": OptimizerKind("0, with momentum 4", momentum_bytes=4, keys=("sgd_momentum",), update_bytes=23),
    "adafactor": OptimizerKind(
        "(that of transformers, with this recipe's learning rate) next to nothing",
        side_bytes=4,
        update_bytes=265,
        temporary_bytes=8,
    ),
}
"""All values of `optim`."""

OPTIMIZER_KEYS = tuple(dict.fromkeys(key for kind in OPTIMIZERS.values() for key in kind.keys))
"""Recipe keys that not every optimizer reads."""


IGNORED_LABEL = -100
"""Label of a token that is not trained, as in torch and transformers."""
UNPACKED_AT_ONCE = 1 << 30
"""Most weights unpacked in one call: bitsandbytes counts in 32 bits. A multiple of `WEIGHTS_PER_SCALE`."""
WEIGHTS_PER_SCALE = 64
"""bitsandbytes' packing."""
SCALE_BYTES = 4
BLOCK_SIZE = 128
"""Rows, and columns, that share a scale in published FP8."""
USUAL_ROW = 1024
"""Weights of a row, where only their number is known: most models have longer ones, and a scale then matters less."""
PackedName = Literal["4bit", "8bit", "fp8", "mxfp4", "fp8_blocks"]


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """A form in which frozen weights stay on the host and in slots, whole only in use."""

    name: PackedName
    label: str
    """For readers."""
    bits: int
    """Width of each weight's code."""
    weight_change: float
    """Relative root mean square by which normally distributed weights change."""
    weights_per_scale: int | None = WEIGHTS_PER_SCALE
    """None: a scale for each row."""
    needs_bitsandbytes: bool = True
    passes: int = 1
    """Over a weight while it is unpacked on a GPU, each of which writes it whole, and all but the first read it so."""
    scale_bytes: int = SCALE_BYTES
    is_published: bool = False
    """Only models whose files have it are in this form; no key of a recipe packs others so."""
    experts_only: bool = False
    """Files have routed experts so, and all other weights whole."""

    @property
    def key(self) -> str:
        """Recipe key that asks for it; meaningless where it `is_published`."""
        return f"load_in_{self.name}"

    @property
    def cost(self) -> str:
        """The price in words, with the command for a package that is needed."""
        package = "; needs `pip install bitsandbytes`" if self.needs_bitsandbytes else ""
        return f"frozen weights change by {100 * self.weight_change:.2g} %{package}"

    @property
    def bytes_per_param(self) -> float:
        """With the scale that some weights share."""
        return self.bits / 8 + self.scale_bytes / (self.weights_per_scale or USUAL_ROW)


PACKED_FORMATS: Mapping[PackedName, PackedFormat] = {
    kind.name: kind
    for kind in (
        PackedFormat("4bit", "4 bit", 4, 0.09),
        PackedFormat("8bit", "8 bit", 8, 0.01),
        PackedFormat("fp8", "FP8", 8, 0.026, weights_per_scale=None, needs_bitsandbytes=False, passes=2),
        PackedFormat("mxfp4", "MXFP4", 4, 0.0, 32, False, scale_bytes=1, is_published=True, experts_only=True),
        PackedFormat("fp8_blocks", "FP8 blocks", 8, 0.0, BLOCK_SIZE**2, False, is_published=True),
    )
}
"""NF4 (arXiv 2305.14314, without its second quantization), bitsandbytes' blockwise dynamic code, e4m3 by rows; as
published, where unpacking changes nothing: MXFP4 (OCP Microscaling Formats 1.0), and e4m3 by blocks."""
LOADED_FORMATS = tuple(kind for kind in PACKED_FORMATS.values() if not kind.is_published)
"""Formats into which weights are packed while they are loaded, each with a key of a recipe."""
