"""Names of chat templates in axolotl and LLaMA-Factory that are a model's own, so that its tokenizer has them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_FAMILIES: Mapping[str, str] = {
    "qwen": r"qwen(1\.5|2)",
    "gemma": r"gemma-?(2b|7b|1\.1)",
    "smollm": r"smollm-",
    "phi": r"phi-?3",
    "phi_small": r"phi-?3-small",
    "cohere": r"command-r|aya",
    "deepseek": r"deepseek-(v2|llm|moe)",
    "deepseek3": r"deepseek-v3",
    "deepseek_v2": r"deepseek-v2",
    "deepseekcoder": r"deepseek-coder",
    "mistral_small": r"mistral-small",
    "mistral_v1": r"mistral.*v0\.1",
    "mistral_v2v3": r"mistral.*v0\.[23]",
    "mistral_v3_tekken": r"mistral-nemo",
    "mistral_v7_tekken": r"mistral-small",
    "command_a": r"command-a",
}
"""Templates whose name is not, or not only, how the names of their models begin."""


def is_own_template(template: str, model: str) -> bool:
    """Whether the template is that of the model's family, by both names: `llama3` and `meta-llama/Llama-3.1-8B`."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    if template in _FAMILIES:
        return re.search(_FAMILIES[template], name) is not None
    family, plain = (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (template, name))
    return len(family) > 2 and re.search(rf"(?:^|meta){re.escape(family)}", plain) is not None
