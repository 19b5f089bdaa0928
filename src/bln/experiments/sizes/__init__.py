"""Accuracy against batch size: a residual net with an ordinary recipe, on CIFAR-10 and on handwritten digits."""
