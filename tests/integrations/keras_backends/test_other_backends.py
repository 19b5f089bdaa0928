"""A saved model is loaded by another backend as it was, in a process of its own."""

import os
import subprocess
import sys

import keras
import numpy as np

import bln.keras
from bln.keras import BatchLayerNormalization
from pages import ROOT

NEXT = {"tensorflow": "jax", "jax": "torch", "torch": "tensorflow"}  # each saves for one and loads from one
LOAD = """
import sys
import keras
import numpy as np
import bln.keras

folder = sys.argv[1]
model = keras.models.load_model(folder + "/model.keras", compile=False)
inputs = np.load(folder + "/inputs.npz")
np.save(folder + "/outputs.npy", model.predict([inputs["tokens"], inputs["images"]], batch_size=12, verbose=0))
print(keras.backend.backend(), *(layer.config for layer in bln.keras.layers(model).values()))
"""


def test_it_predicts_the_same_there(rng, tmp_path):
    """Masks and an open length, groups and mixed precision; a configuration for each layer."""
    tokens, images = keras.Input((None,), dtype="int32"), keras.Input((4, 4, 3))
    x = keras.layers.Embedding(20, 6, mask_zero=True)(tokens)
    x = keras.layers.LSTM(5)(BatchLayerNormalization(position_shape=9, momentum=None, name="a")(x))
    y = BatchLayerNormalization(axis=1, groups=2, gamma_regularizer="l2", name="b")(images)
    z = keras.layers.Concatenate()([x, keras.layers.Flatten()(y)])
    z = BatchLayerNormalization(dtype="mixed_bfloat16", name="c")(z)
    model = keras.Model([tokens, images], keras.layers.Dense(1, dtype="float32")(z))
    model.compile("adam", loss="mse")
    inputs = {"tokens": rng.integers(0, 20, (12, 7)), "images": rng.normal(size=(12, 4, 4, 3)).astype(np.float32)}
    inputs["tokens"][:, 0] = 1
    model.fit(list(inputs.values()), rng.normal(size=(12, 1)), epochs=2, batch_size=4, verbose=0)
    bln.keras.configure(model, {"a": "FTFF", "b": "TFTF"})
    configs = {name: str(layer.config) for name, layer in bln.keras.layers(model).items()}
    assert sorted(configs.values()) == ["FTFF", "TFTF", "TTFF"]

    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "inputs.npz", **inputs)
    other = NEXT[keras.backend.backend()]
    environment = {**os.environ, "KERAS_BACKEND": other, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [other, *configs.values()]
    expected = model.predict(list(inputs.values()), batch_size=12, verbose=0)
    # One layer works in bfloat16: a value that two backends round apart differs by its epsilon, 1/128.
    np.testing.assert_allclose(np.load(tmp_path / "outputs.npy"), expected, atol=0.02)
