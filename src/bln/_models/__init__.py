"""Operations on whole torch models."""
