"""``python -m bln.experiments.sizes``: `bln reproduce resnet` where nothing but torch is installed; it reports nothing.

``bln report`` makes the report of the table it writes, on another machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from . import study
from .tasks import TASKS


def main() -> None:
    """Train, and write the table of runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="resnet20", choices=list(TASKS))
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("results/resnet"))
    parser.add_argument("--batch-size", type=int, nargs="*")
    parser.add_argument("--norms", nargs="*")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="stop in time; what says most comes first")
    parser.add_argument("--dry-run", action="store_true", help="say what it takes, and stop")
    parser.add_argument("--no-estimate", action="store_true", help="begin at once")
    given = parser.parse_args()
    cells = study.plan(
        given.task, norms=given.norms, batch_sizes=given.batch_size, seeds=given.seeds, samples=given.samples,
        epochs=given.epochs, by_importance=given.minutes is not None,
    )  # fmt: skip
    device = torch.device(given.device)
    if given.dry_run or not (given.no_estimate or given.minutes is not None):  # measuring takes time, too
        print(study.estimate(cells, given.out, given.data_dir, device, given.workers).text(), flush=True)
    if given.dry_run:
        return
    begun = told = time.monotonic()

    def tell(done: float, text: str) -> None:
        nonlocal told
        if time.monotonic() - told > 20:
            told = time.monotonic()
            print(f"{told - begun:.0f} s: {done:.1f} of {len(cells)} norms and batch sizes, {text}", flush=True)

    more = {"device": device, "workers": given.workers, "minutes": given.minutes}
    path = study.study(cells, given.out, given.data_dir, progress=tell, **more)
    left = study.unfinished(cells, given.out)
    print(f"{path}: {time.monotonic() - begun:.0f} s; {left} of {len(cells)} norms and batch sizes are left")


if __name__ == "__main__":
    main()
