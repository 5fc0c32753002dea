"""First losses of every multimodal type of the installed transformers, by the engine from a model's files and by
transformers' own class from the same files, which hold an LM head that is not the embedding.

Story: where the outer class ties by default (mistral3, lighton_ocr, aya_vision and 20 others) the head was dropped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from roundpipe_cli.errors import RefusedError
from tests.support.versions import at_least
from tests.support.wrappers import NoTinyConfigError, first_losses, save_wrapper, tiny_wrapper, wrapper_types

REFUSED = {
    **dict.fromkeys(("blip", "blip-2", "diffusion_gemma", "instructblip", "instructblipvideo"), "does not run"),
    **dict.fromkeys(("florence2", "pix2struct", "udop"), "not a decoder-only language model"),
    "mllama": "does not call its blocks once and in order",
}
"""Types that are refused, and the words."""
NOT_TINY = {
    *("deepseek_ocr2", "dots3_note", "ernie4_5_vl_moe", "glm5_next", "granite4_vision", "idefics", "inkling2"),
    *("inkling_mm_model", "kosmos-2", "kosmos-2.5", "muse_glimmer", "muse_spark", "pi0", "t5gemma2"),
    *("unlimited_ocr", "vision-encoder-decoder"),
}
"""Types for which these tests know no tiny configuration."""
NEEDS_TIMM = {"fast_vlm", "gemma3n", "perception_lm"}
"""Types whose tower is of a library that is not installed."""
OWN_FAILS = {
    "git": "its loss counts tokens of a picture that is not there",
    "molmo2": "its forward wants mm_token_type_ids in training",
    "pp_formulanet": "transformers cannot make its embedding",
    "shieldgemma2": "transformers does not find the weights under the names that it saved",
}
"""Types whose own class fails on text alone."""
ALWAYS = ("aya_vision", "gemma3", "gemma4", "lighton_ocr", "llama4", "mistral3", "qwen3_5_moe", "qwen3_vl")
"""Of each way to tie or not to tie, with and without experts; the rest is sweep."""


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.sweep]) for name in wrapper_types()]
)
def test_the_first_loss_is_transformers_own(tmp_path: Path, model_type: str) -> None:
    if model_type in NEEDS_TIMM | NOT_TINY | OWN_FAILS.keys():
        pytest.skip(OWN_FAILS.get(model_type, "no tiny configuration"))
    try:
        config = tiny_wrapper(model_type)
    except NoTinyConfigError as error:
        if at_least("transformers", "5.24"):  # with types that are not known here
            pytest.skip(str(error))
        raise
    holds_head = save_wrapper(config, tmp_path / "model")
    if model_type in REFUSED:
        with pytest.raises(RefusedError, match=REFUSED[model_type]):
            first_losses(tmp_path / "model")
        return
    ours, theirs = first_losses(tmp_path / "model")
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert holds_head or model_type == "nemotron_h_omni", "its class names no head; the files hold one all the same"
