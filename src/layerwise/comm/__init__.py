"""The only caller of torch.distributed: process groups, collectives, and the engine that runs a schedule on them."""
