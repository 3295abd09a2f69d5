"""`fastlock bench family`: what each kind of lock costs beside the plain one, and beside what users have today.

`options` and `command` are the command line, `cases` the table of what is measured, and the modules named there open
the locks; `pairs`, `contests` and `renewals` are the three parts, each the parent's end of processes that run `worker`.
`judge` holds the bounds, `report` and `document` are what comes out.
"""
