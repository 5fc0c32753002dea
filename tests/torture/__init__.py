"""Trials that break runs on purpose and count how often the promise held.

`scripts/torture` runs them with the counts of a release and prints rows of the table in tests/README.md;
`tests/reliability/test_reliability.py` runs the same functions with small counts.
"""
