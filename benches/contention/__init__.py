"""Contention: processes full of threads or tasks that want the same names, started together, every grant logged.

A client is one caller, a thread or a task; those of a process share what its rival opened. Clients act and write times
into shared memory (``clients``, ``log``), the parent reads them afterwards and computes everything from them
(``analysis``), also for a process that was killed. The scenarios are in ``contests``; ``workers`` gives the
orders, ``worker`` carries them out.
"""
