"""Settings of other trainers' data sets, with the answer for a recipe, and what `convert` does in place of each."""

from __future__ import annotations

import re
from collections.abc import Mapping

TEMPLATED = "rows are put into the chat template where the tokenizer has one"
DATASET_CHANGES: Mapping[str, str] = {
    **dict.fromkeys(("shards", "shards_idx"), "all rows are trained, not a shard"),
    "revision": "the dataset's newest revision is read",
    "roles_to_train": "the assistant's turns are trained",
    **dict.fromkeys(("train_on_eos", "train_on_eot"), "the end of each answer is trained"),
    "drop_system_message": "system messages stay",
    "field_system": "system prompts in a column are not used",
    "system_prompt": "no system prompt is added",
    **dict.fromkeys(("format", "no_input_format", "prompt_format", "chosen_format", "rejected_format"), TEMPLATED),
    "message_field_training_detail": "answers are trained whole",
    "split_thinking": "thoughts stay as the rows have them",
    "data_dir": "the dataset's own folder is read",
    "skip": "the first rows are trained too",
    "fraction": "all rows are trained",
}
"""Setting of another tool's dataset -> what happens instead."""
_BY_COLUMNS = "name the columns: columns: {prompt: question, completion: answer}"
_DATASET_ADVICE: Mapping[str, str] = {
    _BY_COLUMNS: """
        field field_* message_field_* message_property_mappings text_column column_map prompt_column response_column
        question answer input_column output_column conversation_column column prompt query response history messages
        chosen rejected tags role_tag content_tag instruction input output text""",
    "name each file: path: data/train.jsonl, or a glob": """
        data_files file_name file files source hf_hub_url url script_url""",
    "a part of the split: split: 'train[:1000]'": """
        num_samples max_samples limit samples take train_on_split subset_size""",
    "the file's name says what it is: .jsonl, .json, .csv, .tsv, .txt or .parquet": """
        ds_type format file_type data_type""",
    "type: chat, sharegpt, alpaca, prompt_completion, text or preference": """
        formatting conversation ranking _component_""",
    "the configuration of a hub data set is name": "subset config config_name data_config",
    "weight: a share of the rows of an epoch, relative to the others' weights": """
        probability ratio proportion mix_weight""",
    "rows are read as they come, whatever their number": "streaming preprocess_shards num_proc",
    "tokens are cached by themselves": "cache_dir keep_in_memory",
    "the chat template is the tokenizer's: chat_template at the top of the recipe": "chat_template template",
    "roles are those of the rows; roles_to_train says which are trained": "roles message_field_training",
}


def hint_for_dataset(key: str) -> str | None:
    """The answer to a key of another trainer's data set."""
    for text, names in _DATASET_ADVICE.items():
        if any(re.fullmatch(name.replace("*", ".*"), key) for name in names.split()):
            return text
    return f"not offered: {DATASET_CHANGES[key]}" if key in DATASET_CHANGES else None
