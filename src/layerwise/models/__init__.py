"""Reading a module: its params as a table, what classes are known to hold, attention logits, plain names. torch, no memory of its own."""
