"""Names of an exported GGUF file and of its matrices' types."""

from __future__ import annotations

GGUF_NAME = "model.gguf"
"""Name of the GGUF file in an exported folder."""
ADAPTER_GGUF = "adapter.gguf"
"""Name of the GGUF file of an adapter alone."""
GGUF_TYPES = ("bf16", "f16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Types of matrices that the `gguf` package can write; the first is the default."""
CONVERTER_TYPES = ("bf16", "f16", "f32", "q8_0", "tq1_0", "tq2_0", "auto")
"""Types that llama.cpp's converter writes."""
