"""The page of a benchmark run, piece by piece: drawings, tables, their words, and what makes them look and read well.

Law: values in, markup out. Nothing here reads a file, a clock or a server, and nothing on the page asks a network.
"""
