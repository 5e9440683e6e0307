"""What the user wrote: update rules and trainer settings. Standard library only."""
