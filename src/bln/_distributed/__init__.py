"""Several processes: what they tell each other in training, and in operations on whole models."""
