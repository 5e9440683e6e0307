"""One thread for the test process itself, as for the ranks it forks: how many threads share a product may change its last bit."""

import torch

torch.set_num_threads(1)
