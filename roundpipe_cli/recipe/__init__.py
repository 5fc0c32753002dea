"""The user's recipe: its types and its strict loader. No torch."""
