"""What the user wrote: the typed recipe and its strict loader. No torch."""
