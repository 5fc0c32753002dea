"""Keeps secrets out of what is printed or written: the values of the environment's secret variables, and passwords in
addresses. No recipe key or flag takes a secret, so a message can repeat no others."""

from __future__ import annotations

import os
import re

SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL|NETRC_PASS)", re.IGNORECASE)
IN_ADDRESS = re.compile(r"(?<=://)[^/@\s:'\"]*:[^/@\s'\"]+(?=@)")
MIN_LENGTH = 8
"""Shorter values are no secrets, and replacing them would spoil words."""
MASK = "***"


def redact(text: str) -> str:
    """`text` with every secret replaced by ***."""
    text = IN_ADDRESS.sub(MASK, text)
    for name, value in os.environ.items():
        if len(value) >= MIN_LENGTH and value in text and SECRET_NAME.search(name):
            text = text.replace(value, MASK)
    return text
