"""Settings of the libraries that commands use: no network, no progress bars."""

from __future__ import annotations

import os
import sys


def go_offline() -> None:
    """Keep the hub's libraries from opening connections; they read these variables when imported."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"


def quiet_libraries() -> None:
    """Our own messages say what matters; the libraries' advice is for programmers."""
    import warnings

    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    from transformers.utils import logging

    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
