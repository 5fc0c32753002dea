"""Options that mean the same in several commands, in the same words."""

from __future__ import annotations

from typing import Annotated

import typer

BaseOption = Annotated[str | None, typer.Option("--base", metavar="MODEL", help="Base model, if it has moved.")]
OtherBaseOption = Annotated[
    bool, typer.Option("--allow-other-base", help="The base may be another than the adapter was trained on.")
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Use local files only, open no connection.")]
