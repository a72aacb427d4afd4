"""Set before torch is imported: OpenMP threads that spin beside a busy process make small operations many times slower, and
Triton's kernels run in its interpreter, on CPU tensors, only where its variable was there when it was imported."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import torch
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# One database-free, seeded profile: a failure on one machine is the same failure on the next.
settings.register_profile("datc", deadline=None, derandomize=True, database=None, max_examples=25)
settings.load_profile("datc")
# With --hypothesis-profile; `make test-sanitize` does.
settings.register_profile("datc-thorough", settings.get_profile("datc"), max_examples=300)
