"""Time and bytes of each layer: models, hardware, memory. No torch."""
