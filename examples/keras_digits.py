"""BLN in Keras: train on scikit-learn's digits, calibrate, search the configuration on validation data, test once.

KERAS_BACKEND=jax python examples/keras_digits.py     # or tensorflow, or torch

"""

from __future__ import annotations

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import bln.keras
from bln.keras import BatchLayerNormalization

EPOCHS, BATCH = 5, 25


def main() -> None:
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).reshape(-1, 8, 8, 1).astype("float32")
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.3, random_state=0, stratify=labels)
    x, x_valid, y, y_valid = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)

    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(8, 3, activation="tanh"),
        BatchLayerNormalization(),  # after the nonlinearity
        keras.layers.Flatten(),
        keras.layers.Dense(48, activation="tanh"),
        BatchLayerNormalization(),
        keras.layers.Dense(10, activation="softmax"),
    ])  # fmt: skip
    model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=2)

    def batches(x, y):
        return [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, len(x), BATCH)]

    bln.keras.calibrate(model, batches(x, y))
    found = bln.keras.search(
        model, batches(x_valid, y_valid), loss="sparse_categorical_crossentropy", metrics="accuracy"
    )
    print(found)
    chosen = found.apply(model)
    _, accuracy = model.evaluate(x_test, y_test, batch_size=BATCH, verbose=0)
    print(f"Keras on {keras.backend.backend()}: {chosen.label} chosen on validation data, test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
