"""The page of a benchmark run, piece by piece: charts, tables, their words, the style sheet and the script that draws.

The modules take values and return markup and charts. Nothing here reads a file, a clock or a server, and the page loads
nothing.
"""
