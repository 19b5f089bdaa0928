"""Statistics over several processes: synchronized training, and operations on whole models that ranks share."""
