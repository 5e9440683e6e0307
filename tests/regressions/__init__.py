"""Mistakes that another system made, by name: each has a check of the real library, and is put into the library to show
that the check sees it.

`docs/regressions.md` tells what each name stands for.
"""
