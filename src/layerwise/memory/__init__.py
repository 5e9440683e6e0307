"""Memory: the tensors that a plan asks for, and the guards on params that live there. torch, no torch.distributed."""
