"""The objective of another tool's file, and its keys for losses that compare answers.

A tool reads such a key in one kind of job. Elsewhere it changes nothing, and neither does it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from roundpipe_cli.choices import PAIR_OBJECTIVES, PairObjective
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.aliases import Writes, is_off
from roundpipe_cli.recipe.convert_outcomes import LeaveOutError
from roundpipe_cli.recipe.convert_tables import Tool
from roundpipe_cli.recipe.strict_yaml import shown_value

Job = Literal["sft", "pretraining"] | PairObjective
_LOSSES: Mapping[str, Job] = {"sigmoid": "dpo", "orpo": "orpo", "simpo": "simpo"}
"""LLaMA-Factory's `pref_loss`."""
_SFT_LOSSES = (None, "nll", "chunked_nll", "dft")


OBJECTIVE_KEY = "(objective)"
"""Key under which a file's data hold an objective that the user named."""


def with_objective(data: Mapping[str, Any], tool: Tool, objective: Job, name: str) -> dict[str, Any]:
    """The data of a file whose objective the user names.

    Raises:
        RefusedError: the file says for itself what it trains.
    """
    found = job_of(data, tool)
    if tool != "trl" and found != objective:
        raise RefusedError(
            "a file of this tool says for itself what it trains",
            where=name,
            found=f"{tool}, {found or 'another job'}",
            expected="--objective for a file of TRL's trainers",
        )
    return {**data, OBJECTIVE_KEY: objective} if tool == "trl" else dict(data)


def job_of(data: Mapping[str, Any], tool: Tool) -> Job | None:
    """The job of a file, as far as its objective goes; None: one that is not offered."""
    named: Job | None = data.get(OBJECTIVE_KEY)
    if named is not None:
        return named
    if tool == "llama-factory":
        stages: Mapping[Any, Job] = {None: "sft", "sft": "sft", "pt": "pretraining"}
        if data.get("stage") == "dpo":
            return _LOSSES.get(str(data.get("pref_loss") or "sigmoid"))
        return stages.get(data.get("stage"))
    if tool == "axolotl":
        if is_off(data.get("rl")):
            return "sft" if is_off(data.get("pretraining_dataset")) else "pretraining"
        is_usual = data.get("dpo_loss_type") in (None, ["sigmoid"])
        kind = next((name for name in PAIR_OBJECTIVES if name == str(data["rl"]).lower()), None)
        return kind if kind != "dpo" or is_usual else None
    loss = data.get("loss_type")
    loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
    return "sft" if loss in _SFT_LOSSES else {"sigmoid": "dpo", "simpo": "simpo"}.get(str(loss))  # type: ignore[return-value]


def is_pairs(job: Job | None) -> bool:
    """Whether a row of this job is a chosen and a rejected answer."""
    return job in PAIR_OBJECTIVES


_BETAS = {"dpo": "dpo.beta", "orpo": "orpo.beta", "simpo": "simpo.beta"}
_TARGETS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("pref_beta", "rl_beta", "dpo_beta", "beta", "trl"), _BETAS),
    "orpo_alpha": _BETAS,
    "simpo_gamma": {"simpo": "simpo.simpo_gamma"},
    "cpo_alpha": {"simpo": "simpo.cpo_alpha"},
    "dpo_label_smoothing": {"dpo": "dpo.label_smoothing"},
    "label_smoothing": {"dpo": "dpo.label_smoothing", "simpo": "simpo.label_smoothing"},
}
"""Key of another tool -> objective -> recipe key."""

_REFERENCE = "the reference is the base model, or the adapter of lora.start_from as it is"
_LIKELIHOOD = "the chosen answers' likelihood has no part in the loss"
_PAIR_CHANGES: Mapping[str, str] = {
    **dict.fromkeys(("ref_model", "ref_model_adapters", "ref_model_quantization_bit"), _REFERENCE),
    **dict.fromkeys(("pref_ftx", "rpo_alpha"), _LIKELIHOOD),
    "pref_bco_weight": "no classifier's loss is added",
    "ld_alpha": "every token of an answer weighs the same",
    "dpo_use_weighting": "every pair weighs the same",
    "use_weighting": "every pair weighs the same",
    "dpo_loss_weights": "the loss has the weight 1",
    "loss_weights": "the loss has the weight 1",
    "f_divergence_type": "the reverse KL divergence is used",
    "alpha": "rewards are not transformed (AlphaPO)",
    "dpo_norm_loss": "the loss is not divided by lengths",
    "reference_free": _REFERENCE,
    "sync_ref_model": _REFERENCE,
}
"""Keys that have no counterpart in a job with pairs, and what is trained instead."""

