"""What a layer costs in time and bytes: models, hardware, memory. No torch."""
