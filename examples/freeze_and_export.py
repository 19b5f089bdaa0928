"""From a trained net to a file: handwritten digits, frozen, and exported with a batch size of any number.

    python examples/freeze_and_export.py [--folder out]

Prints what became of each layer and how long a prediction takes before and after. Writes digits.pt2 (torch.export), and
digits.onnx where the onnx extra is installed, whose answers it compares with the net's.
"""

from __future__ import annotations

import copy
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import bln


def digits(batch_size=25, seed=0):
    """Training batches, and test images with their labels."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train = [(images[i], labels[i]) for i in order[:1300].split(batch_size)]
    return train, images[order[1300:]], labels[order[1300:]]


def trained(train, epochs=4):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.Tanh(), bln.BatchLayerNorm(16, groups=8),
        nn.Conv2d(16, 32, 3), nn.Tanh(), bln.BatchLayerNorm(32), nn.Flatten(),
        nn.Linear(512, 64), nn.Tanh(), bln.BatchLayerNorm(64), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), 0.002)
    for _ in range(epochs):
        for x, y in train:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    bln.calibrate(net, train)
    return net.eval()


@torch.no_grad()
def microseconds(net, x, repeat=200):
    """The fastest of many predictions: what else the machine does only ever adds."""
    fastest = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        net(x)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest * 1e6


@torch.no_grad()
def main(folder: Path = Path("out")) -> None:
    train, images, labels = digits()
    with torch.enable_grad():
        net = trained(train)
    bln.configure(net, "TTTT")
    before = copy.deepcopy(net)
    net, report = bln.freeze(net, images[:1], report=True)
    print(report)
    for name, model in (("before", before), ("frozen", net)):
        accuracy = (model(images).argmax(-1) == labels).float().mean()
        print(f"{name}: accuracy {accuracy:.3f}, one prediction {microseconds(model, images[:1]):.0f} us")

    folder.mkdir(parents=True, exist_ok=True)
    batch = torch.export.Dim("batch")
    program = torch.export.export(net, (images[:3],), dynamic_shapes=({0: batch},))
    torch.export.save(program, folder / "digits.pt2")
    written = ["digits.pt2"]
    if find_spec("onnxscript"):
        torch.onnx.export(program, dynamo=True, verbose=False).save(folder / "digits.onnx")
        written.append("digits.onnx")
    print(f"wrote {', '.join(written)} to {folder}")
    if find_spec("onnxruntime") and "digits.onnx" in written:
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / "digits.onnx")
        (answers,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        moved = (torch.from_numpy(answers) - net(images)).abs().max().item()
        print(f"ONNX: test accuracy {(answers.argmax(-1) == labels.numpy()).mean():.3f}, outputs moved by {moved:.0e}")


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("out"), help="where files are written")
    main(parser.parse_args().folder)
