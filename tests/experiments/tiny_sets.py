import hashlib

import numpy as np

TRAIN = [f"data_batch_{number}.bin" for number in range(1, 6)]
TEST = ["test_batch.bin"]


def write_cifar(folder, rng):
    """CIFAR-10 in the publisher's layout, but three images a file: what to expect of the files, and their contents."""
    place = folder / "cifar-10-batches-bin"
    place.mkdir()
    md5, content = {}, {}
    for name in TRAIN + TEST:
        labels = rng.integers(0, 10, (3, 1), np.uint8)
        pixels = rng.integers(0, 256, (3, 3072), np.uint8)
        record = np.concatenate([labels, pixels], 1).tobytes()
        (place / name).write_bytes(record)
        md5[name] = hashlib.md5(record).hexdigest()
        content[name] = pixels.reshape(3, 3, 32, 32), labels[:, 0]
    return md5, content
