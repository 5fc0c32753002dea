"""The result of a run, tried out: its answers to prompts, by transformers' own generation."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli.costs.answering import roomy_device
from roundpipe_cli.costs.machine import host_memory, slow_in_16_bit
from roundpipe_cli.data.rows import printable
from roundpipe_cli.data.templates import find_template
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.backends.cuda_process import set_up_process
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Say
from roundpipe_cli.limited import run_limited
from roundpipe_cli.model.adapter_files import load_adapter, read_adapter_config, refuse_unknown_keys
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import refusing
from roundpipe_cli.model.load import auto_class, build_skeleton, has_tokenizer, load_config, load_tokenizer
from roundpipe_cli.model.padding import each_as_alone, padded
from roundpipe_cli.model.stored.packed_weights import import_bitsandbytes
from roundpipe_cli.train.checkpoint.output_dir import read_values
from roundpipe_cli.train.prepare.base_files import TEMPLATE_LIMITS, end_tokens, trained_ends
from roundpipe_cli.units import format_bytes


@dataclass(frozen=True)
class Prompt:
    """A question, and how it is to be answered."""

    text: str
    system: str | None = None
    max_new_tokens: int = 200
    temperature: float = 0.0
    """0: the most probable tokens."""
    earlier: tuple[tuple[str, str], ...] = ()
    """Questions and answers before it; without a chat template they are not read."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation up to the question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        pairs = [zip(("user", "assistant"), exchange, strict=True) for exchange in self.earlier]
        before = [{"role": role, "content": text} for pair in pairs for role, text in pair]
        return [*system, *before, {"role": "user", "content": self.text}]


@dataclass(frozen=True)
class WholeAnswer:
    """An answer to a prompt, without special tokens."""

    text: str
    num_tokens: int
    is_ended: bool
    """Whether the answer ended with an end token, not at the limit."""


def needs_streaming(source: ModelSource, dtype: str) -> bool:
    """Whether the model, whole in this type, is too large for every GPU, or for host memory where there is none."""
    model = build_skeleton(load_config(source), getattr(torch, dtype))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    free_bytes = [cuda.memory_bytes(index) for index in range(cuda.num_devices())]
    return roomy_device(num_bytes, free_bytes or [host_memory().available_bytes]) is None


