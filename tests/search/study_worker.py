"""A process that works on a study: python study_worker.py STORAGE TRIALS SECONDS READY GO."""

import sys
import time
from pathlib import Path

import optuna  # noqa: F401 - takes a while: not when both are to begin
import torch
from search_nets import data, deep, trained
from torch.nn import functional as F

import bln


def task():
    """The same model and data in every process."""
    torch.manual_seed(0)
    return trained(deep(), data((9, 9), seed=1)), data((7, 7), shift=0.3)


def main(storage: str, trials: str, seconds: str, ready: str, go: str) -> None:
    torch.set_num_threads(1)
    model, batches = task()
    Path(ready).touch()
    while not Path(go).exists():
        time.sleep(0.01)

    def loss(outputs, targets):
        time.sleep(float(seconds))
        return F.cross_entropy(outputs, targets)

    bln.search(model, batches, loss=loss, per_layer=True, sampler="tpe", storage=storage, trials=int(trials))


if __name__ == "__main__":
    main(*sys.argv[1:])
