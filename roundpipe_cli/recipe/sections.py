"""Parts of a recipe that are mappings of their own, and the types of values that keys share; see `schema.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from roundpipe_cli.choices import (
    SCHEDULE_KINDS,
    ScheduleName,
)
from roundpipe_cli.recipe.constraints import InclusiveRange, Matching, NotEmpty, Range

Words = Annotated[str, NotEmpty()]
PositiveInt = Annotated[int, Range(1)]
StepInterval = Literal["epoch"] | PositiveInt | Annotated[float, Range(0, 1, above=True, below=True)]
"""Steps between two saves or evaluations; a number below 1 is a share of the run's steps, as in transformers."""
DeviceName = Annotated[str, Matching(r"cpu|cuda:\d{1,3}", "cpu or cuda:N, for instance cuda:0")]
VariableName = Annotated[str, Matching(r"[A-Za-z_]\w{0,63}", "a name, for instance enable_thinking")]
Stages = Annotated[tuple[Annotated[tuple[int, ...], InclusiveRange()], ...], NotEmpty()]
Column = Literal[
    "text",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "messages",
    "conversations",
    "chosen",
    "rejected",
    "system",
    "tools",
    "history",
]
MAX_LEARNING_RATE = 10
"""Higher ones are slips, such as 2e4 for 2e-4."""
ScheduleKey = Literal[
    "num_cycles",
    "lr_end",
    "power",
    "timescale",
    "min_lr",
    "min_lr_rate",
    "num_decay_steps",
    "num_stable_steps",
    "warmup_type",
    "decay_type",
    "min_lr_ratio",
]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, by PEFT. Used when `method` is lora."""

    r: Annotated[int, Range(1, 65536)] = 16
    """Rank of the adapters. Trainable parameters and adapter size grow with it."""
    alpha: Annotated[float, Range(0, above=True)] = 32.0
    """Scaling: the adapter's output is multiplied by alpha / r."""
    dropout: Annotated[float, Range(0, 1, below=True)] = 0.0
    """Probability that an input of the adapter is zeroed in training. 0 is off."""
    target_modules: Words | Annotated[tuple[Words, ...], NotEmpty()] = "all-linear"
    """Modules that get an adapter: `all-linear` (every linear layer but the LM head), a list of names such as
    [q_proj, v_proj], or a regular expression that matches a module's whole name, such as .*layers.1[0-9].*_proj"""
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
    """That likelihood is of the chosen rows' prompts too, a mean over the tokens of a step, as in TRL and the authors'
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
class DatasetConfig:
    """One source of rows."""

    path: Words
    """A local file, glob (`data/**/*.jsonl`) or folder (jsonl, json, parquet, csv, tsv, txt, also .gz), or a hub
    dataset id. Relative paths are tried from the working directory, then from the recipe's folder."""
    name: Words | None = None
    """Configuration of a hub dataset, for instance `main` of openai/gsm8k. null is its default."""
    type: Literal["auto", "chat", "sharegpt", "alpaca", "prompt_completion", "text", "preference"] = "auto"
    """Shape of the rows; `auto` decides by the columns. Only the chat-shaped types need a chat template."""
    split: Words = "train"
    """Split of a hub dataset; slices such as `train[:1000]` are the hub library's own."""
    weight: Annotated[float, Range(0, above=True)] = 1.0
    """Share of this source in the rows of an epoch, relative to the others' weights; a row comes again when all rows of
    its source have come. All weights equal (as here): every row once an epoch, whatever the sizes."""
    columns: Mapping[Column, Words] = field(default_factory=dict)
    """Other names of the columns: `{prompt: question, completion: answer}` reads the column `question` as the
    prompt. Empty: the columns have the type's own names."""
    roles_to_train: Annotated[tuple[Literal["system", "user", "assistant", "tool"], ...], NotEmpty()] = ("assistant",)
    """Roles whose turns are trained, each with the end of its turn. A message with `train: true` is too, and one with
    `train: false` or `weight: 0` is not, whatever its role."""
    turns_to_train: Literal["all", "last"] = "all"
    """`last` trains the last turn alone of those that would be trained; the turns before it are its context."""
    train_on_eos: Literal["turn", "last", "all", "none"] = "turn"
    """Ends of turns that are trained: those of trained turns, the last of these, every turn's, or none. For rows that
    are plain texts with an answer, all but `none` train the EOS behind it."""
    thoughts: Literal["train", "mask", "drop"] = "train"
    """Treatment of the assistant's thoughts, in `reasoning_content` or between <think> marks: trained, kept as
    context that is not trained, or left out of the text."""
    as_chat: bool = True
    """Plain prompts and completions become turns where the tokenizer has a chat template. `false` joins them as they
    stand (TRL), or in the Alpaca prompt (axolotl)."""
    alpaca_join: Literal["blank_line", "newline"] = "blank_line"
    """Text between instruction and input of alpaca rows in the user's turn: LLaMA-Factory has `newline`."""
    txt_rows: Literal["paragraph", "line", "file"] | Words = "paragraph"
    """Rows of a .txt file: its paragraphs, its lines, the whole file, or what stands between any other text that is
    given here, such as <|endoftext|>."""


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
    much of a step and is frozen (LoRA): a trained head's gradients are added up in order, so its workers may wait for
    each other. `auto` is all GPUs where the head is frozen and the simulator finds a step faster so, else 1."""
    dispatch: Literal["auto", "round_robin", "earliest_free"] = "auto"
    """Who gets the next stage (roundpipe only): the next worker in turn, or for every microbatch the one that would be
    done with it first, which suits workers of different speed. `auto` is the latter where the first steps show that
    workers differ by more than 10 % and the simulator finds it faster."""
    sequence_chunks: Literal["auto"] | Annotated[int, Range(1, 1024)] = "auto"
    """Chunks into which each sequence is cut along its tokens, so that several workers compute one long sequence at
    once: chunks flow through the stages as microbatches do, and a chunk's attention reads the keys and values of the
    chunks before it. Loss and gradients are those of the whole sequence up to rounding (dropout draws other masks). Not
    with packing, preference pairs, kept activations or recurrent blocks. Four chunks a worker keep the bubble small. A
    chunk has at least 8 tokens of `max_seq_length`; shorter rows are padded to a token a chunk.
    `auto` is 1."""
    skip_last_projection: Literal["auto"] | bool = "auto"
    """Leave out of a recompute what backward never reads: products that only become a block's output. Exact; a proof
    when the model is loaded says which those are. `true` keeps the input of every block on the host meanwhile, `auto`
    only if that takes a small part of its memory; otherwise the product is left out at the end of a stage only."""
    optimizer_staleness: Literal[0, 1] = 0
    """Updates by which the weights of a step lag. 0 equals plain PyTorch; 1 hides the optimizer behind the next step,
    lets workers begin that step while others end this one, and needs 6 more bytes of host memory for each trainable
    parameter in 16 bit. Steps wait for each other all the same with float16, dpo, on_oom: adapt, several machines, a
    weight cache, micro_batch_tokens, another dispatch than in turn, or workers of different speed."""

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
