"""Restore: which step, from which copies, and the reads that bring verified bytes into tensors."""
