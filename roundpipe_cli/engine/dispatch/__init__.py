"""Who issues what when: dispatcher, ledger, transfer queues, the pool's threads. PROTOCOL.md: who waits for whom."""
