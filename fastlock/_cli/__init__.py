"""The command `fastlock`."""
