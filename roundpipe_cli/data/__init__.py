"""From files to microbatches of token ids and labels."""
