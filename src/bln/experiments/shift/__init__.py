"""The study of shifted data: accuracy on corrupted images by norm, request size and statistics.

Nets are trained on clean CIFAR-10 by the recipe of `bln.experiments.sizes`. Test images are corrupted as in CIFAR-10-C
(`corruptions`). Each net answers requests of several sizes, shuffled or sorted by label, in several configurations
(`evaluation`). `choice` chooses priors without labels. `study` puts these together, and resumes where it was stopped.
"""
