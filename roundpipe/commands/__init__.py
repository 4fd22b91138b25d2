"""The commands of ``python -m roundpipe``, one a file. Each adds its parser and runs, giving an exit code.

Exit codes: 0 all is well, 1 the command found something wrong, 2 an argument cannot be used.
"""
