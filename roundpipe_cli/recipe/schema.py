"""The schema of a recipe: every key with its type, range, default and meaning, each written once.

The dataclasses are the contract: `check.py` reads these annotations, so a key added here is accepted, checked and
documented without another line elsewhere. Sizes are in tokens, rows or microbatches as stated under each field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from roundpipe_cli.choices import (
    FIGURES,
    LOADED_FORMATS,
    OBJECTIVES,
    OPTIMIZERS,
    ROW_KINDS,
    SCHEDULE_KINDS,
    Objective,
    ObjectiveKind,
    OptimizerKind,
    OptimizerName,
    PackedName,
    RowRole,
    RowType,
    ScheduleName,
)

# Conditions beside the type that a value of a recipe must meet; they stand in the annotations of keys.

MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True)
class Range:
    """A closed interval of numbers; `above` and `below` exclude the border."""

    low: float = 0
    high: float = MAX_INTEGER
    above: bool = False
    below: bool = False

    def accepts(self, value: Any) -> bool:
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below else value <= self.high
        return bool(over and under)

    def describe(self, noun: str) -> str:
        low = f"{'above' if self.above else 'of at least'} {self.low:g}"
        if self.high >= MAX_INTEGER:
            return f"{noun} {low}"
        if not self.above and not self.below:
            return f"{noun} from {self.low:g} to {self.high:g}"
        return f"{noun} {low} and {'below' if self.below else 'at most'} {self.high:g}"


@dataclass(frozen=True)
class Matching:
    """Text of a certain form."""

    pattern: str
    form: str

    def accepts(self, value: Any) -> bool:
        return re.fullmatch(self.pattern, value) is not None

    def describe(self, noun: str) -> str:
        return self.form


@dataclass(frozen=True, eq=False)
class Named:
    """Names of a table as a type; where entries have meanings, the list of keys shows them behind the key's own."""

    table: Mapping[str, Any]

    def accepts(self, value: Any) -> bool:
        return value in self.table

    def describe(self, noun: str) -> str:
        return f"one of {', '.join(self.table)}"

    @property
    def meanings(self) -> str:
        kinds = (OptimizerKind, ObjectiveKind)
        told = [f"{name} {kind.meaning}" for name, kind in self.table.items() if isinstance(kind, kinds)]
        return "; ".join(told) + "." if told else ""


@dataclass(frozen=True)
class NotEmpty:
    """At least one item, or one character that is not white space."""

    def accepts(self, value: Any) -> bool:
        return bool(value.strip()) if isinstance(value, str) else len(value) > 0

    def describe(self, noun: str) -> str:
        return f"{noun} that is not empty"


@dataclass(frozen=True)
class InclusiveRange:
    """`[first, last]`, both inclusive; `[a, a - 1]` is an empty stage."""

    def accepts(self, value: Any) -> bool:
        return len(value) == 2 and value[0] >= 0 and value[1] >= value[0] - 1

    def describe(self, noun: str) -> str:
        return "an inclusive range of layers such as [0, 6]"


# Parts of a recipe that are mappings of their own, and the types of values that keys share.

Words = Annotated[str, NotEmpty()]
PositiveInt = Annotated[int, Range(1)]
StepInterval = Literal["epoch"] | PositiveInt | Annotated[float, Range(0, 1, above=True, below=True)]
"""Steps between two saves or evaluations; a number below 1 is a share of the run's steps, as in transformers."""
DeviceName = Annotated[str, Matching(r"cpu|cuda:\d{1,3}", "cpu or cuda:N, for instance cuda:0")]
VariableName = Annotated[str, Matching(r"[A-Za-z_]\w{0,63}", "a name, for instance enable_thinking")]
Stages = Annotated[tuple[Annotated[tuple[int, ...], InclusiveRange()], ...], NotEmpty()]
Column = Annotated[
    str,
    Named(dict.fromkeys([*(name for kind in ROW_KINDS.values() for name in (*kind.fields, *kind.optional)), *FIGURES])),
]
LENGTH_KEY = "max_seq_length"
USUAL_ROW_TOKENS = 2048
"""`max_seq_length` where a recipe has none."""
MAX_LEARNING_RATE = 10
"""Higher ones are slips, such as 2e4 for 2e-4."""
DEFAULT_LEARNING_RATES = {
    **{"LoRA": 2.0e-4, "full fine-tuning": 1.0e-5},
    **{"preference pairs": 5.0e-6, "labelled answers": 5.0e-6},
}
"""Kind of training -> `learning_rate` where a recipe has none; the key's own text names the sources."""


def trained_kind(method: object, objective: object) -> str:
    """The kind of training, as `DEFAULT_LEARNING_RATES` names it."""
    kind = next((kind for name, kind in OBJECTIVES.items() if name == objective), None)
    if kind is not None and kind.loss is not None:
        return kind.rows.noun
    return "full fine-tuning" if method == "full" else "LoRA"


