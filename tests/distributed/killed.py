"""A rank of a training that loses one: python killed.py WHAT RANK WORLD MEET. The last rank goes after two steps."""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import join
from torch import nn

import bln


def main(what: str, rank: str, world: str, meet: str) -> None:
    join(int(rank), int(world), meet)
    group = dist.new_group(timeout=timedelta(seconds=8))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), bln.BatchLayerNorm(4, process_group=group), nn.Linear(4, 1))

    def batches():
        for at in range(20):
            if at == 2 and int(rank) == int(world) - 1:
                os.kill(os.getpid(), signal.SIGSTOP if what == "hang" else signal.SIGKILL)
            yield torch.randn(5, 3)

    try:
        if what == "calibrate":
            bln.calibrate(model, batches(), process_group=group, progress=False)
        else:
            for x in batches():
                model(x).sum().backward()
    except RuntimeError as error:
        print("caught", error)
    print("done", flush=True)
    os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts at its end


if __name__ == "__main__":
    main(*sys.argv[1:])
