"""The study of accuracy against batch size: a residual net on CIFAR-10 and on digits, a transformer on IMDB."""
