"""The base model of a run: its files, and the format of its weights in memory."""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_cli.choices import PACKED_FORMATS, PackedName
from roundpipe_cli.events import Notice, Tell
from roundpipe_cli.model.files.quantization import check_stored_in_4bit
from roundpipe_cli.model.files.source import ModelSource, resolve_model
from roundpipe_cli.model.stored.packed_weights import require_bitsandbytes
from roundpipe_cli.model.stored.quantized_files import stored_in_4bit
from roundpipe_cli.recipe.load import LoadedRecipe


@dataclass(frozen=True)
class BaseModel:
    """The base model's files."""

    source: ModelSource
    packed_as: PackedName | None
    """Format of the blocks' frozen weights; None: they are not packed."""
    is_stored_packed: bool
    """Whether the files themselves are in 4 bit."""


def find_base(
    loaded: LoadedRecipe, revision: str | None, *, offline: bool, tell: Tell, source: ModelSource | None = None
) -> BaseModel:
    """The base model of a recipe; a hub model is downloaded if it is not here.

    Args:
        revision: of a hub model; a run that continues may have another than its recipe.
        source: the model's files, where they were found and checked before.

    Raises:
        RefusedError, ResourceError: see `resolve_model`.
    """
    recipe = loaded.recipe
    packed_as = recipe.packed_as
    if packed_as is not None and PACKED_FORMATS[packed_as].needs_bitsandbytes:
        require_bitsandbytes(f"{PACKED_FORMATS[packed_as].key}: true")
    if source is None:
        source = resolve_model(recipe.model, revision=revision, recipe_folder=loaded.folder, offline=offline, tell=tell)
    if revision != recipe.revision and source.commit is not None:
        tell(Notice(f"base model: commit {source.commit[:12]}, with which the run began"))
    if not stored_in_4bit(source):
        return BaseModel(source, packed_as, False)
    check_stored_in_4bit(source.name, method=recipe.method, packed_as=packed_as)
    require_bitsandbytes(f"{source.name}, whose files are in bitsandbytes' 4 bit")
    return BaseModel(source, "4bit", True)
