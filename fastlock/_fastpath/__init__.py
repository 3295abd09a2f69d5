"""Short cuts through protocol and transport for the most frequent cases. Without this folder all works, slower. Never
here: decisions, which are the protocol's."""