def load_result(result: Path, source: ModelSource, dtype: str, *, is_adapter: bool) -> tuple[Any, Any]:
    """(model, tokenizer): base model and adapter, or a whole model.

    Raises:
        RefusedError: one of them cannot be loaded.
    """
    import_bitsandbytes()
    config = load_config(source)  # refuses what would run code, and what is no language model
    adapter = read_adapter_config(result, refuse_unknown_keys) if is_adapter else None
    arguments: dict[str, Any] = source.load_arguments or {"use_safetensors": True}
    with refusing("the result cannot be loaded", str(result)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = auto_class(config).from_pretrained(
            str(source.folder), dtype=getattr(torch, dtype), trust_remote_code=False, **arguments
        )
        if adapter is not None:
            model = load_adapter(model, adapter, result)
    return model.eval(), tokenizer_of(result, source, is_adapter=is_adapter)


def tokenizer_of(result: Path, source: ModelSource, *, is_adapter: bool) -> Any:
    """The result's own tokenizer; an adapter may have that of its base."""
    own = not is_adapter or has_tokenizer(result)
    return load_tokenizer(ModelSource(str(result), result) if own else source)


def move_to_gpu(model: Any, tell: Say) -> Any:
    """The model on the GPU with the most free memory, or where it is if no GPU has room for it; says which.

    On a processor that is many times slower in 16 bit it is widened to float32, where the memory takes that.
    """
    indices = range(cuda.num_devices()) if model.device.type == "cpu" else ()  # bitsandbytes puts its own on a GPU
    free_bytes = [cuda.memory_bytes(index) for index in indices]
    index = roomy_device(_held_bytes(model), free_bytes)
    if index is not None:
        set_up_process([index])
        try:
            model = model.to(torch.device("cuda", index))
        except torch.OutOfMemoryError:  # another program took the memory first
            model, index = model.to("cpu"), None
    if free_bytes and index is None:
        tell(f"no GPU has room for this model ({format_bytes(max(free_bytes))} free): it answers on the processor")
    if model.device.type == "cpu" and not getattr(model, "is_quantized", False):
        is_slow = slow_in_16_bit(str(model.dtype).removeprefix("torch.")) is not None
        if is_slow and 2 * _held_bytes(model) < host_memory().available_bytes:
            model = model.float()
    return model


def _held_bytes(model: Any) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def answer_ends(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends an answer: those of the model's generation_config.json and those of training."""
    known = end_tokens({"eos_token_id": model.generation_config.eos_token_id})
    return list(dict.fromkeys([*known, *trained_ends(tokenizer)]))


def has_template(tokenizer: Any) -> bool:
    """Whether prompts are put into a chat template."""
    return find_template(tokenizer, None, None) is not None


def keep_as_trained(tokenizer: Any, run: Path, say: Say) -> None:
    """Take the chat template away, and say so, where the run in a folder trained all its rows without it."""
    entries = read_values(run / "recipe.yaml").get("datasets") or [{}]
    if has_template(tokenizer) and all(isinstance(one, dict) and one.get("as_chat") is False for one in entries):
        tokenizer.chat_template = None
        say("note: prompts go in as they stand, without the chat template, as they were trained (as_chat: false)")


def describe_answer(model: Any, tokenizer: Any, temperature: float, where: str | None = None) -> str:
    """The devices (`where`, or the model's) and settings with which it answers, and what ends an answer."""
    ends = " ".join(str(tokenizer.convert_ids_to_tokens(token)) for token in answer_ends(model, tokenizer))
    how = f"sampling at temperature {temperature:g}" if temperature > 0 else "the most probable tokens"
    device = where or ("the processor" if model.device.type == "cpu" else str(model.device))
    return f"on {device} in {str(model.dtype).removeprefix('torch.')}: {how}, up to {ends or 'the last'}"


def answer_prompts(model: Any, tokenizer: Any, prompts: Sequence[Prompt], *, is_shown: bool) -> list[WholeAnswer]:
    """The answers to prompts, computed side by side with the settings of the first. Without a chat template they are
    continued as they are.

    What else the model's generation_config.json says holds too, such as top_p or a repetition penalty.

    Args:
        is_shown: write the answer, to an only prompt, to stdout as it comes.
    """
    from transformers import TextStreamer

    ids, first = [ids_of_prompt(tokenizer, prompt) for prompt in prompts], prompts[0]
    sampling = {"do_sample": True, "temperature": first.temperature} if first.temperature else {"do_sample": False}
    ends = answer_ends(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    found = continued(
        model,
        ids,
        pad,
        max_new_tokens=first.max_new_tokens,
        eos_token_id=ends or None,
        tokenizer=tokenizer,  # for the model's own `stop_strings`
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if is_shown else None,
        **sampling,
    )
    sys.stdout.flush()
    pads = [pad] if model.generation_config.stop_strings else []  # behind an answer without an end token
    return [_whole(tokenizer, row, ends, pads) for row in found]


def continued(model: Any, ids: Sequence[list[int]], pad: int | None, **how: Any) -> list[list[int]]:
    """The tokens behind each of these, computed side by side where that changes none; padding behind those that ended
    before the last.

    Args:
        how: arguments of transformers' `generate`.
    """
    head = model.get_output_embeddings() or model

    def answer(some: Sequence[list[int]]) -> list[list[int]]:
        given = {name: one.to(model.device) for name, one in padded(some, pad).items()}
        with torch.no_grad(), warnings.catch_warnings(), head.register_forward_pre_hook(_laid_out):
            warnings.simplefilter("ignore")
            # beams cannot be shown as they come
            tokens = model.generate(**given, pad_token_id=pad, num_beams=1, use_cache=True, **how)
        return [list(row) for row in tokens[:, given["input_ids"].shape[1] :].tolist()]

    return each_as_alone(model, ids, answer)


def _laid_out(_: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A head's hidden states without the strides of the prompts that they are cut out of: for these, torch's product
    copies a frozen bfloat16 table on the processor, once for each prompt."""
    return tuple(one.clone(memory_format=torch.contiguous_format) for one in given)


def _whole(tokenizer: Any, new: list[int], ends: Sequence[int], pads: Sequence[int]) -> WholeAnswer:
    """The answer of these tokens, behind which padding may lie: other answers were longer."""
    count = next((number for number, token in enumerate(new, 1) if token in ends), None)
    if count is None:
        count = max((number for number, token in enumerate(new, 1) if token not in pads), default=0)
    text = tokenizer.decode(new[:count], skip_special_tokens=True)
    return WholeAnswer(text, count, is_ended=bool(count) and new[count - 1] in ends)


def ids_of_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Tokens of a prompt, in the chat template if there is one, which alone has a place for a system message."""
    if not has_template(tokenizer):
        if prompt.system:
            raise RefusedError("a system message without a chat template", hint="write it into the prompt")
        return list(tokenizer(prompt.text)["input_ids"])
    return list(tokenizer(rendered(tokenizer, prompt.messages), add_special_tokens=False)["input_ids"])


def rendered(tokenizer: Any, messages: list[dict[str, str]], **how: bool) -> str:
    """The text of a conversation within limits of time and memory; `how`: as of transformers, else for an answer."""
    return run_limited(lambda: _render(tokenizer, messages, **how), TEMPLATE_LIMITS)


def _render(tokenizer: Any, messages: list[dict[str, str]], *, add_generation_prompt: bool = True, **how: bool) -> str:
    """Runs in a child."""
    how["add_generation_prompt"] = add_generation_prompt
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **how))
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: besides jinja2's errors it can raise any of Python's
        raise TEMPLATE_LIMITS.refusal(
            "refuses this conversation", printable(f"{type(error).__name__}: {error}")
        ) from error
