"""Restore: the choice of a checkpoint and of its copies, and the plans that read verified bytes into tensors."""