_DECIDE = ("rl", "stage", "pref_loss", "dpo_loss_type", "loss_type")
"""Keys that name the objective."""
_SILENT = """
    precompute_ref_log_probs dpo_padding_free dpo_use_liger_kernel
    dpo_use_logits_to_keep dpo_generate_during_eval generate_during_eval precompute_ref_batch_size max_prompt_len
    max_prompt_length max_completion_length disable_dropout train_on_prompt train_on_inputs mask_history
    kto_chosen_weight kto_rejected_weight desirable_weight undesirable_weight kto_desirable_weight
    kto_undesirable_weight ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model
    reward_model_adapters reward_model_quantization_bit reward_model_type
"""
_WITHOUT_EFFECT = frozenset(_SILENT.split())
"""Keys that other jobs read, or that only change how the same is computed."""
_OF_SFT = frozenset(("train_on_prompt", "train_on_inputs", "mask_history", "loss_type"))
LOSS_KEYS = frozenset({*_TARGETS, *_PAIR_CHANGES, *_WITHOUT_EFFECT, *_DECIDE} - _OF_SFT)
"""Keys about losses that compare answers."""

JOB_DEFAULTS: Mapping[Tool, Mapping[str, Mapping[str, Any]]] = {
    "axolotl": {"simpo": {"simpo.beta": 0.1, "simpo.cpo_alpha": 1.0}},
    "llama-factory": {
        "pretraining": {"packing": True},
        "orpo": {"orpo.nll_on_prompt": False},
        "simpo": {"simpo.beta": 0.1},
    },
    "trl": {
        "dpo": {"learning_rate": 1.0e-6},
        "orpo": {"learning_rate": 1.0e-6},
        "simpo": {"learning_rate": 1.0e-6, "simpo.beta": 0.1, "simpo.cpo_alpha": 1.0},
    },
}
"""Defaults of a tool in a job where ours are others: as in `convert_tables.DEFAULTS`, which they go before."""


def reads_loss_key(key: str, job: Job, tool: Tool) -> bool:
    """Whether `loss_writes` knows the key in a file of this job.

    The files of TRL do not say for which of its programs they are: there, such a key is a sign of another job.
    """
    if is_pairs(job):
        return key in LOSS_KEYS or key in _OF_SFT
    return key in LOSS_KEYS and tool != "trl" and not (tool == "axolotl" and key in ("trl", "reward_model"))


def loss_writes(key: str, value: Any, data: Mapping[str, Any], job: Job) -> Writes:
    """The keys that a key of such losses becomes; nothing where the job does not read it.

    Raises:
        LeaveOutError: it has no counterpart.
    """
    if value is None or not is_pairs(job) or key in _WITHOUT_EFFECT:
        return {}
    if key in _DECIDE:
        return {"objective": job}
    if key == "trl":
        return _trl_section(value, job)
    if key in ("rl_beta", "orpo_alpha", "dpo_beta") and _precedes(key, data):
        raise LeaveOutError("another key decides: trl.beta, then rl_beta, then orpo_alpha")
    target = _TARGETS.get(key, {}).get(job)
    if target is not None:
        return {target: value}
    is_usual = is_off(value) or value in (0, 0.0, data.get("model_name_or_path"), "reverse_kl")
    if key in _PAIR_CHANGES and not is_usual and not (job != "dpo" and _PAIR_CHANGES[key] == _REFERENCE):
        raise LeaveOutError("no counterpart here", _PAIR_CHANGES[key])
    return {}


def _precedes(key: str, data: Mapping[str, Any]) -> bool:
    """Whether axolotl reads another key in place of this one."""
    section = data.get("trl")
    first = section.get("beta") if isinstance(section, dict) else None
    return first is not None or (key != "rl_beta" and data.get("rl_beta") is not None)


def _trl_section(value: Any, job: Job) -> Writes:
    """axolotl's `trl`, of whose keys jobs with pairs read `beta`."""
    section = value if isinstance(value, dict) else {}
    others = [name for name, setting in section.items() if name != "beta" and not is_off(setting)]
    if others:
        raise LeaveOutError(f"{shown_value(', '.join(others))}: read in reinforcement learning only")
    return {} if section.get("beta") is None else {_BETAS[job]: section["beta"]}
