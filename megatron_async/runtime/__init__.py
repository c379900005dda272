"""An asynchronous run of one rank: its engine, the interpreter of its lists, what it counts."""
