"""The search for a configuration of statistics (step 12 of the paper).

rank        bln.search: compares configurations, and ranks them.
objective   Scores configurations over all the data.
evaluate    Scores many configurations on one mini-batch, together or separately.
vectorize   Runs several configurations in one pass, by torch.vmap.
measure     Losses and metrics.
rebatch     The same samples in other mini-batches.
per_layer   A configuration for each layer, by coordinate descent or Optuna.
result      Scores, rows and what a search found; imports no torch, as table.
table       Prints a result.
"""

from .result import Row, SearchResult

__all__ = ["Row", "SearchResult"]
