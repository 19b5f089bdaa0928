"""The page about several processes and the example run as they say: under torchrun, on two."""

import os
import subprocess
import sys
from pathlib import Path

from test_docs import blocks

ROOT = Path(__file__).parents[2]


def torchrun(script: Path, *arguments: str) -> str:
    """Two processes, which meet at a port that is free."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_runs_on_two_processes(tmp_path):
    script = tmp_path / "page.py"
    beginning = "import warnings; warnings.simplefilter('error', UserWarning)"
    ending = "import os; print('end of page', flush=True); os._exit(0)  # gloo's threads outlive the interpreter"
    script.write_text("\n".join([beginning, *blocks(ROOT / "docs/distributed.md"), ending]), encoding="utf-8")
    assert torchrun(script).count("end of page") == 2


def test_the_example_learns():
    said = torchrun(ROOT / "examples/ddp.py", "--steps", "25", "--batch", "31")
    assert "trained with m = 31" in said
    assert float(said.split("has accuracy ")[1].split()[0]) > 0.3  # a tenth is chance
    assert said.count("done") == 2
