"""The command line. Exit codes: 0 fine, 1 failed, 2 bad input, 3 the environment lacks something, 128 + N
after signal N."""