RATE_SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    **dict.fromkeys(("linear", "constant"), ()),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        *("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
}
"""transformers' schedules of the learning rate, with their settings."""
_NOT_NEGATIVE, _COUNT = Annotated[float, Range(0)], Annotated[int, Range(0)]
_CURVE = Literal["linear", "cosine", "1-sqrt"]
RATE_SETTINGS: Mapping[str, Any] = {
    **dict.fromkeys(("num_cycles", "lr_end", "power", "min_lr", "min_lr_rate", "min_lr_ratio"), _NOT_NEGATIVE),
    "timescale": Annotated[float, Range(0, above=True)],
    **{"num_decay_steps": _COUNT, "num_stable_steps": _COUNT, "warmup_type": _CURVE, "decay_type": _CURVE},
}
"""Values of each setting for which no step has a negative learning rate. A negative power has no bound above."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, by PEFT. Used when `method` is lora."""

    r: Annotated[int, Range(1, 65536)] = 16
    """Rank of the adapters. Trainable parameters and adapter size grow with it."""
    expert_r: Literal["auto"] | Annotated[int, Range(0, 65536)] = "auto"
    """Rank of the adapters of experts. `auto` is `r` divided by the number of experts that compute a token, at least 1,
    as in the study "LoRA without regret" (thinkingmachines.ai, 2025); 0: experts have none. Routers never have one."""
    alpha: Annotated[float, Range(0, above=True)] = 32.0
    """Scaling: the adapter's output is multiplied by alpha / r (an expert's by alpha / expert_r)."""
    dropout: Annotated[float, Range(0, 1, below=True)] = 0.0
    """Probability that an input of the adapter is zeroed in training. 0 is off."""
    target_modules: Words | Annotated[tuple[Words, ...], NotEmpty()] = "all-linear"
    """Modules that get an adapter: `all-linear` (every linear layer but the LM head, and all experts), a list of
    names such as [q_proj, v_proj], or a regular expression that matches a module's whole name, such as
    .*layers.1[0-9].*_proj"""
    modules_to_save: tuple[Words, ...] = ()
    """Names of modules that are trained whole beside the adapters and saved with them, such as [embed_tokens, lm_head]
    (a table that both share cannot be) or a norm of the blocks."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead of alpha / r, so that a high rank learns as fast (arXiv 2312.03732)."""
    use_dora: bool = False
    """Train the length of each output's weights separately from their direction (DoRA, arXiv 2402.09353). Slower: the
    adapted weights' norms are computed in every call. Not for fused experts."""
    init: Literal["default", "gaussian"] = "default"
    """Start of the A matrices: Kaiming uniform, or normal with deviation 1 / r. B starts at zero. Starts that change
    the base weights (PiSSA, OLoRA, LoftQ) are not offered."""
    loraplus_lr_ratio: Annotated[float, Range(0, above=True)] = 1.0
    """The learning rate of the B matrices is this many times the recipe's (LoRA+, arXiv 2402.12354; 16 is usual)."""
    start_from: Words | None = None
    """Folder of a LoRA adapter in PEFT's format to train further. Rank, alpha, targets and the other shapes are the
    adapter's; base weights that its start changed (PiSSA, OLoRA) are changed again. With `objective: dpo` the adapter,
    as it is, becomes the reference. null starts with a fresh one."""


@dataclass(frozen=True, kw_only=True)
class DpoConfig:
    """Direct preference optimisation. Used when `objective` is dpo."""

    beta: Annotated[float, Range(0, above=True)] = 0.1
    """How strongly the model is held to the reference model: larger stays closer."""
    label_smoothing: Annotated[float, Range(0, 0.5, below=True)] = 0.0
    """Share of the pairs that are assumed to be labelled the wrong way round (conservative DPO). 0 is off."""


@dataclass(frozen=True, kw_only=True)
class OrpoConfig:
    """Odds ratio preference optimisation (arXiv 2403.07691). Used when `objective` is orpo."""

    beta: Annotated[float, Range(0, above=True)] = 0.1
    """Weight of the odds ratio loss beside the negative log-likelihood of the chosen answers: the paper's lambda."""
    nll_on_prompt: bool = True
    """The likelihood is of the chosen rows' prompts too, a mean over the tokens of a step, as in TRL and the authors'
    code. `false`: of the answers alone, each answer's mean weighing the same, as in LLaMA-Factory."""


@dataclass(frozen=True, kw_only=True)
class SimpoConfig:
    """Simple preference optimisation (arXiv 2405.14734). Used when `objective` is simpo."""

    beta: Annotated[float, Range(0, above=True)] = 2.0
    """Factor of an answer's mean log-probability, which makes its reward. The authors use 2 to 10; 0.1, the default of
    TRL, LLaMA-Factory and axolotl, makes rewards small beside `simpo_gamma`."""
    simpo_gamma: Annotated[float, Range(0)] = 0.5
    """Margin by which the chosen answer's reward is to exceed the rejected one's."""
    label_smoothing: Annotated[float, Range(0, 0.5, below=True)] = 0.0
    """Share of the pairs that are assumed to be labelled the wrong way round. 0 is off."""
    cpo_alpha: Annotated[float, Range(0)] = 0.0
    """Weight of the negative log-likelihood of the chosen answers, added to the loss (CPO-SimPO; 1 is the default of
    TRL and axolotl). 0 is off."""


@dataclass(frozen=True, kw_only=True)
class IpoConfig:
    """Identity preference optimisation (arXiv 2310.12036), by means over tokens as in TRL. Used when `objective` is
    ipo."""

    beta: Annotated[float, Range(0, above=True)] = 0.1
    """The margin that training aims at is 1 / (2 x beta): larger stays closer to the reference model."""


