"""One thread for the test process itself, as for the ranks it forks: how many threads share a product may change its last bit."""

import torch

from tests.ranks import is_poisoned, poison_memory

torch.set_num_threads(1)
if is_poisoned():
    poison_memory()
