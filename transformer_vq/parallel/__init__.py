"""Many processes: who has which part of the work, and what they tell each other."""
