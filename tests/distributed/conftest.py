import pytest
import torch
from ranks import Ranks

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(scope="session")
def pool():
    """Ranks by number and device, started when asked for."""
    found: dict[tuple[int, str], Ranks] = {}

    def get(world: int, device: str) -> Ranks:
        return found.setdefault((world, device), Ranks(world, device))

    yield get
    for ranks in found.values():
        ranks.stop()


def fixture(params, world=None):
    """Ranks; each parameter is a device, with ``world`` given, or a pair of both."""

    @pytest.fixture(params=params)
    def ranks(request, pool):
        return pool(world, request.param) if world else pool(*request.param)

    return ranks


two = fixture(DEVICES, 2)
three = fixture(DEVICES, 3)
two_or_three = fixture(
    [pytest.param((world, device), id=f"{world}-{device}") for world in (2, 3) for device in DEVICES]
)
two_on_cpu = fixture(["cpu"], 2)
three_on_cpu = fixture(["cpu"], 3)
one_on_gpu = fixture(["cuda"], 1)
KERNELS = ["cuda"] if torch.cuda.is_available() else ["interpreter"]
two_by_kernels = fixture(KERNELS, 2)
three_by_kernels = fixture(KERNELS, 3)
