"""The protocol of locks, without I/O: what is sent, what replies mean, who is next. Values in, values out.

Never here: sockets, asyncio, threads, sleep.
"""
