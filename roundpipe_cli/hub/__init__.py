"""The Hugging Face hub: what a repository holds, and its files in the hub's own cache. No torch."""
