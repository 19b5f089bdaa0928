"""A data set and settings small enough to train in a second, and a process that does it."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bln.experiments import data, models, tasks
from bln.experiments.runs import Settings

TINY = Settings("digits-cnn", "bln", 25, 0.2, 0, "clean", 4)


def main(out: str, settings: list[str]) -> None:
    """Train, in a process that can be killed."""
    from bln.experiments.training import train

    torch.set_num_threads(1)
    task, norm, size, fraction, seed, protocol, epochs = settings
    each = Settings(task, norm, int(size), float(fraction), int(seed), protocol, int(epochs))
    print("started", flush=True)
    print(train(each, Path(out), Path(), torch.device("cpu")), flush=True)


def fake_cifar(count: int = 60) -> data.DataSet:
    """Images of noise, in the data set's layout."""
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(count) % 10
    return data.DataSet(images, labels, images[:20], labels[:20])


def fake_imdb(count: int = 60) -> data.DataSet:
    """Reviews of random words."""
    tokens = torch.randint(1, 50, (count, 80))
    labels = torch.arange(count) % 2
    return data.DataSet(tokens, labels, tokens[:20], labels[:20])


def patch(monkeypatch, validation: int = 10) -> None:
    """Have the paper's tasks run on these."""
    monkeypatch.setattr(tasks, "VALIDATION", validation)
    cifar, imdb = fake_cifar(), fake_imdb()
    monkeypatch.setattr(tasks, "cifar10", lambda folder: cifar)
    monkeypatch.setattr(tasks, "imdb", lambda folder: imdb)
    small = replace(tasks.TASKS["rnn"], model=partial(models.sentiment, words=50, features=8))
    monkeypatch.setitem(tasks.TASKS, "rnn", small)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
