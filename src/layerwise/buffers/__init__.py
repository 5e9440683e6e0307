"""Memory: a module's params as a table, and the tensors that a plan asks for. torch, no torch.distributed."""
