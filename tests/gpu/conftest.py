"""Entered only when named (make test-gpu): the other tests have Triton's interpreter in place of a GPU."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "experiments"))
if not torch.cuda.is_available():
    collect_ignore_glob = ["*"]
