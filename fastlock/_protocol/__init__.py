"""The protocol of locks, without I/O: what is asked, what answers mean, who is next. Values in, values out."""
