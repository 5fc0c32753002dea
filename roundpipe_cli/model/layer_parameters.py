"""The parameters of each layer of a split model."""

from __future__ import annotations

from torch import nn

from roundpipe_cli.model.split import ModelSplit


def layer_parameters(model: nn.Module, split: ModelSplit) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters of each layer, `embed` first and `head` last. A parameter that both share belongs to the head."""
    names = {id(p): name for name, p in model.named_parameters()}
    blocks = [
        [(names[id(p)], p) for p in block.parameters()] for block in model.get_submodule(split.blocks_path).children()
    ]
    in_blocks = {id(p) for block in blocks for _, p in block}
    tail_ids = {id(p) for path in split.tail_paths for p in model.get_submodule(path).parameters()}
    backbone_ids = {id(p) for p in model.get_submodule(split.backbone_path).parameters()}
    outside_ids = _parameters_outside(model, split.backbone_path)
    head_ids = (tail_ids | outside_ids) - in_blocks
    head = [(name, p) for name, p in model.named_parameters() if id(p) in head_ids]
    embed = [
        (name, p)
        for name, p in model.named_parameters()
        if id(p) in backbone_ids and id(p) not in head_ids and id(p) not in in_blocks
    ]
    return [embed, *blocks, head]


def _parameters_outside(model: nn.Module, backbone_path: str) -> set[int]:
    found: set[int] = set()
    for path, module in model.named_modules():
        if path != backbone_path and not path.startswith(backbone_path + "."):
            found.update(id(p) for p in module.parameters(recurse=False))
    return found
