"""The command `fastlock`: what its subcommands share, and the table of them. Never here: anything that a program which
imports fastlock needs."""
