"""The search for a configuration of statistics (step 12 of the paper).

rank        bln.search: compares configurations, and ranks them.
objective   Scores configurations over all the data.
evaluate    Scores many configurations on one mini-batch, together or separately.
vectorize   Runs several configurations in one pass, by torch.vmap.
measure     Losses and metrics.
rebatch     The same samples in other mini-batches.
descend     A configuration for each layer, by coordinate descent.
study       The same by Optuna.
score       The scores of a configuration; imports no torch, as result and table.
result      What a search found.
table       Prints a result.
"""

from .result import SearchResult
from .score import Row

__all__ = ["Row", "SearchResult"]
