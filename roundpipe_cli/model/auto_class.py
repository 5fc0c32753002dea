"""Which of transformers' classes a configuration becomes: the causal model, or the multimodal one that holds it."""

from __future__ import annotations

from typing import Any


def auto_class(config: Any) -> Any:
    """AutoModelForImageTextToText where the files are such a model's, else AutoModelForCausalLM.

    A type that has both classes is what its configuration's `architectures` says, so that the names of the weights are
    those of the files.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForCausalLM
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].__name__
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or whole in (getattr(config, "architectures", None) or ()):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def is_language_model(config: Any) -> bool:
    """Whether there is a causal language model in what `config` describes."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