@dataclass(frozen=True, kw_only=True)
class KtoConfig:
    """Kahneman-Tversky optimisation (arXiv 2402.01306), of answers that are labelled as wanted or not, as in TRL. Used
    when `objective` is kto."""

    beta: Annotated[float, Range(0, above=True)] = 0.1
    """How strongly the model is held to the reference model: larger stays closer."""
    desirable_weight: Annotated[float, Range(0)] = 1.0
    """Factor of the loss of wanted answers. The authors balance unequal numbers so that this times the wanted answers
    is 1 to 4/3 of `undesirable_weight` times the unwanted ones."""
    undesirable_weight: Annotated[float, Range(0)] = 1.0
    """Factor of the loss of unwanted answers."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Distillation from a larger model with the same tokenizer, by its most probable tokens at each trained place. Used
    when `objective` is distill."""

    teacher: Words | None = None
    """Folder of the teacher's scores: `roundpipe score RECIPE ROWS model=TEACHER --top-k 64 --to FOLDER`, with this
    recipe, so that rows are read alike. Its rows may be more than those that are trained."""
    weight: Annotated[float, Range(0, 1)] = 0.5
    """Share of the divergence from the teacher in the loss; the rest is cross entropy. 0.5 is torchtune's default, too.
    1 learns from the teacher alone."""
    temperature: Annotated[float, Range(0, above=True)] = 1.0
    """Probabilities of student and teacher are raised to 1 / temperature, and the divergence times temperature^2. Above
    1, less probable tokens weigh more; of those that the scores left out only the sum is known, so 1 is safe."""


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One source of rows."""

    path: Words
    """A local file, glob (`data/**/*.jsonl`) or folder (jsonl, json, parquet, csv, tsv, txt, also .gz), or a hub
    dataset id. Relative paths are tried from the working directory, then from the recipe's folder. Files without rows
    are left out and counted."""
    name: Words | None = None
    """Configuration of a hub dataset, for instance `main` of openai/gsm8k. null is its default."""
    type: Literal["auto", RowType] = "auto"
    """Shape of the rows; `auto` decides by the columns. Only the chat-shaped types need a chat template."""
    split: Words = "train"
    """Split of a hub dataset; slices such as `train[:1000]` are the hub library's own."""
    weight: Annotated[float, Range(0, above=True)] = 1.0
    """Share of this source in the rows of an epoch, relative to the others' weights; a row comes again when all rows of
    its source have come. All weights equal (as here): every row once an epoch, whatever the sizes."""
    columns: Mapping[Column, Words] = field(default_factory=dict)
    """Other names of the columns: `{prompt: question, completion: answer}` reads the column `question` as the
    prompt. Empty: the columns have the type's own names. Optional ones are looked for in each row."""
    roles_to_train: Annotated[tuple[RowRole, ...], NotEmpty()] = ("assistant",)
    """Roles whose turns are trained, each with the end of its turn. A message with `train: true` is too, and one with
    `train: false` or `weight: 0` is not, whatever its role."""
    turns_to_train: Literal["all", "last"] = "all"
    """`last` trains the last turn alone of those that would be trained; the turns before it are its context."""
    train_on_eos: Literal["turn", "last", "all", "none"] = "turn"
    """Ends of turns that are trained: those of trained turns, the last of these, every turn's, or none. For rows that
    are plain texts with an answer, all but `none` train the EOS behind it."""
    thoughts: Literal["train", "mask", "drop"] = "train"
    """Treatment of the assistant's thoughts, in `reasoning_content` or in a <think> block that begins a content:
    trained, kept as context that is not trained, or left out of the text. `mask` and `drop` refuse answers with such
    marks elsewhere."""
    as_chat: bool = True
    """Plain prompts and completions become turns where the tokenizer has a chat template. `false` joins them as they
    stand (TRL), or in the Alpaca prompt (axolotl)."""
    alpaca_join: Literal["blank_line", "newline"] = "blank_line"
    """Text between instruction and input of alpaca rows in the user's turn: LLaMA-Factory has `newline`."""
    txt_rows: Literal["paragraph", "line", "file"] | Words = "paragraph"
    """Rows of a .txt file: its paragraphs, its lines, the whole file, or what stands between any other text that is
    given here, such as <|endoftext|>."""
    encoding: Words = "utf-8"
    """Encoding of local files of text, by Python's name: cp1252 is what Excel saves on a Western Windows, cp1251 on a
    Cyrillic one. UTF-16 files say so themselves."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the model is cut and who computes what. Changes speed and memory, never the loss."""

    devices: Literal["auto"] | Annotated[tuple[DeviceName, ...], NotEmpty()] = "auto"
    """One worker for each entry: [cuda:0, cuda:1] or [cpu, cpu]; a device may be listed twice. `auto` is all GPUs, but
    those of less memory where `plan` finds a run faster, or possible, without them; [cpu, cpu] where there is none."""
    schedule: ScheduleName = "roundpipe"
    """Order of the work; all but roundpipe are there for comparison."""
    forward_stages: Literal["auto"] | Stages = "auto"
    """Inclusive ranges of layers, in order: [[0, 6], [7, 13]]; layer 0 is the embedding. `auto`: the planner cuts."""
    backward_stages: Literal["auto"] | Stages = "auto"
    """Like `forward_stages`, first executed first: the stage with the head comes first."""
    threads_per_worker: Literal["auto"] | Annotated[int, Range(1, 4096)] = "auto"
    """CPU workers: intra-op threads of each. `auto` is cores / workers. Changes the bits of a loss, not its value."""
    recompute: Literal["stage", "layer", "none"] = "stage"
    """Which activations backward computes again instead of keeping: `stage` keeps the activations of one microbatch and
    stage, `layer` of one layer, `none` those of all blocks, see `keep_activations`."""
    keep_activations: Literal["auto"] | Annotated[int, Range(0)] = "auto"
    """Blocks, counted from the last, whose activations stay on the device from forward to backward: not recomputed, for
    as many bytes as a round's microbatches have there. They stay where a block's forward and backward run on the same
    worker: always with one worker or a schedule that binds stages, sometimes with roundpipe on several. Blocks whose
    weights are packed (4 bit, 8 bit, FP8) are always recomputed. `auto` is 0."""
    weight_cache: Literal["auto"] | Annotated[int, Range(0)] = "auto"
    """Bytes of each GPU's memory for weights that stay there beside the slots: frozen weights are uploaded once,
    trained ones once a step, in place of every time that their stage is visited. Workers on the processor read host
    memory and need none. `auto` is what a LoRA run leaves free of 85 % of the memory, as far as its weights fill it.
    Where all of them fit and the simulator finds it faster, stages count on that: each microbatch stays on one GPU."""
    head_workers: Literal["auto"] | PositiveInt = "auto"
    """Workers that share the microbatches of the stage with the LM head (roundpipe only). Pays where the head takes
    much of a step. A trained head's gradients then go to the host for each microbatch and wait there to be added in
    order. `auto` is all GPUs where the simulator finds a step faster so and the memory suffices, else 1."""
    dispatch: Literal["auto", "round_robin", "earliest_free"] = "auto"
    """Who gets the next stage (roundpipe only): the next worker in turn, or for every microbatch the one that would be
    done with it first, which suits workers of different speed. `auto` is the latter where the first steps show that
    workers differ by more than 10 %, or where blocks are frozen, and the simulator finds it faster; of frozen blocks
    all workers may also share the last stages of a step."""
    sequence_chunks: Literal["auto"] | Annotated[int, Range(1, 1024)] = "auto"
    """Chunks into which each sequence is cut along its tokens, so that several workers compute one long sequence at
    once: chunks flow through the stages as microbatches do, and a chunk's attention reads the keys and values of the
    chunks before it. Loss and gradients are those of the whole sequence up to rounding (dropout draws other masks).
    Packed rows are cut wherever a chunk ends. Not with preference pairs, kept activations or recurrent blocks (but
    gated delta rules, as Qwen3.5 has them). A chunk has at least 8 tokens of `max_seq_length`; shorter rows that are
    not packed are padded to a token a chunk. `auto` is 1 where rows fit whole, otherwise the fastest of 2, 4, 8, 16 and
    32 that fits, by prediction for these cards; the saved recipe holds the number. On processors it is one for which
    several workers have room, whatever their number, where these have none for whole rows."""
    skip_last_projection: Literal["auto"] | bool = "auto"
    """Leave out of a recompute what backward never reads: products that only become a block's output. Exact; a proof
    when the model is loaded says which those are. `true` keeps the input of every block on the host meanwhile, `auto`
    only if that takes a small part of its memory; otherwise the product is left out at the end of a stage only."""

    @property
    def binds_stages(self) -> bool:
        """Whether each stage belongs to one worker, see `ScheduleKind`."""
        return SCHEDULE_KINDS[self.schedule].binds_stages

    @property
    def num_chunks(self) -> int:
        """Chunks of each sequence."""
        return 1 if self.sequence_chunks == "auto" else self.sequence_chunks


