"""What nets make of corrupted images, by norm, request size and statistics: ``bln reproduce shift``.

Nets are trained on clean CIFAR-10, as those of `bln.experiments.sizes` are. Test images are corrupted as in CIFAR-10-C
(`corruptions`). Each net answers requests of several sizes, shuffled or sorted by label, with several configurations
(`evaluation`). `study` puts these together, and goes on where it was stopped.
"""
