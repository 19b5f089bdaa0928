"""The search for a configuration of statistics (step 12 of the paper)."""
