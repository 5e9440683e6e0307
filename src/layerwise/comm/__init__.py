"""The only caller of torch.distributed: process groups, collectives, and what ranks tell each other."""
