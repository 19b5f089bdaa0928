"""Real processes that run checks together: started once, asked for one check after the other."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).parent
TIMEOUT = 60.0
"""Seconds after which a collective gives up; a test waits longer, so that the error is what it sees."""


def start(arguments: list[str], world: int, folder: str, interpreted: bool = False) -> list[subprocess.Popen]:
    """One process for each rank; arguments are followed by rank, world and a file to meet at."""
    source = HERE.parents[1] / "src"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (source, HERE.parent, HERE))),
        "GLOO_SOCKET_IFNAME": "lo",  # whatever this machine's name resolves to
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)  # ranks on a GPU run the kernels themselves
    if interpreted:  # by kernels; torch then makes sure that the messages of ranks that go other ways are like theirs
        environment |= {"TRITON_INTERPRET": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    return [
        subprocess.Popen(
            [sys.executable, *arguments, str(rank), str(world), str(Path(folder) / "meet")], env=environment,
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]  # fmt: skip


class Ranks:
    """``world`` processes that wait for checks, functions of ``checks.py``, by name.

    The device is a CPU, a GPU that they share, or ``interpreter``: a CPU that runs the kernels of a GPU.
    """

    def __init__(self, world: int, device: str) -> None:
        self.world, self.device = world, device
        self._processes: list[subprocess.Popen] = []

    def check(self, name: str, **arguments: object) -> list[dict]:
        """Run a check on all ranks; what they return. A failed or hanging one ends the processes."""
        if not self._processes:
            self._start()
        for process in self._processes:
            process.stdin.write(json.dumps([name, arguments]) + "\n")
            process.stdin.flush()
        try:
            answers = [self._answer(rank) for rank in range(self.world)]
        except BaseException:
            self.stop()
            raise
        if any("error" in answer for answer in answers):
            self.stop()  # others may still wait inside a collective
            raise AssertionError(
                "\n".join(
                    f"rank {rank}:\n{answer['error']}" for rank, answer in enumerate(answers) if "error" in answer
                )
            )
        return [answer["result"] for answer in answers]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        if self._processes:
            self._folder.cleanup()
        self._processes = []

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        interpreted = self.device == "interpreter"
        self._processes = start([str(HERE / "ranks.py"), self.device], self.world, self._folder.name, interpreted)
        self._lines = [queue.Queue() for _ in range(self.world)]
        for process, lines in zip(self._processes, self._lines, strict=True):
            threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()

    def _answer(self, rank: int) -> dict:
        said = []
        while True:
            try:
                line = self._lines[rank].get(timeout=2 * TIMEOUT)
            except queue.Empty:
                raise AssertionError(f"rank {rank} hangs; it said {''.join(said)}") from None
            if line is None:
                status = self._processes[rank].wait()
                raise AssertionError(f"rank {rank} ended with status {status}; it said {''.join(said)}")
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
            said.append(line)


def _read(stream, lines: queue.Queue) -> None:
    try:
        for line in stream:
            lines.put(line)
    except ValueError:  # closed
        pass
    lines.put(None)


def join(rank: int, world: int, meet: str, backend: str = "gloo") -> None:
    """Make this process a rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{meet}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT),
        device_id=torch.device("cuda", 0) if backend == "nccl" else None,
    )  # fmt: skip


def main(device: str, rank: str, world: str, meet: str) -> None:
    import checks

    if device == "interpreter":
        from bln import _backends

        device, _backends._on_gpu = "cpu", lambda x: True
    checks.DEVICE = device
    # NCCL refuses ranks that share a GPU, so it is tried by one alone.
    join(int(rank), int(world), meet, "nccl" if device == "cuda" and world == "1" else "gloo")
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.*")
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # compiled DDP
                warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # compiled on a GPU
                warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
                answer = {"result": getattr(checks, name)(**arguments)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print("answer " + json.dumps(answer), flush=True)
    os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts at its end


if __name__ == "__main__":
    main(*sys.argv[1:])
