"""What holds for every test, so that a result never depends on the machine or its load.

One thread for the test process itself, as for the ranks it forks: how many threads share a product may change its last bit. Generated examples are the
same in every run and are given the time that they take: the first text that is drawn in a new checkout builds tables for seconds.
"""

import torch
from hypothesis import HealthCheck, settings

from tests.ranks import is_poisoned, poison_memory

torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
if is_poisoned():
    poison_memory()
