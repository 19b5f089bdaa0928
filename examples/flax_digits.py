"""BLN in Flax NNX: train on scikit-learn's digits, choose the configuration on validation data, test once.

python examples/flax_digits.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import bln.flax
from bln.flax import BatchLayerNorm

EPOCHS, BATCH = 5, 25


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 8, (3, 3), padding="VALID", rngs=rngs)
        self.norm1 = BatchLayerNorm(8, position_shape=(6, 6), rngs=rngs)  # known before jit
        self.dense = nnx.Linear(8 * 6 * 6, 48, rngs=rngs)
        self.norm2 = BatchLayerNorm(48, rngs=rngs)
        self.out = nnx.Linear(48, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm1(jnp.tanh(self.conv(x)))  # after the nonlinearity
        x = self.norm2(jnp.tanh(self.dense(x.reshape(len(x), -1))))
        return self.out(x)


def loss(model: Net, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@nnx.jit
def step(model: Net, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    value, gradients = nnx.value_and_grad(loss)(model, x, y)
    optimizer.update(model, gradients)
    return value


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).reshape(-1, 8, 8, 1).astype("float32")
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.3, random_state=0, stratify=labels)
    x, x_valid, y, y_valid = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.003), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    for epoch in range(EPOCHS):
        order = rng.permutation(len(x))[: len(x) // BATCH * BATCH].reshape(-1, BATCH)
        losses = [float(step(model, optimizer, x[chosen], y[chosen])) for chosen in order]
        print(f"epoch {epoch + 1}: training loss {np.mean(losses):.3f}")

    def batches(x, y):
        return [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, len(x), BATCH)]

    bln.flax.calibrate(model, batches(x, y))
    found = bln.flax.search(
        model, batches(x_valid, y_valid), loss=optax.softmax_cross_entropy_with_integer_labels, metrics="accuracy"
    )
    chosen = found.apply(model)
    model.eval()
    accuracy = float((model(jnp.asarray(x_test)).argmax(1) == y_test).mean())
    print(f"Flax: {chosen.label} chosen on validation data, test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
