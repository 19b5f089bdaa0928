"""Keras and Flax where torch cannot be imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
import numpy as np
import bln
x, y = np.random.normal(size=(20, 5, 4)).astype("float32"), np.zeros((20, 2), "float32")
batches = [(x[:10], y[:10]), (x[10:], y[10:])]
"""
KERAS = """
import keras
import bln.keras

model = keras.Sequential([
    keras.Input((5, 4)), bln.keras.BatchLayerNormalization(groups=2, momentum=None), keras.layers.Flatten(),
    keras.layers.Dense(2),
])
model.compile("adam", "mse")
model.fit(x, y, verbose=0, callbacks=[bln.keras.ResetStatistics()])
bln.keras.calibrate(model, batches, progress=False)
result = bln.keras.search(model, batches, loss="mse", progress=False)
result.apply(model, "TTFF")
print(result)
model.predict(x, verbose=0)
"""
FLAX = """
import jax.numpy as jnp
from flax import nnx
import bln.flax

layer = bln.flax.BatchLayerNorm(4, rngs=nnx.Rngs(0))
layer(jnp.asarray(x))
layer.eval()
bln.flax.configure(layer, "FTFF")
print(layer(jnp.asarray(x)).shape)
"""
TORCH = """
for name in ("BatchLayerNorm", "convert", "transfer", "search"):
    try:
        getattr(bln, name)
    except ImportError as error:
        print(error)
"""


def run(code, backend):
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "KERAS_BACKEND": backend}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_keras_trains_calibrates_and_searches(backend):
    assert "TTFF" in run(KERAS, backend)


def test_flax_trains_and_predicts():
    assert "(20, 5, 4)" in run(FLAX, "jax")


def test_what_takes_torch_says_so():
    assert run(TORCH, "jax").splitlines() == ["No module named 'torch'"] * 4
