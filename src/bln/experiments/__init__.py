"""The paper's experiments: data, models, protocol, training, report; the `bln` command drives them."""
