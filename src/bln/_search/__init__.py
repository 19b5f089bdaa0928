"""Finding the configuration of statistics (step 12 of the paper).

vectorized  several configurations in one pass, by torch.vmap
recurrent   a rule for torch.vmap that recurrent modules lack
evaluate    many configurations on a mini-batch: together or separately
scores      losses and metrics of torch models; score averages those of any framework
objective   scores over all the data, remembered
arrange     the same samples in other mini-batches
descent     a configuration for each layer, by coordinate descent
study       the same by Optuna
result      what was found; table prints it
search      the function; it needs torch, as result, table and score do not
"""

from .result import Row, SearchResult

__all__ = ["Row", "SearchResult"]
