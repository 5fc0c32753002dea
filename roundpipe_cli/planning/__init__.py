"""Decisions: which stages a step gets, whether a run fits, how long it takes. No torch."""
