"""Arithmetic on tensors: torch, no torch.distributed."""
