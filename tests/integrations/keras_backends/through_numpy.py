"""The Keras layer through NumPy, whichever backend runs."""

from __future__ import annotations

from contextlib import nullcontext

import keras
import numpy as np

from bln.keras import BatchLayerNormalization

BACKEND = keras.backend.backend()
numpy = keras.ops.convert_to_numpy


def tensor(mask):
    return None if mask is None else keras.ops.array(mask)


def double():
    """Where JAX has float64."""
    if BACKEND != "jax":
        return nullcontext()
    import jax

    return jax.enable_x64(True)


class Keras:
    def make(self, features, *, channel_dim, eps=1e-4, mix_eps=None, momentum=0.1, **options):
        old = None if momentum is None else 1 - momentum
        return BatchLayerNormalization(channel_dim, epsilon=eps, mix_epsilon=mix_eps, momentum=old, **options)

    def set_parameters(self, layer, gamma, beta):
        layer.gamma.assign(gamma)
        layer.beta.assign(beta)

    def train(self, layer, x, mask=None):
        return self._call(layer, x, mask, True)

    def infer(self, layer, x, mask=None):
        return self._call(layer, x, mask, False)

    def _call(self, layer, x, mask, training):
        if not layer.built:
            layer.build(x.shape)
        if BACKEND != "jax":
            return numpy(layer(x, training=training, mask=tensor(mask)))
        trainable, others = ([v.value for v in vs] for vs in (layer.trainable_variables, layer.non_trainable_variables))
        y, updated = self._compiled(layer, training)(trainable, others, x, tensor(mask))
        return self._updated(layer, updated, y)

    def _compiled(self, layer, training):
        """JAX compiles each operation it meets for the first time: all at once takes a tenth of the time."""
        import jax

        if not hasattr(layer, "compiled"):
            layer.compiled = {}
        if training not in layer.compiled:

            def call(trainable, others, x, mask):
                return layer.stateless_call(trainable, others, x, training=training, mask=mask)

            def backward(trainable, others, x, mask, dy):
                def at(x, trainable):
                    return call(trainable, others, x, mask)

                y, back, updated = jax.vjp(at, x, trainable, has_aux=True)
                return y, updated, back(dy)

            layer.compiled = {**layer.compiled, training: jax.jit(call), "backward": jax.jit(backward)}
        return layer.compiled[training]

    def _updated(self, layer, values, y):
        for variable, value in zip(layer.non_trainable_variables, values, strict=True):
            variable.assign(value)
        return numpy(y)

    def get(self, layer, name):
        return numpy(getattr(layer, name))

    def train_backward(self, layer, x, dy, mask=None):
        if BACKEND == "tensorflow":
            import tensorflow as tf

            leaf, mask = tf.constant(x), tensor(mask)
            with tf.GradientTape() as tape:
                tape.watch(leaf)
                y = layer(leaf, training=True, mask=mask)
            found = tape.gradient(y, [leaf, layer.gamma.value, layer.beta.value], dy)
        elif BACKEND == "torch":
            import torch

            leaf = torch.tensor(x, requires_grad=True)
            y = layer(leaf, training=True, mask=tensor(mask))
            found = torch.autograd.grad(y, [leaf, layer.gamma.value, layer.beta.value], torch.tensor(dy))
            y = y.detach()
        else:
            self._compiled(layer, True)
            others = [variable.value for variable in layer.non_trainable_variables]
            trainable = [layer.gamma.value, layer.beta.value]
            y, updated, (dx, rest) = layer.compiled["backward"](trainable, others, x, tensor(mask), dy)
            self._updated(layer, updated, y)
            found = (dx, *rest)
        return (numpy(y), *(np.asarray(numpy(value)) for value in found))
