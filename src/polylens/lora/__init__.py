"""Many adapters in one forward: which rows are whose, and two ways to add what they add."""
