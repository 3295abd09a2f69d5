"""Short cuts of protocol and transport for what happens nearly always. Without this folder all works, slower."""
