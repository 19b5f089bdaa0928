"""Several processes: synchronized training, and calibration and search that share their work."""
