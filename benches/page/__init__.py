"""The page of a benchmark run, piece by piece: charts, tables, their words, the style sheet and the script that draws.

Takes values, returns markup and charts. Nothing here reads a file, a clock or a server, and the page loads nothing.
"""
