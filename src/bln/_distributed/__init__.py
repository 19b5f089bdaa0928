"""Statistics over several processes: synchronized training, and operations on whole models that ranks share.

group     The process group that a layer was given.
messages  What ranks tell each other of a mini-batch, and how it is joined.
train     Training on statistics over all ranks.
ranks     Processes that do one thing together, such as calibrating.
"""
