"""Contention: processes full of threads or tasks that want the same names, started together, every grant logged.

A client is one caller, a thread or a task; those of a process share what its rival opened. Clients act and write times
into shared memory (``clients``, ``log``), the parent reads them afterwards and computes everything out of them
(``analysis``): also what a process that was killed had done. What is run is in ``contests``; ``workers`` gives the
orders, ``worker`` carries them out.
"""
