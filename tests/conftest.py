"""Set before torch is imported anywhere: one OpenMP thread each, since two that spin beside a busy process run ten times slower."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
