"""Which layers form a stage: costs, hardware, memory, partition. No torch."""
