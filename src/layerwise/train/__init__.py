"""The trainer: a GPT, bytes to train it on, a loop one can read, metrics and a report. Prints nothing; `cli` does."""
