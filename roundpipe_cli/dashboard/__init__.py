"""The view of a run: state folded from events, views of it, a live screen, a page. No torch, no engine."""
