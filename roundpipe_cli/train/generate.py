"""The result of a run, tried out: its answer to a prompt, by transformers' own generation."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.adapter_files import read_adapter_config
from roundpipe_cli.model.load import load_config, load_tokenizer
from roundpipe_cli.model.nf4 import import_bitsandbytes
from roundpipe_cli.model.source import ModelSource


def load_result(result: Path, source: ModelSource, dtype: str, *, is_adapter: bool) -> tuple[Any, Any]:
    """(model, tokenizer): base model and adapter, or a whole model.

    Raises:
        RefusedError: one of them cannot be loaded.
    """
    import torch

    import_bitsandbytes()
    from transformers import AutoModelForCausalLM

    load_config(source)  # refuses what would run code, and what is no language model
    arguments: dict[str, Any] = source.load_arguments or {"use_safetensors": True}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(source.folder), dtype=getattr(torch, dtype), trust_remote_code=False, **arguments
            )
            if is_adapter:
                from peft import PeftModel

                read_adapter_config(result)
                model = PeftModel.from_pretrained(model, str(result), use_safetensors=True)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise RefusedError(
            "the result cannot be loaded", where=str(result), found=f"{type(error).__name__}: {str(error)[:300]}"
        ) from error
    return model.eval(), load_tokenizer(ModelSource(str(result), result))


def answer(
    model: Any, tokenizer: Any, prompt: str, *, system: str | None, max_new_tokens: int, temperature: float
) -> None:
    """Write the answer to stdout as it comes. Without a chat template the prompt is continued as it is."""
    import torch
    from transformers import TextStreamer

    if tokenizer.chat_template:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.generate(
            input_ids=inputs["input_ids"].to(model.device),
            attention_mask=inputs["attention_mask"].to(model.device),
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            eos_token_id=tokenizer.eos_token_id,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **sampling,
        )
    sys.stdout.flush()