@dataclass(frozen=True, kw_only=True)
class NodesConfig:
    """Several machines, one process on each, started by torchrun. Changes memory and traffic, never the loss."""

    shard_optimizer: Literal["auto"] | bool = "auto"
    """Share optimizer state and float32 masters out over the machines, whole layers to each (ZeRO stage 1; `method:
    full`). `auto` does so where one machine's memory is short for all of it."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One fine-tuning run."""

    model: Words
    """Hub id, local folder, .gguf file, or `package:NAME` (the one .gguf in that installed Python package)."""
    revision: Words | None = None
    """Branch, tag or commit of a hub model. null is the default branch."""
    method: Literal["lora", "full"] = "lora"
    """`lora` trains adapters; `full` trains every weight (18 bytes of host memory a parameter in 16 bit)."""
    objective: Annotated[Objective, Named(OBJECTIVES)] = "sft"
    """The loss, and the rows it trains on: answers; pairs of a chosen and a rejected one (datasets of type preference:
    columns prompt, chosen, rejected); answers with a column `label`, true where the answer is wanted; or answers and
    what a teacher made of them (`distill.teacher`). A reference is the base model, or the adapter of `lora.start_from`
    as it is, so it needs `method: lora`. Values:"""
    dpo: DpoConfig = field(default_factory=DpoConfig)
    """Not used unless `objective` is dpo."""
    orpo: OrpoConfig = field(default_factory=OrpoConfig)
    """Not used unless `objective` is orpo."""
    simpo: SimpoConfig = field(default_factory=SimpoConfig)
    """Not used unless `objective` is simpo."""
    ipo: IpoConfig = field(default_factory=IpoConfig)
    """Not used unless `objective` is ipo."""
    kto: KtoConfig = field(default_factory=KtoConfig)
    """Not used unless `objective` is kto."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """Not used unless `objective` is distill."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters; not used when `method` is full."""
    load_in_16bit: bool = False
    """Unpack weights that the model's files hold in MXFP4 (GPT-OSS) or FP8 blocks (DeepSeek, GLM, Qwen): the same
    weights at two to four times the host memory and uploads. Otherwise they stay as published and are unpacked for use.
    Full fine-tuning always unpacks them. Without effect on other models."""
    load_in_4bit: bool = False
    """Keep the frozen base weights in 4 bit (NF4): a quarter of the host memory and of the uploads."""
    load_in_8bit: bool = False
    """Keep the frozen base weights in 8 bit (bitsandbytes' blockwise dynamic code): half of the host memory and of the
    uploads, and closer to the original weights than 4 bit."""
    load_in_fp8: bool = False
    """Keep the frozen base weights in FP8 (e4m3, a scale for each row): half of the host memory and of uploads. Like
    8 bit, but without bitsandbytes and coarser: normally distributed weights change by 2.6 % (root mean square; 8 bit
    1 %, 4 bit 9 %). They are unpacked to `dtype` for use, so any GPU will do; that took an H100 0.4 times
    as long as a product with 8,192 tokens."""
    datasets: Annotated[tuple[DatasetConfig, ...], NotEmpty()]
    """Training rows, from one or more sources."""
    val_set_size: Annotated[int, Range(0)] | Annotated[float, Range(0, 1, below=True)] = 0.0
    """Rows held out for evaluation and never trained on, chosen by `seed`: a number of rows, or a fraction (below 1) of
    all rows. 0 is none."""
    max_seq_length: Literal["auto"] | PositiveInt = USUAL_ROW_TOKENS
    """Tokens of the longest row; `long_rows` says what happens to longer ones. Activation memory grows with it. `auto`
    is the longest row of the data, those to evaluate on too, so that none is cut; a run stops at its start where that
    does not fit, with the most tokens that do. The saved recipe holds the number; where rows cannot be read (`plan`
    without the data, `eval`), 2048 stands for it."""
    packing: Literal["auto"] | bool = "auto"
    """Put several short rows into one sequence of `max_seq_length` tokens; they do not see each other. A step then has
    as many sequences as it has rows otherwise, and so more rows. `auto` does so where rows have at most half of
    `max_seq_length` tokens on average, the model allows it and enough steps are left; the run says which and keeps to
    it."""
    shuffle: bool = True
    """New order of the rows in each epoch, from `seed`."""
    train_on_inputs: bool = False
    """Train on prompt tokens too; otherwise only on answers."""
    long_rows: Literal["error", "drop", "truncate", "split"] = "truncate"
    """How rows over `max_seq_length` tokens are treated; they and the tokens lost are always counted and reported.
    `split` cuts texts into sequences, so that nothing is lost; a conversation's later pieces would have no prompt."""
    long_rows_overlap: Annotated[int, Range(0)] = 0
    """With `long_rows: split`, tokens of a sequence that the next one repeats as context, not trained again."""
    on_bad_row: Literal["error", "skip"] = "error"
    """How rows without the needed columns are treated; skipped rows are counted and named."""
    chat_template: Words | None = None
    """File or Jinja text in place of the tokenizer's own chat template. null is the tokenizer's own."""
    chat_template_kwargs: Mapping[VariableName, bool | int | float | Words] = field(default_factory=dict)
    """Variables of the chat template, for instance `{enable_thinking: false}`; also the defaults of the template that
    is saved with the result."""
    add_tokens: tuple[Words, ...] = ()
    """Words that become tokens of the model: always one token each, exactly as written, and no special ones, so that
    answers show them. They take unused rows of the embedding and the LM head, or new ones, which start as the mean of
    all tokens' rows. LoRA trains these rows alone (PEFT's trainable tokens), `method: full` the whole tables. The
    tokenizer is saved with the result. Other programs than PEFT need the merged model."""
    eval_datasets: tuple[DatasetConfig, ...] = ()
    """Rows for evaluation only; together with those that `val_set_size` holds out."""
    micro_batch_size: PositiveInt = 1
    """Rows of one microbatch, the unit of work of a stage; those of a step's rows that are of like length. Activation
    memory of a device grows with it."""
    gradient_accumulation_steps: PositiveInt = 8
    """Microbatches of one step. A step has micro_batch_size x gradient_accumulation_steps rows whatever the number of
    devices; more microbatches than devices make the pipeline's bubble small. With `micro_batch_tokens` only that
    product counts."""
    micro_batch_tokens: Literal["auto"] | PositiveInt | None = "auto"
    """Fill microbatches up to so many tokens, padding included, in place of `micro_batch_size` rows each: as many rows
    of like length as that, or at least one of `max_seq_length`, of which it counts whole ones. A step's rows stay the
    same, only their grouping changes, so its loss differs by rounding; of short rows it still has 4 microbatches, or as
    many as of full ones if those are fewer. `auto` is the fastest of 1024, 2048, 4096, 8192 and 16384 that fits, by
    prediction for these cards and their number; the saved recipe holds the number, for the same bits elsewhere. On
    processors it is up to 2048, whatever their number. null is `micro_batch_size` rows, the default beside that key;
    so is `auto` for rows in `pipeline.sequence_chunks`."""
    max_steps: PositiveInt | None = None
    """Optimizer steps of the whole run, in place of `num_train_epochs`: the rows are gone through as often as it takes.
    null leaves it to the epochs."""
    num_train_epochs: PositiveInt = 1
    """Passes over the training rows."""
    learning_rate: Annotated[float, Range(0, MAX_LEARNING_RATE, above=True)]
    """Peak learning rate, after warmup. Not given, it is that of what is trained: 2.0e-4 for LoRA, as in QLoRA (arXiv
    2305.14314) and Unsloth's guide; 5.0e-6 for preference pairs, Unsloth's guide again (TRL's default is 1.0e-6);
    1.0e-5 for all weights (TRL's default is 2.0e-5), as "LoRA without regret" (thinkingmachines.ai, 2025) found LoRA's
    best rate to be about ten times that of full fine-tuning."""
    lr_scheduler_type: Annotated[str, Named(RATE_SCHEDULES)] = "cosine"
    """How the learning rate falls after warmup, by transformers' schedules: to zero by a cosine or a line, not at all,
    ..."""
    lr_scheduler_kwargs: Mapping[Annotated[str, Named(RATE_SETTINGS)], int | float | Words] = field(
        default_factory=dict
    )
    """Settings of the schedule, by transformers' names: {min_lr_rate: 0.1} for cosine_with_min_lr."""
    lr_above_peak: bool = False
    """Let `lr_scheduler_kwargs` take the learning rate above `learning_rate`, by a min_lr_rate over 1 say. Otherwise
    that is refused, as is any step with a negative or infinite learning rate."""
    warmup_steps: Annotated[int, Range(0)] | Annotated[float, Range(0, 1, below=True)] = 0.03
    """Steps in which the learning rate rises from zero: a number of steps, or a fraction (below 1) of all steps."""
    optim: Annotated[OptimizerName, Named(OPTIMIZERS)] = "adamw"
    """The optimizer on the host. Bytes of its state for each trained parameter:"""
    adam_beta1: Annotated[float, Range(0, 1, below=True)] = 0.9
    """AdamW: decay of the gradient's average."""
    adam_beta2: Annotated[float, Range(0, 1, below=True)] = 0.999
    """AdamW: decay of the average of the gradient's square."""
    adam_epsilon: Annotated[float, Range(0, 1, above=True)] = 1.0e-8
    """AdamW: added to the root of that average."""
    sgd_momentum: Annotated[float, Range(0, 1, below=True)] = 0.0
    """Momentum of sgd. 0 is off."""
    weight_decay: Annotated[float, Range(0, 10)] = 0.0
    """Decoupled weight decay of adamw and adafactor; with sgd it is added to the gradient. Biases and norms have none,
    as in transformers. 0 is off."""
    frozen_parameters: tuple[Words, ...] = ()
    """With `method: full`: regular expressions; a parameter in whose name one of them is found stays as it is, such as
    [embed_tokens, 'layers[.][0-7][.]']."""
    label_smoothing_factor: Annotated[float, Range(0, 1, below=True)] = 0.0
    """Share of the training loss that is the mean over the whole vocabulary instead of the target token's. 0 is off.
    Evaluation is without it."""
    neftune_noise_alpha: Annotated[float, Range(0)] = 0.0
    """Uniform noise on the embeddings in training, at most alpha / sqrt(tokens x hidden size) (NEFTune, arXiv
    2310.05914; 5 is usual). 0 is off."""
    max_grad_norm: Annotated[float, Range(0)] = 1.0
    """Gradients of a step are scaled down to this global 2-norm. 0 is off, and lets a layer update early (but see
    `on_device_loss`)."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of weights and activations; masters are always float32. float16 uses loss scaling."""
    float16_accumulation: bool = False
    """Matrix products of `dtype: float16` on GPUs also add up in float16: 1.3 to 1.5 times as fast on GeForce cards, by
    data sheets, where `plan` names it, and no faster on data-centre cards. By a substitute on the processor gradients
    of SmolLM2-135M's adapters are 20 to 26 % off float32's (bfloat16: 3 %), of which all but 2 % come from the LM
    head's sums over the vocabulary; with planted outliers 24 to 31 % (bfloat16: 21 %); a held-out loss is within
    0.01 of it. Sums above 65,504 overflow; so do a trained head's gradients over its chunks of tokens. Compare the
    loss of a short run without it first. An H100 is no faster by it; no GeForce card was measured. Processors add up in
    float32 all the same."""
    deterministic: bool = False
    """GPUs compute a step to the same bits each time and, at the same microbatches, with any number of equal cards:
    attention's backward in order (up to 1.6 times its time, by arXiv 2601.21824; not measured here), cuBLAS with a
    workspace of its own, no atomics. An operator that torch has only unordered ends the run with its name. Processors
    do so anyway."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 42
    """Seed for shuffling, dropout and the initial adapters."""
    head_chunk_tokens: PositiveInt | None = None
    """Tokens for which the LM head computes logits at once. Memory of the head grows with it; it is never planned,
    since it changes the last bits of the head's gradient. null goes by the vocabulary alone: 1,024, and from 185,000
    words on 512 or 256."""
    kernels: Literal["auto", "reference"] = "auto"
    """Code that blocks are computed by: `auto` takes fused operators where they are known to compute the same as the
    model's and PEFT's own modules, which `reference` always takes. The values differ by rounding only, so a run keeps
    the setting that it began with. The report says what was fused."""
    mlp_chunk_tokens: PositiveInt | None = None
    """Tokens for which a block's feed-forward part (its experts) is computed at once, forward and backward: for long
    sequences, whose activations there would take the most memory. Its forward is computed again in backward, which
    costs nothing where a recompute leaves it out meanwhile. Fixed by the recipe, as it changes the last bits. null is
    all tokens of a microbatch."""
    output_dir: Words
    """Folder of checkpoints, metrics and the result. Not given: outputs/<name of the recipe file>."""
    logging_steps: PositiveInt = 1
    """Steps between two printed lines; metrics.jsonl has every step."""
    eval_steps: StepInterval | None = None
    """Steps between two evaluations (loss and perplexity, in eval.jsonl), a fraction (below 1) of all steps, or
    `epoch`: after each epoch. One is also made at the end; null is at the end only."""
    eval_samples: Annotated[int, Range(0, 64)] = 0
    """Answers generated at each evaluation, to the prompts of the first evaluation rows, with weights streamed as by
    `generate`."""
    eval_max_new_tokens: Annotated[int, Range(1, 4096)] = 64
    """Tokens of a generated answer at most."""
    load_best_model_at_end: bool = False
    """Keep the weights of the evaluation with the lowest loss (in best-STEP) and make them the result of the run."""
    early_stopping_patience: PositiveInt | None = None
    """Evaluations without a lower loss after which training stops. null trains to the end."""
    save_steps: StepInterval | None = 200
    """Steps between two checkpoints, a fraction (below 1) of all steps, or `epoch`: after each epoch. One is also
    written at the end and on a signal; null is then only."""
    save_total_limit: Annotated[int, Range(2)] = 2
    """Checkpoints kept; at least 2, so that a damaged newest one leaves another."""
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Trackers that get the metrics too, each through its own package: `pip install 'roundpipe-cli[wandb]'`. What they
    need to know (projects, servers, secrets) they read from their own variables."""
    hub_model_id: Words | None = None
    """Repository on the hub, such as me/my-model, that the finished result is uploaded to. It is made before training,
    private, unless it is there. null uploads nothing."""
    resume_from_checkpoint: Words | None = None
    """`auto` (the newest valid checkpoint in `output_dir`) or a checkpoint folder. One in `output_dir`: later ones are
    set aside (renamed to set-aside-step-*). One of another run: it continues in `output_dir`, which must hold no run,
    with a copy of its metrics. null starts afresh."""
    on_oom: Literal["stop", "adapt"] = "stop"
    """When a device runs out of memory: stop with advice, or recompute layer by layer, then divide the microbatches
    (same rows, same loss), then cut single rows into chunks where `pipeline.sequence_chunks` may, compute the step
    again and say what to write here."""
    on_device_loss: Literal["continue", "stop"] = "continue"
    """When a device fails or hangs: leave it out and compute the step again on the others, which changes no bit, and
    write a checkpoint; or stop with exit code 5. Where updates begin before a step ends (max_grad_norm of 0), a
    loss after that ends the run too; `finetune --restarts` then continues from the newest checkpoint."""
    check_longest_rows: Literal["auto"] | bool = "auto"
    """Compute a step of the longest rows before the first step and discard it, so that a lack of memory shows at once.
    It takes the time of a step and changes no bit of the run. `auto` does so on GPUs; not with packing, where all
    sequences are about as long, or on several machines."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When a loss or gradient is NaN or infinite: stop (exit code 4), or skip that update, name its rows and
    continue; ten such steps in a row stop the run anyway."""
    watchdog_s: Annotated[float, Range(0)] = 600.0
    """Seconds without progress after which the stacks of all threads are shown. Without a device that hangs, a run goes
    on (see `on_device_loss`), or ends with exit code 5 where no other is left; any other hang ends it with exit code 1.
    0 is never."""
    weights: Literal["auto", "pinned", "pageable", "mmap"] = "auto"
    """Where the base weights live on the host: page-locked (fastest), ordinary memory, or the checkpoint file."""
    hardware: Words | None = None
    """The machine that `plan` and the simulated `bench` assume, in the words of --hardware: 8x4090, or with figures,
    2x3090:pcie_lanes=8,host_memory_gib=64; 8x4090,machines=2,network_gb_per_s=1.25 are two. null is this one.
    `finetune` runs on what is here."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Devices, partition and schedule."""
    nodes: NodesConfig = field(default_factory=NodesConfig)
    """Settings for several machines; not used on one."""

    @property
    def objective_kind(self) -> ObjectiveKind:
        """The objective's entry in the table."""
        return OBJECTIVES[self.objective]

    @property
    def scores_answers(self) -> bool:
        """Whether the loss is of whole answers."""
        return self.objective_kind.loss is not None

    @property
    def loss_settings(self) -> object:
        """The section of the objective; None: it has none."""
        section = self.objective_kind.section
        return None if section is None else getattr(self, section)

    @property
    def nll_on_prompt(self) -> bool | None:
        """Whether the likelihood of chosen rows is of their prompts, too; None: the objective leaves no choice."""
        return getattr(self.loss_settings, "nll_on_prompt", None)

    @property
    def rows_per_step(self) -> int:
        """Rows of one update, or packed sequences."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def token_budget(self) -> int | None:
        """`micro_batch_tokens`; None where rows are counted, or while `auto` is not decided."""
        return None if self.micro_batch_tokens == "auto" else self.micro_batch_tokens

    @property
    def rows_per_microbatch(self) -> int:
        """Rows of a microbatch; with a token budget, rows of `max_seq_length` tokens, as many as the budget holds and
        a step needs to have no more microbatches."""
        if self.token_budget is None:
            return self.micro_batch_size
        most = max(1, self.token_budget // self.tokens_of_full_row)
        return -(-self.rows_per_step // -(-self.rows_per_step // most))

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row; the key's default while `auto` is not decided."""
        return USUAL_ROW_TOKENS if self.max_seq_length == "auto" else self.max_seq_length

    @property
    def tokens_of_full_row(self) -> int:
        """Tokens of the longest row; of both answers of a pair."""
        return self.row_tokens * len(self.objective_kind.rows.sides)

    @property
    def microbatches_per_step(self) -> int:
        """Microbatches of a step; with a token budget, of one whose rows have `max_seq_length` tokens: the most."""
        return -(-self.rows_per_step // self.rows_per_microbatch)

    @property
    def packs(self) -> bool:
        """Whether rows are packed, as far as that is decided: `auto` is not yet."""
        return self.packing is True

    @property
    def unpackable(self) -> str | None:
        """Why rows of this recipe cannot be packed, whatever the model; None where they can."""
        return f"{self.objective_kind.rows.noun} are not packed" if self.scores_answers else None

    @property
    def packed_as(self) -> PackedName | None:
        """Format into which a key packs the blocks' frozen weights; None: they are as `packed_from` says."""
        return next((kind.name for kind in LOADED_FORMATS if getattr(self, kind.key)), None)

    def packed_from(self, stored_as: PackedName | None) -> PackedName | None:
        """Format of the blocks' frozen weights in a run, of a model whose files have them in the format `stored_as`,
        None: whole; returns None: they lie whole."""
        if self.method == "full":
            return None
        return self.packed_as or (None if self.load_in_16bit else stored_as)

    @property
    def may_hold_all_weights(self) -> bool:
        """Whether GPUs may hold all frozen weights, and stages be cut and dealt out for that, as far as the recipe
        goes: it leaves the cache, the stages and their dealing to us. Not where whole answers are scored, which are
        looked at twice, or with a trained head, whose gradients are large."""
        pipeline = self.pipeline
        is_plain = self.method == "lora" and not self.scores_answers
        is_plain = is_plain and not self.lora.modules_to_save and not self.add_tokens
        is_cache_open = is_plain and pipeline.weight_cache == "auto" and pipeline.num_chunks == 1
        is_cut_open = not pipeline.binds_stages and pipeline.forward_stages == pipeline.backward_stages == "auto"
        recomputes = pipeline.recompute == "stage" and pipeline.keep_activations in ("auto", 0)
        is_dealing_open = pipeline.dispatch != "round_robin" and pipeline.head_workers in ("auto", 1)
        return is_cache_open and is_cut_open and recomputes and is_dealing_open


def with_rows_alone(recipe: Recipe, entry: DatasetConfig) -> Recipe:
    """The recipe for a forward of the rows of `entry`, each by itself, and of no others."""
    others: dict[str, Any] = {"eval_datasets": (), "val_set_size": 0.0, "eval_samples": 0, "packing": False}
    return replace(recipe, datasets=(entry,), objective=Recipe.objective, **others)


def rate_reason(recipe: Recipe) -> str:
    """The reason for the learning rate, empty where it is not a default."""
    kind = trained_kind(recipe.method, recipe.objective)
    return f"the default for {kind}" if recipe.learning_rate == DEFAULT_LEARNING_RATES[kind] else ""


def with_lists(value: Any) -> Any:
    """`value` with lists for tuples, at every depth."""
    if isinstance(value, Mapping):
        return {key: with_lists(item) for key, item in value.items()}
    return [with_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def plain_data(recipe: Recipe) -> dict[str, Any]:
    """Every key and value of a recipe as dictionaries, lists and scalars."""
    return {key: with_lists(value) for key, value in asdict(recipe).items()}


def dotted_values(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings by keys with dots: `lora.r`, and `datasets.0.path` in a list of mappings."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{before}{key}"
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(place): item for place, item in enumerate(value)}
        found |= dotted_values(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return found
