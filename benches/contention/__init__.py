"""Contention: processes full of threads or tasks that want the same names, started together, every grant logged.

Law: workers act and write times into shared memory (``lanes``, ``log``), the parent reads them afterwards and computes
everything out of them (``analysis``): also what a process that was killed had done. What is played stands in
``contests``; ``workers`` gives the orders, ``worker`` carries them out.
"""
