"""The paper's experiments, two further studies and their reports; the command `bln` runs them."""
