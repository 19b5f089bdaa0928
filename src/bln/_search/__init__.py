"""The search for a configuration of statistics (step 12 of the paper)."""

from .result import Row, SearchResult

__all__ = ["Row", "SearchResult"]
